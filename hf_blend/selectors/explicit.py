# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Recompute the tokens that are named, in their order: for research and for looking closely at one prompt."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from .base import Selector, TokenView


class Explicit(Selector):
    """Option `columns`: places in the prompt, the most important first; those that are not named come last."""

    needs_kv = False
    defaults: ClassVar[Mapping[str, Any]] = {"columns": ()}

    def score(self, view: TokenView) -> Tensor:
        """Minus the place in the list, `[batch, tokens]`."""
        scores = torch.full(view.columns.shape, -float(len(self.options["columns"])), device=view.columns.device)
        for place, column in enumerate(self.options["columns"]):
            scores = scores.masked_fill(view.columns == int(column), -float(place))
        return scores
