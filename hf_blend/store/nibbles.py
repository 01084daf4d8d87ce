# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Four bits for each value, two values in a byte: shared by the codec int4 and by caches that hold K and V so."""

import torch
from torch import Tensor

__all__ = ["GROUP", "group_width", "packed", "unpacked"]

GROUP = 32  # values that share a scale
STEPS = 15


def group_width(width: int) -> int:
    """How many neighbouring channels of V share a scale: 32 where these divide the width, else all."""
    return GROUP if width % GROUP == 0 else width


def packed(states: Tensor, axis: int) -> tuple[Tensor, Tensor, Tensor]:
    """Round to steps, two of them in a byte.

    Args:
        states: of any shape whose last axis has an even size.
        axis: over which a scale holds.

    Returns:
        Bytes, half as many along the last axis; step and least value of each group in bfloat16, 1 along `axis`.
    """
    values = states.float()
    low, high = values.amin(axis, keepdim=True).bfloat16(), values.amax(axis, keepdim=True)
    step = ((high - low.float()) / STEPS).bfloat16()
    steps = (values - low.float()) / step.float().clamp_min(torch.finfo(torch.float32).tiny)
    steps = steps.round_().clamp_(0, STEPS).to(torch.uint8)
    return steps[..., ::2] | steps[..., 1::2] << 4, step, low


def unpacked(pairs: Tensor, step: Tensor, low: Tensor, out: Tensor) -> Tensor:
    """Write what was packed to `out`, in its dtype; its last axis is twice as long as that of the bytes."""
    out[..., ::2], out[..., 1::2] = pairs & STEPS, pairs >> 4
    return out.mul_(step).add_(low)
