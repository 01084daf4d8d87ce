# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Quest: upper bound of the products in a block, from the least and largest key of each channel (arXiv 2406.10774)."""

from typing import Any

import torch
from torch import Tensor

from .base import BlockMethod


class Quest(BlockMethod):
    """No key of a block can score higher than its bound. Quest selects per head; here the heads' mean selects."""

    def represent(self, keys: Tensor, prepared: Any) -> Tensor:
        """Least and largest, `[batch, kv_heads, blocks, 2 x head_dim]`."""
        return torch.cat([keys.amin(dim=3), keys.amax(dim=3)], dim=-1)

    def score(self, queries: Tensor, blocks: Tensor, prepared: Any) -> Tensor:
        """Positive channels against the largest, negative ones against the least."""
        signed = torch.cat([queries.clamp_max(0), queries.clamp_min(0)], dim=-1)
        return (signed.mean(dim=2) @ blocks.transpose(2, 3)).mean(dim=1)
