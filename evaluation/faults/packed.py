# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Entries of the codec int8: flipped bits, cuts, scales of another chunk, names of other codecs."""

from hf_blend.store import ChunkStore
from hf_blend.store.packing import kept_as
from hf_blend.store.tiers.base import BytesSource

from .base import FaultClass, name_of, tiny_chunk
from .memory import MemoryTier

CODEC = "int8"
CHUNKS = 8
SCALES_BYTES = 16  # of keys of one head and four channels, between the steps of the keys and those of the values


class Packed(FaultClass):
    """Whatever is handed out must be bit for bit what the codec made of the chunk."""

    share = 0.04

    def inject(self, count: int) -> None:
        """Damage, ask, and put back."""
        tier = MemoryTier()
        store = ChunkStore([], [tier], codec=CODEC)
        contents = {}
        for number in range(CHUNKS):
            store.put(chunk := tiny_chunk(number))
            contents[number] = (kept_as(chunk, CODEC), tier.objects[name_of(chunk.key)].content)
        for number in range(count):
            chunk, good = contents[self.random.randrange(CHUNKS)]
            _, other = contents[self.random.randrange(CHUNKS)]
            kind = ("bit", "cut", "scales of another", "codec")[number % 4]
            bad = self._damaged(kind, good, other)
            if bad == good:
                continue
            tier.objects[name_of(chunk.key)] = BytesSource(bad)
            if self.expect(store, chunk):
                self.outcome.wrong_kv += 1
            self.hit(kind)

    def _damaged(self, kind: str, good: bytes, other: bytes) -> bytes:
        if kind == "bit":
            bad, bit = bytearray(good), self.random.randrange(len(good) * 8)
            bad[bit // 8] ^= 1 << bit % 8
            return bytes(bad)
        if kind == "cut":
            return good[: self.random.randrange(len(good))]
        if kind == "codec":
            return good.replace(b"int8:F32", self.random.choice((b"int8:F64", b"int8:I32", b"int9:F32", b"raw:F32 ")))
        at = len(good) - 8 - 8 - SCALES_BYTES  # behind them: steps and scales of the values
        return good[:at] + other[at : at + SCALES_BYTES] + good[at + SCALES_BYTES :]
