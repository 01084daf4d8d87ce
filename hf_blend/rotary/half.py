# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Pairs of dimensions (i, i + width/2), the layout of Llama, Mistral, Qwen, Gemma and most others (GPT-NeoX style)."""

from torch import Tensor

from .base import RotaryStyle


class Half(RotaryStyle):
    """The table repeats each angle in both halves; with partial rotation only the first `width` dimensions turn."""

    @staticmethod
    def pairs(table: Tensor) -> Tensor:
        """Keep the first half of `[…, tokens, width]`, which the second repeats."""
        return table[..., : table.shape[-1] // 2]

    @staticmethod
    def split(keys: Tensor, pairs: int) -> tuple[Tensor, Tensor]:
        """View `[…, tokens, head_dim]` as its first and second `pairs` dimensions."""
        return keys[..., :pairs], keys[..., pairs : 2 * pairs]
