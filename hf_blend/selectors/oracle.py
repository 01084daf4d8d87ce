# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Recompute the tokens whose stored KV is farthest from that of a full prefill, over all later layers. For research.

It runs the full prefill that blending is meant to save, and its charged budget says so: it shows what a rule that sees
true deviations could reach, not a way to be fast.
"""

import torch
from torch import Tensor

from .base import Selector, TokenView, squared_distance


class Oracle(Selector):
    """Deviation of K and V from the truth, each layer's scaled by its size so that none drowns the others."""

    needs_full_prefill = True

    def score(self, view: TokenView) -> Tensor:
        """Sum over the layers from the check layer on of relative squared distances, `[batch, tokens]`."""
        total = torch.zeros(view.columns.shape, device=view.columns.device)
        for layer, truth in enumerate(view.full_prefill()):
            if layer >= view.layer:
                total += sum(map(_relative, truth, view.stored_at(layer))).to(total.device)
        return total


def _relative(truth: Tensor, stored: Tensor) -> Tensor:
    distance = squared_distance(truth, stored.to(truth.device))
    return distance / truth.float().square().sum(dim=(1, 3)).mean(dim=1, keepdim=True).clamp_min(1e-20)
