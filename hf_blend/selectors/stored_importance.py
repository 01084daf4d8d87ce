# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Recompute the tokens that look important in the stored KV alone: no question, nothing computed.

Source: the scores of query-agnostic cache compression, such as key norms (Devoto et al., arXiv 2406.11430: tokens with
short keys receive attention; QCFuse's demo takes long ones) and value norms.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from .base import Selector, TokenView, layer_numbers, norms


class StoredImportance(Selector):
    """Length of stored K or V. Options: `on` (k, v or kv: the product), `order` ("longest", "shortest"), `layers`."""

    needs_kv = False
    defaults: ClassVar[Mapping[str, Any]] = {"on": "k", "order": "longest", "layers": "all"}

    def score(self, view: TokenView) -> Tensor:
        """Mean over the layers of the length, `[batch, tokens]`; each layer is scaled to a mean of 1."""
        parts = {"k": (0,), "v": (1,), "kv": (0, 1)}[self.choice("on", ("k", "v", "kv"))]
        sign = {"longest": 1.0, "shortest": -1.0}[self.choice("order", ("longest", "shortest"))]
        total = torch.zeros(view.columns.shape, device=view.columns.device)
        for layer in layer_numbers(self.options["layers"], view.num_layers):
            stored = view.stored_alone(layer)
            length = torch.stack([norms(stored[part]) for part in parts]).prod(dim=0) * view.reusable
            total += length / (length.sum(dim=1, keepdim=True) / view.reusable.sum(dim=1, keepdim=True) + 1e-20)
        return sign * total
