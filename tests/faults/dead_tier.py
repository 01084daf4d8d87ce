# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A tier answers nothing, or only errors, or late: the disk before it serves what it has, the rest is a miss."""

from hf_blend import plugins
from hf_blend.store import ChunkStore
from hf_blend.testing import FaultyTier

from .fault import FaultClass, Verdict
from .world import drawn_chunk

DEAD = {"open.io": 0.5, "open.timeout": 0.5, "put.io": 1.0, "stat.io": 1.0, "names.io": 1.0, "delete.io": 1.0}
CHUNKS, ABSENT = 12, 1000


class _Far(FaultyTier):
    """Behind the disk, on another machine."""

    def __init__(self, seed: int) -> None:
        super().__init__(plugins.load("store.tiers", "memory")(), seed, DEAD, delay_s=1e-5)
        self.name, self.is_local = "far", False


class DeadTier(FaultClass):
    """Two tiers, of which the farther is dead; every call to it is a fault."""

    share = 0.02

    def setup(self) -> None:
        """Open the near one."""
        self._disk = plugins.load("store.tiers", "disk")(self.folder, durable=False)

    def inject(self, count: int) -> None:
        """Put, ask for what is there and for what is not, look for it by content."""
        far = _Far(self.random.randrange(1 << 30))
        store = ChunkStore([], [self._disk, far])
        while far.counts.total() < count:
            chunk = drawn_chunk(self.random.randrange(CHUNKS))
            before = far.counts.copy()
            store.put(chunk)
            verdicts = [self.find(store, chunk), self.expect(store, drawn_chunk(ABSENT))]
            store.find(chunk.key.fingerprint, chunk.key.chunk_prefix_ids, chunk.key.token_ids)
            worst = next((one for one in verdicts if one in (Verdict.WRONG, Verdict.LOST)), Verdict.RIGHT)
            for fault, times in (far.counts - before).items():
                self.record(fault, worst, count=times)
