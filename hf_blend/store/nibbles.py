# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Four bits for each value, two values in a byte: shared by the codec int4 and by caches that keep K and V so."""

import torch
from torch import Tensor

GROUP = 32  # values that share a scale
STEPS = 15


def group_width(width: int) -> int:
    """How many neighbouring channels of V share a scale: 32 where these divide the width, else all."""
    return GROUP if width % GROUP == 0 else width


def packed(states: Tensor, axis: int) -> tuple[Tensor, Tensor, Tensor]:
    """Round to steps, two of them in a byte: one of the first half of the last axis, and one of the second."""
    values = states.float()
    low, high = values.amin(axis, keepdim=True).bfloat16(), values.amax(axis, keepdim=True)
    step = ((high - low.float()) / STEPS).bfloat16()
    steps = (values - low.float()) / step.float().clamp_min(torch.finfo(torch.float32).tiny)
    steps = steps.round_().clamp_(0, STEPS).to(torch.uint8)
    first, second = steps.chunk(2, -1)
    return first | second << 4, step, low


def unpacked(pairs: Tensor, step: Tensor, low: Tensor, out: Tensor) -> Tensor:
    """Write what was packed to `out`, in its dtype; its last axis is twice as long as that of the bytes."""
    first, second = out.chunk(2, -1)
    first.copy_(pairs & STEPS)
    second.copy_(pairs >> 4)
    return out.mul_(step).add_(low)
