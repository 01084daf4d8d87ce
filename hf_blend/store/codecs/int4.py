# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Four bits for each value: less than a third of bfloat16, with a scale and a least value for each group of 32.

Source: KIVI (ICML 2024), which groups K by channel over neighbouring tokens and V by token over neighbouring channels.
Differs: four bits instead of two, and all tokens of a chunk are packed, the last ones too.

Error: a value is off by at most half a step, which is a fifteenth of the range of its group, and by what rounding the
least value and the step to bfloat16 adds. In no layer of the bundled reference model is that more than 7.9 % of their
norm, 13 times that of int8: measure the answers of your model before you rely on it.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from ...errors import StoreError
from ..nibbles import GROUP, group_width, packed, unpacked
from .base import Codec, Part

__all__ = ["Int4"]


class Int4(Codec):
    """The nearest of 16 steps between the least and the greatest value of a group of 32."""

    values_per_item = 2

    def parts(self, kind: str) -> tuple[Part, ...]:
        """Pairs of steps, and a step and a least value in bfloat16 for each group."""
        axis = 1 if kind == "v" else None
        return (Part(), Part(".step", 3, axis), Part(".low", 3, axis))

    def pack(self, kind: str, states: Tensor) -> tuple[Tensor, ...]:
        """Round to steps."""
        tokens, width = states.shape[1:]
        if width % 2:
            raise StoreError(f"states of width {width} came to the codec int4, which expects even ones. Use int8.")
        if kind == "v":
            pairs, step, low = packed(states.unflatten(2, (-1, group_width(width))), 3)
            return pairs.flatten(2), step.squeeze(3), low.squeeze(3)
        missing = -tokens % GROUP  # the last group is filled up with its last token, which changes no range
        whole = torch.cat([states, states[:, -1:].expand(-1, missing, -1)], 1)
        pairs, step, low = packed(whole.unflatten(1, (-1, GROUP)), 2)
        return pairs.flatten(1, 2)[:, :tokens].contiguous(), step.squeeze(2), low.squeeze(2)

    def unpack(self, kind: str, packed: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Steps times their size, on top of the least value."""
        pairs, step, low = packed[""], packed[".step"], packed[".low"]
        heads, tokens, half = pairs.shape
        groups = 2 * half // group_width(2 * half) if kind == "v" else -(-tokens // GROUP)
        shape = (heads, tokens, groups) if kind == "v" else (heads, groups, 2 * half)
        layout = (pairs.dtype, step.dtype, low.dtype), tuple(step.shape), tuple(low.shape)
        if layout != ((torch.uint8, torch.bfloat16, torch.bfloat16), shape, shape):
            raise StoreError(
                f"steps and least values {layout} came with bytes {tuple(pairs.shape)}, expected {shape}."
            )
        out = torch.empty((heads, tokens, 2 * half), dtype=torch.float32, device=pairs.device)
        if kind == "v":
            pairs, step, low, whole = (tensor.unflatten(2, (groups, -1)) for tensor in (pairs, step, low, out))
            unpacked(pairs, step, low, whole)
        else:
            step, low = (tensor.repeat_interleave(GROUP, 1)[:, :tokens] for tensor in (step, low))
            unpacked(pairs, step, low, out)
        return out.to(dtype)
