# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Ratio 1.0 does not depend on what is stored: rubbish behind layer 0 changes no logit beyond noise."""

from dataclasses import replace

import torch

from ..store import ChunkStore
from ..store.chunk import ChunkKV
from .base import Check, Outcome
from .floor import distance
from .subject import ModelUnderTest


class Ratio1IgnoresStore(Check):
    """Every slot is overwritten by fresh K and V before anyone looks at it."""

    def measure(self, subject: ModelUnderTest) -> Outcome:
        """Largest absolute difference of the question's logits from a full prefill."""
        prompt, store = subject.prompts[0], ChunkStore.open("memory://")
        for ids in prompt.chunks:
            store.put(_rubbish(subject.chunk(ids)))
        got = subject.blend([prompt], 1.0, store)
        if got.cache.report.loaded_chunks < len(prompt.chunks):
            return Outcome(float("inf"), 0.0, "the rubbish was not read, so nothing was shown")
        return Outcome(distance(got.asked, subject.asked([prompt])), subject.logit_tolerance)


def _rubbish(chunk: ChunkKV) -> ChunkKV:
    """The same chunk with large random K and V at every layer but 0, where a guard would notice."""
    generator = torch.Generator().manual_seed(0)
    spoilt = [
        tuple((10 * torch.randn(states.shape, generator=generator)).to(states) for states in layer)
        for layer in chunk.layers[1:]
    ]
    return replace(chunk, layers=(chunk.layers[0], *spoilt))
