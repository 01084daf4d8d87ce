# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Recompute the tokens that the question looks at (ProphetKV).

Source: ProphetKV (arXiv 2602.02579): mean over all layers, heads and question tokens of the question's attention over
the stored KV.
Differs: the question is all that is behind the last chunk; stored keys are at their true positions in the prompt; the
probe is charged.
"""

import torch
from torch import Tensor

from .attention import Attention
from .base import Selector, TokenView


class QueryAttention(Selector):
    """Attention of the question over the stored KV."""

    needs_kv = False
    needs_question = True

    def score(self, view: TokenView) -> Tensor:
        """Mean over the layers of what each token receives, `[batch, tokens]`."""
        scores: list[Tensor] = []

        def receive(layer: int, seen: Attention, weights: Tensor) -> None:
            asking = view.is_question(seen.columns)
            shares = weights[..., seen.past :] * asking[:, None, :, None]
            received = shares.mean(dim=1).sum(dim=1) / asking.sum(dim=1, keepdim=True)
            scores.append(received.to(view.columns.device))

        view.probe(receive, range(view.num_layers))
        return view.at_tokens(torch.stack(scores).mean(dim=0))
