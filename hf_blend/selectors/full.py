# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Recompute everything: a full prefill through the sparse path, the exact and slow end of the scale."""

import torch
from torch import Tensor

from .base import Selector, TokenView


class Full(Selector):
    """Chooses every token, whatever the ratio."""

    needs_kv = False

    def count(self, ratio: float, tokens: int) -> int:
        """All of them."""
        return tokens

    def score(self, view: TokenView) -> Tensor:
        """Zeros, `[batch, tokens]`."""
        return torch.zeros(view.columns.shape, device=view.columns.device)
