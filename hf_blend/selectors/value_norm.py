# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Recompute the tokens with the longest stored values in the last layer: a rule for the bundled chain model alone.

On real text it repairs nothing. SmolLM2-135M-Instruct on 40 prompts of HotpotQA, KL divergence to a full prefill over
ten tokens: 0.98 of full reuse's at a ratio of 0.15, where tokens chosen at random leave 0.89 and `kv-deviation` 0.44.
It does well on `chains` only because the values of that model's referring tokens are long in the last layer.

Source: value norms, as query-agnostic cache compression scores tokens.
"""

from torch import Tensor

from .base import Selector, TokenView, norms


class ValueNorm(Selector):
    """Length of the last layer's stored values; no question, nothing computed, no options."""

    needs_kv = False

    def score(self, view: TokenView) -> Tensor:
        """The length over heads and width, `[batch, tokens]`."""
        return norms(view.stored_alone(view.num_layers - 1)[1])
