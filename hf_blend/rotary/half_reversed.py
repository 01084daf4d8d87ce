# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Pairs of dimensions (i + width/2, i): the turn goes the other way round, the layout of nanochat."""

from torch import Tensor

from .base import RotaryStyle


class HalfReversed(RotaryStyle):
    """As `half`, with the members of each pair in the other order."""

    @staticmethod
    def split(keys: Tensor, pairs: int) -> tuple[Tensor, Tensor]:
        """View `[…, tokens, head_dim]` as its second and first `pairs` dimensions."""
        return keys[..., pairs : 2 * pairs], keys[..., :pairs]
