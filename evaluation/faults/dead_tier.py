# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A tier answers nothing, or only errors, or late: the tiers before it serve what they have, the rest is a miss."""

from hf_blend.store import ChunkStore
from hf_blend.testing import FaultyTier

from .base import FaultClass, tiny_chunk
from .memory import MemoryTier

DEAD = {"open.io": 0.5, "open.timeout": 0.5, "put.io": 1.0, "stat.io": 1.0, "names.io": 1.0, "delete.io": 1.0}


class _Far(FaultyTier):
    """Behind the other tier, on another machine."""

    def __init__(self, seed: int) -> None:
        super().__init__(MemoryTier(), seed, DEAD, delay_s=1e-5)
        self.name, self.is_local = "far", False


class DeadTier(FaultClass):
    """Two tiers, of which the farther is dead."""

    share = 0.04

    def inject(self, count: int) -> None:
        """Put, ask for what is there and for what is not, delete."""
        far = _Far(self.random.randrange(1 << 30))
        store = ChunkStore([], [MemoryTier(), far])
        while far.counts.total() < count:
            chunk, absent = tiny_chunk(self.random.randrange(500)), tiny_chunk(-1 % (1 << 30))
            store.put(chunk)
            if not self.expect(store, chunk):
                self.outcome.lost += 1
            self.expect(store, absent)
            store.find(chunk.key.fingerprint, chunk.key.sink_ids, chunk.key.token_ids)
        for fault, times in far.counts.items():
            self.outcome.faults += times
            self.outcome.regions[fault] = self.outcome.regions.get(fault, 0) + times
