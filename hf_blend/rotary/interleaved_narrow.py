# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Pairs of neighbouring dimensions under a table that holds each angle once: Llama 4, DeepSeek-V2, GPT-J, CodeGen.

The first two hand complex numbers to their layers; see `hf_blend.rotary.tables`.
"""

from torch import Tensor

from .base import RotaryStyle


class InterleavedNarrow(RotaryStyle):
    """As `interleaved`, but the table is not doubled."""

    @staticmethod
    def pairs(table: Tensor) -> Tensor:
        """Keep all of `[…, tokens, width]`."""
        return table

    @staticmethod
    def split(keys: Tensor, pairs: int) -> tuple[Tensor, Tensor]:
        """View `[…, tokens, head_dim]` as its even and odd dimensions, as far as they turn."""
        return keys[..., 0 : 2 * pairs : 2], keys[..., 1 : 2 * pairs : 2]
