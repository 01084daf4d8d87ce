# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Pairs of neighbouring dimensions (2i, 2i + 1), the layout of Cohere and GPT-J."""

from torch import Tensor

from .base import InterleavedStyle


class Interleaved(InterleavedStyle):
    """The table repeats each angle twice in a row; with partial rotation only the first `width` dimensions turn."""

    @staticmethod
    def pairs(table: Tensor) -> Tensor:
        """Keep every second entry of `[…, tokens, width]`."""
        return table[..., ::2]
