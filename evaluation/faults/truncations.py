# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""An entry ends too early or too late, or a part of it reads as zeros, as after a loss of power."""

from hf_blend.store import ChunkStore
from hf_blend.store.tiers.base import BytesSource

from .base import FaultClass, content_of, name_of, tiny_chunk
from .memory import MemoryTier


class Truncations(FaultClass):
    """Every length; every tail and every block of zeros; bytes behind the end."""

    share = 0.2

    def inject(self, count: int) -> None:
        """Damage, ask, and put back."""
        chunk, tier = tiny_chunk(self.random.randrange(100)), MemoryTier()
        store, good = ChunkStore([], [tier]), content_of(chunk)
        for number in range(count):
            kind = ("cut", "zero tail", "zero block", "longer")[number % 4]
            at = self.random.randrange(len(good))
            length = self.random.randint(1, len(good) - at)
            bad = {
                "cut": good[:at],
                "zero tail": good[:at] + bytes(len(good) - at),
                "zero block": good[:at] + bytes(length) + good[at + length :],
                "longer": good + bytes(length),
            }[kind]
            if bad == good:  # those bytes are zeros anyway
                continue
            tier.objects[name_of(chunk.key)] = BytesSource(bad)
            if self.expect(store, chunk):
                self.outcome.wrong_kv += 1
            self.hit(kind)
