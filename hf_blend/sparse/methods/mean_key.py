# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Share of attention that each block's mean key would get, mean over the heads."""

from typing import Any

from torch import Tensor

from .base import BlockMethod


class MeanKey(BlockMethod):
    """Each head's scores sum to 1, so all heads count the same."""

    def represent(self, keys: Tensor, prepared: Any) -> Tensor:
        """Mean key, `[batch, kv_heads, blocks, head_dim]`."""
        return keys.mean(dim=3)

    def score(self, queries: Tensor, blocks: Tensor, prepared: Any) -> Tensor:
        """Softmax over the blocks in each head, then the mean."""
        scores = queries @ blocks.transpose(2, 3)[:, :, None] / queries.shape[-1] ** 0.5
        return scores.float().softmax(dim=-1).mean(dim=(1, 2))
