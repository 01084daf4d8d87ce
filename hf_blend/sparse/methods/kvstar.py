# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""KVStar: the largest channels of each key head, tokens merged in pairs, attention summed per block (UCM)."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from .base import BlockMethod


class Kvstar(BlockMethod):
    """A smaller copy of the keys.

    `channel_share` of the channels are kept, those of the largest mean size over the prompt's keys; `merged_tokens`
    neighbours become their mean; the raw products, without the scaling of attention, go through a softmax over the
    whole context.
    """

    defaults: ClassVar[Mapping[str, Any]] = {"channel_share": 0.25, "merged_tokens": 2}

    def prepare(self, keys: Tensor) -> Any:
        """Which channels, `[batch, kv_heads, kept]`."""
        kept = max(1, round(self.options["channel_share"] * keys.shape[-1]))
        return keys.abs().mean(dim=(2, 3)).topk(kept, dim=-1).indices

    def represent(self, keys: Tensor, prepared: Any) -> Tensor:
        """`[batch, kv_heads, blocks, merged, kept]`."""
        batch, heads, blocks, tokens, _ = keys.shape
        index = prepared[:, :, None, None].expand(batch, heads, blocks, tokens, prepared.shape[-1])
        kept = keys.gather(-1, index)
        merged = [group.mean(dim=3, keepdim=True) for group in kept.split(self.options["merged_tokens"], dim=3)]
        return torch.cat(merged, dim=3)

    def score(self, queries: Tensor, blocks: Tensor, prepared: Any) -> Tensor:
        """Attention of all heads, summed over each block."""
        batch, heads, group, rows, _ = queries.shape
        index = prepared[:, :, None, None].expand(batch, heads, group, rows, prepared.shape[-1])
        scores = queries.gather(-1, index) @ blocks.flatten(2, 3).transpose(2, 3)[:, :, None]
        weights = scores.float().softmax(dim=-1).unflatten(-1, blocks.shape[2:4])
        return weights.sum(dim=-1).mean(dim=(1, 2))
