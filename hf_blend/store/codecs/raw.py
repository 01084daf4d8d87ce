# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""K and V as they were computed, bit for bit."""

from collections.abc import Mapping

import torch
from torch import Tensor

from .base import Codec

__all__ = ["Raw"]


class Raw(Codec):
    """Packs nothing."""

    is_exact = True

    def pack(self, kind: str, states: Tensor) -> tuple[Tensor, ...]:
        """The states themselves."""
        return (states,)

    def unpack(self, kind: str, packed: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """The states themselves; they know their dtype."""
        return packed[""]
