# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Eight bits for each value: half of bfloat16, with a scale for each channel of K and for each token of V.

Source: KIVI (ICML 2024), which found that K has outliers in some channels and V has none. Differs: eight bits instead
of two, symmetric, and the scales of K are over the whole chunk, which is stored and loaded as one.

Error: a value is off by at most 1/254 of the largest magnitude in its channel of the chunk (K) or in its token (V),
and by what rounding to the dtype of the states adds. In no layer of the bundled reference model is that more than
0.6 % of their norm.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from ...errors import StoreError
from .base import Codec, Part

__all__ = ["Int8"]

_LARGEST = 127
_REDUCED = {"k": 1, "v": 2, "p": 1}  # the axis of `[kv_heads, tokens, head_dim]` that shares a scale


class Int8(Codec):
    """The nearest of 255 steps between the largest magnitude under a scale and its negative."""

    def parts(self, kind: str) -> tuple[Part, ...]:
        """Steps, and a scale in float32 for each channel of a head, or for each token of a head."""
        return (Part(), Part(".scale", 2, 1 if kind == "v" else None))

    def pack(self, kind: str, states: Tensor) -> tuple[Tensor, ...]:
        """Round to steps."""
        axis = _REDUCED[kind]
        values = states.float()
        scale = values.abs().amax(dim=axis) / _LARGEST
        steps = values / scale.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(axis)
        return steps.round_().clamp_(-_LARGEST, _LARGEST).to(torch.int8), scale

    def unpack(self, kind: str, packed: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Multiply steps by their scale."""
        steps, scale = packed[""], packed[".scale"]
        axis = _REDUCED[kind]
        if steps.dtype != torch.int8 or scale.dtype != torch.float32:
            raise StoreError(f"steps are {steps.dtype} and scales {scale.dtype}, expected int8 and float32.")
        if tuple(scale.shape) != (steps.shape[0], steps.shape[3 - axis]):
            raise StoreError(f"scales {tuple(scale.shape)} do not fit steps {tuple(steps.shape)}.")
        return (steps.float() * scale.unsqueeze(axis)).to(dtype)
