# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Recompute most in the chunks that look most beyond themselves (Cache-Craft's cache fix overhead).

Source: Cache-Craft (arXiv 2502.15734): a chunk's share grows with the logistic function of inter- over
intra-attention; within it, the tokens with the highest inter-attention.
Differs: chunks are stored alone here, so no statistics of an earlier prompt exist; both attentions are those of layer
0, where queries and keys depend on the token alone, and are computed at use and charged. The shares divide up the
asked ratio instead of replacing it, so that costs stay comparable (`adaptive=False`: every chunk has the same share).
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from .base import Selector, TokenView, by_turns


class InterAttention(Selector):
    """Attention to what stands before the chunk. Option `adaptive`: shares by chunk."""

    needs_attention = True
    needs_pairs = False
    at_layer_0 = True
    defaults: ClassVar[Mapping[str, Any]] = {"adaptive": True}

    def score(self, view: TokenView) -> Tensor:
        """Turns of the chunks by share, and in each the highest inter-attention first, `[batch, tokens]`."""
        seen = view.attention()
        before = torch.zeros_like(view.columns, dtype=torch.float32)
        own, ahead = torch.zeros_like(before), torch.zeros_like(before)
        for rows in seen.blocks():
            weights = seen.weights(rows).mean(dim=1)
            inside = view.same_chunk(rows, weights.shape[-1] - seen.past)
            own[:, rows] = (weights[..., seen.past :] * inside).sum(dim=-1)
            sink = weights.gather(2, seen.first_key()[:, None, None].expand(-1, weights.shape[1], 1))[..., 0]
            before[:, rows] = weights.sum(dim=-1) - own[:, rows] - sink
            ahead[:, rows] = seen.visible(rows)[:, 0].sum(dim=-1) - view.offset[:, rows] - 1.0
        return by_turns(before, view.chunk, self._shares(view, before, own, ahead))

    def _shares(self, view: TokenView, before: Tensor, own: Tensor, ahead: Tensor) -> Tensor:
        """The share of each token's chunk: its length times the logistic function of how far it looks beyond.

        Shapes: before `[batch, tokens]`, own `[batch, tokens]`, ahead `[batch, tokens]`.
        """
        shares = view.chunk_tokens.clamp_min(1).float()
        if not self.options["adaptive"]:
            return shares
        for number in view.chunk[view.chunk >= 0].unique().tolist():
            member = (view.chunk == number).float()
            outer = (before * member).sum(1) / ((ahead * member).sum(1) + 1e-9)
            inner = (own * member).sum(1) / (member.sum(1).square() + 1e-9)
            shares = torch.where(member > 0, shares * torch.sigmoid(outer / (inner + 1e-9))[:, None], shares)
        return shares
