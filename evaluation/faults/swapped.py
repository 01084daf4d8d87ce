# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Whole and valid bytes in the wrong place: another entry, another body, tensors that changed places."""

from hf_blend.store import ChunkStore
from hf_blend.store.tiers.base import BytesSource

from .base import FaultClass, content_of, name_of, tiny_chunk
from .memory import MemoryTier


class Swapped(FaultClass):
    """What is swapped has the same length, so nothing but its content tells."""

    share = 0.1

    def inject(self, count: int) -> None:
        """Swap, ask, and put back."""
        tier = MemoryTier()
        store = ChunkStore([], [tier])
        for number in range(count):
            one, two = (tiny_chunk(self.random.randrange(start, start + 1000)) for start in (0, 1000))
            mine, other = content_of(one), content_of(two)
            body = 8 + int.from_bytes(mine[:8], "little")
            split = self.random.randrange(body, len(mine))
            kind, bad = (
                ("entry", other),
                ("body", mine[:body] + other[body:]),
                ("half of a body", mine[:split] + other[split:]),
                ("tensors", mine[:-64] + mine[-32:] + mine[-64:-32]),
            )[number % 4]
            if bad == mine:
                continue
            tier.objects[name_of(one.key)] = BytesSource(bad)
            if self.expect(store, one):
                self.outcome.wrong_kv += 1
            self.hit(kind)
