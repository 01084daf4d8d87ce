# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Recompute tokens drawn at random: the control that every rule must beat at equal cost."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from .base import Selector, TokenView


class Random(Selector):
    """One score per seed and place behind the first reusable token: luck depends neither on batch nor on ratio.

    Option `free_layers`: draw at the check layer, so that the layers before it are computed for all tokens, as a
    selector that compares K and V has them computed; otherwise before the first layer.
    """

    defaults: ClassVar[Mapping[str, Any]] = {"free_layers": False}

    def __init__(self, options: Mapping[str, Any], seed: int = 0) -> None:
        """See `Selector`."""
        super().__init__(options, seed)
        self.needs_kv = self.choice("free_layers", (False, True))

    def score(self, view: TokenView) -> Tensor:
        """Uniform scores, `[batch, tokens]`, seeded by the config's seed."""
        none = torch.iinfo(view.columns.dtype).max
        start = view.columns.masked_fill(~view.reusable, none).amin(dim=1, keepdim=True)  # padding does not count
        places = (view.columns - start).clamp_min(0)
        generator = torch.Generator().manual_seed(self.seed)
        luck = torch.rand(int(places.max()) + 1, generator=generator)
        return luck.to(places.device)[places]
