# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Pairs of neighbouring dimensions under a table that holds each angle once: Llama 4, DeepSeek-V2, GPT-J up to 5.23.

The first two hand complex numbers to their layers; see `hf_blend.rotary.base`.
"""

from torch import Tensor

from .base import InterleavedStyle


class InterleavedNarrow(InterleavedStyle):
    """As `interleaved`, but the table is not doubled."""

    @staticmethod
    def pairs(table: Tensor) -> Tensor:
        """Keep all of `[…, tokens, width]`."""
        return table
