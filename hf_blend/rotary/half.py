# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Pairs of dimensions (i, i + width/2), the layout of Llama, Mistral, Qwen, Gemma and most others (GPT-NeoX style)."""

from .base import RotaryStyle


class Half(RotaryStyle):
    """The table repeats each angle in both halves; with partial rotation only the first `width` dimensions turn."""
