# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Recompute the tokens that the question attends to most and that are likely to be wrong.

What an answer loses is, to first order, the sum over tokens of how much it takes from each, times how wrong each is.
The first factor is measured: a pass of the question over the stored KV gives the attention that each token gets, times
the length of its value. Sixteen of the question's rows do, half of them its last. The second is estimated by the
token's place, as `ramp` does, at the power of one half.

Source: ours, of ProphetKV (arXiv 2602.02579) for the pass of the question and VATP (2406.12335) for attention times
the length of the value. Measured in benchmarks/results/robust.json.
"""

from functools import cache

import torch
from torch import Tensor

from .attention import Attention
from .base import Selector, TokenView

ROWS = 16  # of the question; 8 do worse, all no better
POWER = 0.5  # of `ramp`'s estimate; 0.25 does as well, and attention alone worse on SmolLM2


class ExpectedError(Selector):
    """Attention of the question times the length of the value times the root of `ramp`'s estimate of the error."""

    needs_kv = False
    needs_question = True

    def score(self, view: TokenView) -> Tensor:
        """What the question takes from each token, mean over the layers, times its likely error, `[batch, tokens]`."""
        received: list[Tensor] = []
        asking = cache(lambda columns: _equal_shares(view.is_question(columns)))  # most layers have the same columns

        def receive(layer: int, seen: Attention, weights: Tensor) -> None:
            of_asking = weights * asking(seen.columns)[:, None, :, None]
            received.append(seen.taken(of_asking)[:, seen.past :].to(view.columns.device))

        view.probe(receive, range(view.num_layers), rows=ROWS)
        likely_error = view.likely_error() ** POWER
        if not received:  # the model attends without transformers' AttentionInterface
            return likely_error
        return view.at_tokens(torch.stack(received).mean(dim=0)) * likely_error


def _equal_shares(rows: Tensor) -> Tensor:
    """`[batch, rows]` bool → float32: 1 over their number where True, else 0."""
    return rows / rows.sum(dim=1, keepdim=True)
