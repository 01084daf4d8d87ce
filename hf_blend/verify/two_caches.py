# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Two requests and a plain forward that interleave on one model do not see each other."""

import torch
from torch import Tensor

from ..cache.blend_cache import BlendCache
from ..prompt.pieces import Prompt
from .base import Check, Outcome
from .floor import device_of, distance
from .subject import ModelUnderTest

RATIO, STEPS = 0.3, 3


class TwoCaches(Check):
    """Prefills and single steps in turn, against the same requests one after the other."""

    def measure(self, subject: ModelUnderTest) -> Outcome:
        """Largest absolute difference of any logits; 0 is allowed."""
        prompts = subject.prompts[:2]
        wanted = [_steps(subject, [prompt])[0] for prompt in prompts]
        got = _steps(subject, prompts)
        return Outcome(
            max(distance(a, b) for pair in zip(wanted, got, strict=True) for a, b in zip(*pair, strict=True)), 0.0
        )


@torch.no_grad()
def _steps(subject: ModelUnderTest, prompts: list[Prompt]) -> list[list[Tensor]]:
    """Logits of each request and of a plain forward beside them, at the prefill and at some steps."""
    device = device_of(subject.model)
    caches: list[BlendCache] = [subject.cache(RATIO) for _ in prompts]
    inputs = [subject.inputs(cache, [prompt]) for cache, prompt in zip(caches, prompts, strict=True)]  # all watch now
    plain = subject.model(torch.tensor([subject.ids(11, seed=3)], device=device)).logits.float()
    seen = [[plain, subject.forward(cache, given, 1)] for cache, given in zip(caches, inputs, strict=True)]
    for step in range(STEPS):
        for cache, logits in zip(caches, seen, strict=True):
            ids = torch.tensor([subject.ids(1, seed=step)], device=device)
            logits.append(subject.model(ids, past_key_values=cache, use_cache=True).logits.float())
    return seen
