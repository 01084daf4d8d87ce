# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The same request gives the same bits twice, with chunks computed or loaded."""

from ..store import ChunkStore
from .base import Check, Outcome
from .floor import distance
from .subject import ModelUnderTest

RATIO = 0.3


class SameBits(Check):
    """First with a cold store, then twice with a warm one."""

    def measure(self, subject: ModelUnderTest) -> Outcome:
        """Largest absolute difference of logits, K or V; 0 is allowed."""
        store = ChunkStore.open("memory://")
        first, *others = [subject.blend(subject.prompts, RATIO, store) for _ in range(3)]
        errors = []
        for other in others:
            errors.append(distance(first.asked, other.asked))
            for one, two in zip(first.layers, other.layers, strict=True):
                errors += [distance(a, b) for a, b in zip(one, two, strict=True)]
        return Outcome(max(errors), 0.0)
