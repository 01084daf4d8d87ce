# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A tier that fails at random in every way it can, under a store that is used at random."""

from hf_blend import plugins
from hf_blend.errors import StoreError
from hf_blend.store import ChunkKV, ChunkStore
from hf_blend.testing import FAULTS, FaultyTier

from .damage import clear
from .fault import FaultClass, Verdict
from .world import drawn_chunk

COSTLY = {"put.lost", "put.flip", "put.torn", "put.full", "open.other", "read.flip", "read.zero", "read.truncate"}
CHUNKS = 6


class FaultyTierFaults(FaultClass):
    """One run without what may cost an entry (lies, and a full device, which evicts), and one with all faults."""

    share = 0.03

    def inject(self, count: int) -> None:
        """Use the store until enough went wrong."""
        chunks = [drawn_chunk(number) for number in range(CHUNKS)]
        for honest in (True, False):
            rates = {fault: 0.04 for fault in FAULTS if not (honest and fault in COSTLY)}
            clear(self.folder)
            disk = plugins.load("store.tiers", "disk")(self.folder, durable=False)
            tier = FaultyTier(disk, self.random.randrange(1 << 30), rates)
            store, acknowledged = ChunkStore([], [tier]), set[int]()
            while tier.counts.total() < count / 2:
                before = tier.counts.copy()
                verdict = self._use(store, chunks, acknowledged)
                for fault, times in (tier.counts - before).items():
                    self.record(fault, verdict, count=times)
            if honest:
                tier.set_rates({})
                for number in acknowledged:
                    verdict = self.find(store, chunks[number])
                    if verdict is not Verdict.RIGHT:
                        self.note("afterwards", verdict, "acknowledged, and no fault may have cost it")

    def _use(self, store: ChunkStore, chunks: list[ChunkKV], acknowledged: set[int]) -> Verdict:
        number = self.random.randrange(CHUNKS)
        chunk = chunks[number]
        action = self.random.choice(("put", "put", "get", "get", "delete", "find", "contains"))
        if action == "put":
            before = store.stats()["stored"]
            store.put(chunk)
            if store.stats()["stored"] != before:
                acknowledged.add(number)
        elif action == "get":
            return self.expect(store, chunk)
        elif action == "delete":
            acknowledged.discard(number)
            try:
                store.delete(chunk.key)
            except StoreError:
                return Verdict.REFUSED
        elif action == "find":
            store.find(chunk.key.fingerprint, chunk.key.chunk_prefix_ids, chunk.key.token_ids)
        else:
            store.contains(chunk.key)
        return Verdict.MISS
