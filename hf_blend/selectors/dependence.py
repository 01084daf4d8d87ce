# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Recompute the tokens whose values the next token depends on most.

A pass of the question over the stored KV ends in a likeliest next token. Its log probability is differentiated by the
stored values: length of the gradient times length of the value, summed over layers and heads. Attention counts each
head and layer alike; the gradient knows what becomes of it.

Source: ours, of ProphetKV (arXiv 2602.02579) for the pass of the question and gradient times input (1605.01713).
Measured in benchmarks/results/robust.json.
"""

from torch import Tensor

from .. import plugins
from .base import Selector, TokenView

ROWS = 24  # of the question; 16 do worse on Qwen2.5, all no better


class Dependence(Selector):
    """Gradient of the next token's log probability times value; `expected-error` where there is no gradient."""

    needs_kv = False
    needs_question = True

    def score(self, view: TokenView) -> Tensor:
        """How much the next token depends on each token's values, `[batch, tokens]`."""
        dependence = view.value_gradients(ROWS)
        if dependence is None:
            scores: Tensor = plugins.load("selectors", "expected-error")({}).score(view)
            return scores
        return view.take(dependence)
