# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""GSA: query times mean key of the block, mean over the heads (UCM's GSA, with one slot per block)."""

from typing import Any

from torch import Tensor

from .base import BlockMethod


class Gsa(BlockMethod):
    """Sums raw scores over heads, so heads with large keys count more."""

    def represent(self, keys: Tensor, prepared: Any) -> Tensor:
        """Mean key, `[batch, kv_heads, blocks, head_dim]`."""
        return keys.mean(dim=3)

    def score(self, queries: Tensor, blocks: Tensor, prepared: Any) -> Tensor:
        """Mean over heads of the products: that of the mean query of each key head."""
        return (queries.mean(dim=2) @ blocks.transpose(2, 3)).mean(dim=1)
