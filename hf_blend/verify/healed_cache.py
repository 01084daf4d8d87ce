# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A check of `BlendCache.heal`: behind a healed cache a further turn is that of a full prefill."""

from dataclasses import replace

import torch

from ..errors import ConfigError
from ..model.anatomy import full_cache, stock_cache
from ..model.cache_keyword import cache_argument
from ..model.checks import CheckResult, check, inconclusive, refused
from ..model.placement import input_device
from .model_under_test import ModelUnderTest, distance

TURN_TOKENS = 8
FIRST_TOKENS = 13  # are healed by a call of their own


@check()
@torch.no_grad()
def heal(subject: ModelUnderTest) -> CheckResult:
    """A cache blended at ratio 0 and healed in two calls gives the logits of a stock full prefill in its next turn.

    Each request alone, behind its own prompt, with a further turn of 8 tokens; windows have rolled on by then. Stock
    prefills all tokens at once or in the same blocks: some models add up or mask otherwise in the turn.
    """
    model, errors = subject.model, list[float]()
    for seed, prompt in enumerate(subject.prompts):
        cache, turn = subject.cache(0.0), subject.ids(TURN_TOKENS, seed=900 + seed)
        inputs = subject.inputs(cache, [prompt])
        model(**inputs, **cache_argument(model, cache), use_cache=True, logits_to_keep=1)
        if not cache.report.reusable_tokens:
            return inconclusive("no token was reused, so nothing was healed")
        try:
            first = len(prompt.ids) - cache.heal(FIRST_TOKENS)
            if left := cache.heal():
                return CheckResult(float("inf"), 0.0, f"{left} of {len(prompt.ids)} tokens were not healed")
        except ConfigError as error:
            return refused(str(error))
        device = input_device(model)
        blocks = [torch.tensor([ids], device=device) for ids in (prompt.ids[:first], prompt.ids[first:], turn)]
        got = model(blocks[-1], **cache_argument(model, cache), use_cache=True).logits[0].float()
        longer = replace(prompt, question=(*prompt.question, *turn))
        expected = [subject.plain([longer])[0].logits[-TURN_TOKENS:]]
        for stock in (full_cache(model), stock_cache(model)):
            logits = [model(ids, **cache_argument(model, stock), use_cache=True).logits[0].float() for ids in blocks]
            expected.append(logits[-1])
        errors.append(min(distance(got, logits) for logits in expected))
    return CheckResult(max(errors), subject.logit_tolerance)
