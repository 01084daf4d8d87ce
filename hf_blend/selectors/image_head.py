# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Recompute the first tokens of each image, then what is nearest to the head of any chunk (MPIC).

Source: MPIC (arXiv 2502.01960): the first k tokens of each image draw most of the attention; k = 32 there.
Differs: MPIC computes all text; here text chunks are reused too, and get what the budget leaves behind the images.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from .base import Selector, TokenView

ABOVE = 2.0**23  # tokens of the longest chunk; all scores are exact in float32


class ImageHead(Selector):
    """The first `tokens` of each image first, image by image at the same pace; then every chunk from its head on."""

    needs_kv = False
    defaults: ClassVar[Mapping[str, Any]] = {"tokens": 32}

    def score(self, view: TokenView) -> Tensor:
        """Minus the place in the chunk; above all others in the head of an image, `[batch, tokens]`."""
        scores = -view.offset.float()
        if view.images is None:
            return scores
        is_head = view.images & (view.offset < self.options["tokens"])
        return torch.where(is_head, scores + ABOVE, scores)
