# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""One number for all the bits of a tensor, found on its own device."""

import functools

import torch
from torch import Tensor, nn

_ROW_LANES = 1 << 17  # 1 MiB at a time on the CPU, so that the work stays in its caches
_ROWS_ON_ACCELERATOR = 64
_MIX = 0x9E3779B97F4A7C15 - (1 << 64)


@torch.no_grad()
def checksum(tensor: Tensor) -> str:
    """Sum up the bits of a tensor on its own device, so that any changed, moved or swapped value changes the sum.

    The bytes are taken as 64-bit lanes; each is mixed, multiplied by an odd number that belongs to its position, and
    added. All steps are integers that wrap around, so the order of adding does not matter, and a single changed lane
    always shows.
    """
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    step, multipliers = _rows_at_once(data.device) * _ROW_LANES * 8, _multipliers(data.device)
    whole = data.numel() // (_ROW_LANES * 8) * _ROW_LANES * 8
    blocks = [data[start : min(start + step, whole)] for start in range(0, whole, step)]
    sums = [_summed(_lanes(block).view(-1, _ROW_LANES), multipliers) for block in blocks]
    if whole < data.numel() or not sums:
        sums.append(_summed(_lanes(data[whole:])[None], multipliers))
    total = torch.cat(sums)
    while len(total) > 1:
        width = min(len(total), _ROW_LANES)
        total = _summed(nn.functional.pad(total, (0, -len(total) % width)).view(-1, width), multipliers)
    return f"{total.item() % (1 << 64):016x}"


def _rows_at_once(device: torch.device) -> int:
    return 1 if device.type == "cpu" else _ROWS_ON_ACCELERATOR


def _lanes(data: Tensor) -> Tensor:
    """Bytes as int64, filled up with zeros; a tensor's length is written beside its sum."""
    if data.numel() % 8:
        data = nn.functional.pad(data, (0, -data.numel() % 8))
    if data.storage_offset() % 8 or data.data_ptr() % 8:
        data = data.clone()
    return data.view(torch.int64)


def _summed(lanes: Tensor, multipliers: Tensor) -> Tensor:
    """One sum per row of `[rows, lanes]`."""
    mixed = lanes * _MIX
    mixed ^= mixed >> 32
    mixed *= multipliers[: lanes.shape[1]]
    return mixed.sum(dim=1)


@functools.lru_cache(maxsize=16)
def _multipliers(device: torch.device) -> Tensor:
    """Odd numbers without pattern, one per lane of a row."""
    numbers = torch.arange(1, _ROW_LANES + 1, device=device) * _MIX
    for shift in (31, 27):
        numbers ^= numbers >> shift
        numbers *= _MIX
    return numbers | 1
