# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Recompute nothing: full reuse, the fast and wrong end of the scale (PromptCache with realignment)."""

import torch
from torch import Tensor

from .base import Selector, TokenView


class Nothing(Selector):
    """Chooses no token, whatever the ratio."""

    needs_kv = False

    def count(self, ratio: float, tokens: int) -> int:
        """Zero."""
        return 0

    def score(self, view: TokenView) -> Tensor:
        """Zeros, `[batch, tokens]`."""
        return torch.zeros(view.columns.shape, device=view.columns.device)
