# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Entries of another model, tenant, sink or text, asked for by their own name and planted under the wanted one."""

from dataclasses import replace

from hf_blend.store import ChunkStore
from hf_blend.store.tiers.base import BytesSource

from .base import FaultClass, content_of, name_of, tiny_chunk
from .memory import MemoryTier

CHANGES: dict[str, dict] = {
    "fingerprint": {"fingerprint": "cd" * 32},
    "fingerprint, one digit": {"fingerprint": "ab" * 31 + "ac"},
    "sink": {"sink_ids": ()},
    "other sink": {"sink_ids": (2,)},
    "tokens": {"token_ids": (5, 1_000_000)},
    "order of tokens": {},
    "namespace": {"namespace": "other"},
}


class Stale(FaultClass):
    """The wanted chunk was never stored, so nothing may be handed out."""

    share = 0.06

    def inject(self, count: int) -> None:
        """Store a neighbour, ask for the wanted one."""
        tier = MemoryTier()
        store, other = ChunkStore([], [tier]), ChunkStore([], [tier], namespace="other")
        for number in range(count):
            wanted = tiny_chunk(self.random.randrange(10, 100_000))
            kind = list(CHANGES)[number % len(CHANGES)]
            change = CHANGES[kind] or {"token_ids": wanted.key.token_ids[::-1]}
            near = replace(wanted, key=replace(wanted.key, **change))
            (other if kind == "namespace" else store).put(near)
            planted = BytesSource(content_of(near))
            for place in (None, planted):
                if place is not None:
                    tier.objects[name_of(wanted.key)] = place
                if store.get(wanted.key) is not None:
                    self.outcome.wrong_kv += 1
                self.hit(kind)
            tier.objects.clear()
