# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""One bit changes, anywhere in an entry: in its length, its header, its ids, its tables, its keys and values."""

from hf_blend.store import ChunkStore
from hf_blend.store.tiers.base import BytesSource

from .base import FaultClass, content_of, name_of, tiny_chunk
from .memory import MemoryTier

CHUNKS = 8
ON_DISK = 20  # one in so many goes through a file


class BitFlips(FaultClass):
    """Every bit of every entry in turn, in random order."""

    share = 0.48

    def inject(self, count: int) -> None:
        """Flip, ask, and put back."""
        chunks = [tiny_chunk(number) for number in range(CHUNKS)]
        contents = [content_of(chunk) for chunk in chunks]
        tier = MemoryTier()
        store, disk = ChunkStore([], [tier]), ChunkStore.open(self.folder, memory_bytes=0, durability="none")
        for number in range(count):
            place = self.random.randrange(CHUNKS)
            good, chunk = contents[place], chunks[place]
            bit = self.random.randrange(len(good) * 8)
            bad = bytearray(good)
            bad[bit // 8] ^= 1 << bit % 8
            if number % ON_DISK:
                tier.objects[name_of(chunk.key)] = BytesSource(bytes(bad))
                asked = store
            else:
                disk.put(chunk)
                (self.folder / "objects" / f"{name_of(chunk.key)}.safetensors").write_bytes(bad)
                asked = disk
            if self.expect(asked, chunk):
                self.outcome.wrong_kv += 1
            self.hit(_region(bit // 8, good))
        disk.close()


def _region(position: int, good: bytes) -> str:
    stop = 8 + int.from_bytes(good[:8], "little")
    if position < 8:
        return "length"
    if position < stop:
        return "header"
    return "ids" if position < stop + 24 else "tensors"
