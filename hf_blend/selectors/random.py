# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Recompute tokens drawn at random: the control that every rule must beat at equal cost."""

import torch
from torch import Tensor

from .base import Selector, TokenView


class Random(Selector):
    """One score per seed and position behind the first reusable token: luck depends neither on batch nor on ratio."""

    needs_kv = False

    def score(self, view: TokenView) -> Tensor:
        """Uniform scores, `[batch, tokens]`, seeded by the config's seed."""
        none = torch.iinfo(view.columns.dtype).max
        start = view.columns.masked_fill(~view.reusable, none).amin(dim=1, keepdim=True)  # padding does not count
        positions = (view.columns - start).clamp_min(0)
        generator = torch.Generator().manual_seed(self.seed)
        luck = torch.rand(int(positions.max()) + 1, generator=generator)
        return luck.to(positions.device)[positions]
