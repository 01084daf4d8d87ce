# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A check of `BlendCache.heal`: behind a healed cache a further turn is that of a full prefill."""

import torch

from ..errors import ConfigError
from ..model.anatomy import full_cache, stock_cache
from ..model.checks import CheckResult, check, inconclusive, refused
from ..prompt.pieces import Prompt
from .model_under_test import ModelUnderTest, continued, distance

TURN_TOKENS = 8
FIRST_TOKENS = 13  # are healed by a call of their own


@check()
@torch.no_grad()
def heal(subject: ModelUnderTest) -> CheckResult:
    """A cache blended at ratio 0 and healed in two calls gives the logits of a stock full prefill in its next turn.

    Each request alone, behind its own prompt, with a further turn of 8 tokens; windows have rolled on by then. Stock
    prefills all tokens at once or in the same blocks: some models add up or mask otherwise in the turn.
    """
    model = subject.model
    errors = []
    for seed, prompt in enumerate(subject.prompts):
        cache = subject.cache(0.0)
        subject.prefill(cache, [prompt])
        if not cache.report.reusable_tokens:
            return inconclusive("no token was reused, so nothing was healed")
        try:
            first = len(prompt.ids) - cache.heal(FIRST_TOKENS)
            if left := cache.heal():
                return CheckResult(float("inf"), 0.0, f"{left} of {len(prompt.ids)} tokens were not healed")
        except ConfigError as error:
            return refused(str(error))
        # A further turn, behind the healed cache and of stock
        turn = subject.ids(TURN_TOKENS, seed=900 + seed)
        got = continued(model, turn, cache)
        longer = Prompt.of_pieces(prompt.prefix, prompt.chunks, (*prompt.question, *turn))
        expected = [subject.plain([longer])[0].logits[-TURN_TOKENS:]]
        for stock in (full_cache(model), stock_cache(model)):
            continued(model, prompt.ids[:first], stock)
            continued(model, prompt.ids[first:], stock)
            expected.append(continued(model, turn, stock))
        errors.append(min(distance(got, logits) for logits in expected))
    return CheckResult(max(errors), subject.logit_tolerance)
