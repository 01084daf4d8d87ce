# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Neighbouring dimensions under a table that holds (sin, cos): GPT-J and CodeGen from transformers 5.24 on."""

from torch import Tensor

from .base import InterleavedStyle


class InterleavedNarrowReversed(InterleavedStyle):
    """As `interleaved_narrow`, with the members of each pair in the other order.

    Read as (cos, sin), the table of an angle is that of a right angle less it: keys turn the other way round.
    """

    @staticmethod
    def pairs(table: Tensor) -> Tensor:
        """Keep all of `[…, tokens, width]`."""
        return table

    @staticmethod
    def split(keys: Tensor, pairs: int) -> tuple[Tensor, Tensor]:
        """View `[…, tokens, head_dim]` as its odd and even dimensions, as far as they turn."""
        even, odd = InterleavedStyle.split(keys, pairs)
        return odd, even
