# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Recompute the tokens nearest to a chunk's edges (EPIC's LegoLink; HyPIC repairs both seams).

Source: EPIC (arXiv 2410.15332), section 4: the first k tokens of each chunk act as attention sinks there.
Differs: the budget is a share of the tokens, as everywhere here, so k grows until it is used up, in all chunks alike.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from .base import Selector, TokenView


class Boundary(Selector):
    """Nearest to the edge first. Option `edge`: "head" (EPIC), "tail" or "both"."""

    needs_kv = False
    defaults: ClassVar[Mapping[str, Any]] = {"edge": "head"}

    def score(self, view: TokenView) -> Tensor:
        """Minus the distance to the edge in tokens, `[batch, tokens]`."""
        head, tail = view.offset, view.chunk_tokens - 1 - view.offset
        distances = {"head": head, "tail": tail, "both": torch.minimum(head, tail)}
        return -distances[self.choice("edge", tuple(distances))].float()
