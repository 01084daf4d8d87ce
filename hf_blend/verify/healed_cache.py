# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A check of `BlendCache.heal`: behind a healed cache a further turn is that of a full prefill."""

from dataclasses import replace

import torch

from ..errors import ConfigError
from ..model.cache_keyword import cache_argument
from ..model.checks import CheckResult, check, nothing_shown, refused
from ..model.placement import input_device
from .model_under_test import ModelUnderTest, distance

TURN_TOKENS = 8
FIRST_TOKENS = 13  # are healed by a call of their own


@check()
@torch.no_grad()
def heal(subject: ModelUnderTest) -> CheckResult:
    """A cache blended at ratio 0 and healed in two calls gives the logits of a stock full prefill in its next turn.

    Each request alone, behind its own prompt, with a further turn of 8 tokens; windows have rolled on by then.
    """
    model, errors = subject.model, list[float]()
    for seed, prompt in enumerate(subject.prompts):
        cache, turn = subject.cache(0.0), subject.ids(TURN_TOKENS, seed=900 + seed)
        inputs = subject.inputs(cache, [prompt])
        model(**inputs, **cache_argument(model, cache), use_cache=True, logits_to_keep=1)
        if not cache.report.reusable_tokens:
            return nothing_shown("no token was reused, so nothing was healed")
        try:
            cache.heal(FIRST_TOKENS)
            if left := cache.heal():
                return CheckResult(float("inf"), 0.0, f"{left} of {len(prompt.ids)} tokens were not healed")
        except ConfigError as error:
            return refused(str(error))
        new = torch.tensor([turn], device=input_device(model))
        got = model(new, **cache_argument(model, cache), use_cache=True).logits.float()
        longer = replace(prompt, question=(*prompt.question, *turn))
        errors.append(distance(got[0], subject.plain([longer])[0].logits[-TURN_TOKENS:]))
    return CheckResult(max(errors), subject.logit_tolerance)
