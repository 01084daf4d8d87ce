# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Sixteen bits for each value: half of float32, with its range and eight bits of its precision.

Error: a value is off by at most 1/256 of itself. States in bfloat16 keep every bit; for those
in float16 it saves nothing and rounds all the same.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from ...errors import StoreError
from .base import Codec

__all__ = ["Bf16"]


class Bf16(Codec):
    """The nearest bfloat16."""

    def pack(self, kind: str, states: Tensor) -> tuple[Tensor, ...]:
        """Round."""
        return (states.to(torch.bfloat16),)

    def unpack(self, kind: str, packed: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Widen."""
        if packed[""].dtype != torch.bfloat16:
            raise StoreError(f"the states are {packed[''].dtype}, expected bfloat16.")
        return packed[""].to(dtype)
