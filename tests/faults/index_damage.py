# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The saved index, or the saved order of eviction, is damaged: the entries are the truth, and all are found."""

import random
from pathlib import Path

from hf_blend.store import ChunkStore
from hf_blend.store.seal import seal, seal_size

from .damage import damaged, edited_header
from .fault import FaultClass, Verdict
from .world import drawn_chunk

CHUNKS = 5


class IndexDamage(FaultClass):
    """Every way of damage in every file of the index, hostile values in it, and no index at all."""

    share = 0.01

    def setup(self) -> None:
        """Fill a store, and use it, so that there is an order."""
        self._chunks = [drawn_chunk(number) for number in range(CHUNKS)]
        with self._opened() as store:
            for chunk in self._chunks:
                store.put(chunk)
        with self._opened() as store:
            for chunk in self._chunks:
                store.get(chunk.key)
        self._good = {path: path.read_bytes() for path in sorted((self.folder / "index").iterdir())}

    def inject(self, count: int) -> None:
        """Damage, reopen, ask for everything."""
        for _ in range(count):
            path = self.random.choice(list(self._good))
            good = self._good[path]
            drawn = self.random.random()
            if drawn < 0.1:
                kind = "gone"
                path.unlink()
            elif drawn < 0.5:
                kind, change = self.random.choice((("header", edited_header), ("bytes", self._damaged)))
                kind = f"edited {kind}, with a seal that fits"
                body = change(self.random, good[seal_size(None) :])
                path.write_bytes(seal(None, body) + body)
            else:
                kind, bad = damaged(self.random, good, self.random.randbytes(len(good)))
                path.write_bytes(bad)
            self.judge(f"{path.suffix}: {kind}", self._look)
            for one, content in self._good.items():
                one.write_bytes(content)

    @staticmethod
    def _damaged(draw: random.Random, body: bytes) -> bytes:
        return damaged(draw, body, body[::-1])[1]

    def _look(self) -> Verdict:
        with self._opened() as store:
            store.find(
                self._chunks[0].key.fingerprint, self._chunks[0].key.chunk_prefix_ids, self._chunks[0].key.token_ids
            )
            if len(store) != CHUNKS or len(list(store.entries())) != CHUNKS:
                return Verdict.LOST
            store.put(self._chunks[0])
            verdicts = [self.find(store, chunk) for chunk in self._chunks]
        return next((verdict for verdict in verdicts if verdict is not Verdict.RIGHT), Verdict.RIGHT)

    def _opened(self) -> ChunkStore:
        return ChunkStore.open(Path(self.folder), memory_bytes=0, durability="none")
