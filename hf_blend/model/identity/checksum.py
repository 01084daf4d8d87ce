# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""One number for all the bits of a tensor, found on its own device."""

import functools

import torch
from torch import Tensor, nn

ROW_LANES = 1 << 17  # 1 MiB at a time, so that the work stays in the caches of a CPU
_MIX = 0x9E3779B97F4A7C15 - (1 << 64)


@torch.no_grad()
def checksum(tensor: Tensor) -> str:
    """Sum up the bits of a tensor on its own device, so that any changed, moved or swapped value changes the sum.

    The bytes are taken as 64-bit lanes; each is mixed, multiplied by an odd number that belongs to its position, and
    added. All steps are integers that wrap around, so the order of adding does not matter, and a single changed lane
    always shows.
    """
    rows = tensor.detach().contiguous().view(-1).view(torch.uint8).split(ROW_LANES * 8)
    total = _summed(torch.stack([_summed(_lanes(row)) for row in rows]))
    return f"{total.item() % (1 << 64):016x}"


def _lanes(data: Tensor) -> Tensor:
    """Bytes as int64, filled up with zeros; a tensor's length is written beside its sum."""
    if data.numel() % 8:
        data = nn.functional.pad(data, (0, -data.numel() % 8))
    if data.storage_offset() % 8 or data.data_ptr() % 8:
        data = data.clone()
    return data.view(torch.int64)


def _summed(lanes: Tensor) -> Tensor:
    mixed = lanes * _MIX
    mixed ^= mixed >> 32
    mixed *= _multipliers(lanes.device)[: len(lanes)]
    return mixed.sum()


@functools.lru_cache(maxsize=16)
def _multipliers(device: torch.device) -> Tensor:
    """Odd numbers without pattern, one for each lane of a row, and for each row."""
    numbers = torch.arange(1, ROW_LANES + 1, device=device) * _MIX
    for shift in (31, 27):
        numbers ^= numbers >> shift
        numbers *= _MIX
    return numbers | 1
