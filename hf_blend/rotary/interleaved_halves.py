# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Pairs of neighbouring dimensions under a table that repeats its halves, the layout of GLM, Helium and Ernie 4.5."""

from torch import Tensor

from .base import RotaryStyle


class InterleavedHalves(RotaryStyle):
    """The model spreads the first half of the table over the pairs; dimensions beyond its width do not turn."""

    @staticmethod
    def pairs(table: Tensor) -> Tensor:
        """Keep the first half of `[…, tokens, width]`, which the second repeats."""
        return table[..., : table.shape[-1] // 2]

    @staticmethod
    def split(keys: Tensor, pairs: int) -> tuple[Tensor, Tensor]:
        """View `[…, tokens, head_dim]` as its even and odd dimensions, as far as they turn."""
        return keys[..., 0 : 2 * pairs : 2], keys[..., 1 : 2 * pairs : 2]
