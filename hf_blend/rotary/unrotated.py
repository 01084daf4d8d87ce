# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Keys that carry no position (NoPE layers): moving them changes nothing."""

from torch import Tensor

from .base import RotaryStyle


class Unrotated(RotaryStyle):
    """No pair turns."""

    turns = False

    @staticmethod
    def pairs(table: Tensor) -> Tensor:
        """Keep nothing of `[…, tokens, width]`."""
        return table[..., :0]
