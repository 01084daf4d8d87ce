# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Pairs of dimensions (i, i + width) under a table that holds each angle once, the layout of GPT-OSS."""

from torch import Tensor

from .base import RotaryStyle


class HalfNarrow(RotaryStyle):
    """As `half`, but the table is not doubled."""

    @staticmethod
    def pairs(table: Tensor) -> Tensor:
        """Keep all of `[…, tokens, width]`."""
        return table
