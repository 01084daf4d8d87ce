# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The saved index, or the saved order of eviction, is damaged: the entries are the truth, and all are found."""

import shutil

from hf_blend.store import ChunkStore

from .base import FaultClass, tiny_chunk

CHUNKS = 5


class IndexDamage(FaultClass):
    """Flips, cuts and rubbish in every file of the index, and none at all."""

    share = 0.002

    def inject(self, count: int) -> None:
        """Damage, reopen, ask for everything."""
        chunks = [tiny_chunk(number) for number in range(CHUNKS)]
        shutil.rmtree(self.folder, ignore_errors=True)
        with ChunkStore.open(self.folder, memory_bytes=0, durability="none") as store:
            for chunk in chunks:
                store.put(chunk)
        good = {path: path.read_bytes() for path in sorted((self.folder / "index").iterdir())}
        for number in range(count):
            path = self.random.choice(list(good))
            bad = bytearray(good[path])
            kind = ("flip", "cut", "rubbish", "gone")[number % 4]
            if kind == "flip":
                place = self.random.randrange(len(bad) * 8)
                bad[place // 8] ^= 1 << place % 8
            elif kind == "cut":
                del bad[self.random.randrange(len(bad)) :]
            else:
                bad = bytearray(self.random.randbytes(self.random.randrange(2000)))
            path.write_bytes(bad)
            if kind == "gone":
                path.unlink()
            store = ChunkStore.open(self.folder, memory_bytes=0, durability="none")
            self.outcome.lost += len(store) != CHUNKS
            self.outcome.lost += sum(not self.expect(store, chunk) for chunk in chunks)
            self.hit(kind)
        for path, content in good.items():
            path.write_bytes(content)
