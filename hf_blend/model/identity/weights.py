# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The tensors of a model in the one form that all its storage layouts share, and a digest of all their bytes."""

import copy
import functools
import hashlib
import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import UnsupportedModelError
from ..placement import offload_hooks
from .structure import counted_attributes, has_moving_rotary_tables

QUANTISED_BY_ITS_STATE = ("absmax", "code", "offset")
_ROW_LANES = 1 << 17  # 1 MiB at a time on the CPU, so that the work stays in its caches
_ROWS_ON_ACCELERATOR = 64
_MIX = 0x9E3779B97F4A7C15 - (1 << 64)


def weight_digest(model: nn.Module) -> dict[str, Any]:
    """Read all weights once."""
    digest, dtypes = hashlib.sha256(), dict[str, int]()
    for path, module, tensor in tensors(model):
        loaded = loaded_values(path, module, tensor)
        kind = str(torch.uint8 if hasattr(tensor, "quant_state") else loaded.dtype)
        dtypes[kind] = dtypes.get(kind, 0) + loaded.nbytes
        state = getattr(loaded, "quant_state", None)
        is_four_bits = hasattr(state, "blocksize") and getattr(state, "absmax", None) is not None
        for name, plain in _four_bits(loaded, state) if is_four_bits else stored_parts(module, loaded):
            row = [path + name, str(plain.dtype), list(plain.shape), checksum(plain)]
            digest.update(json.dumps(row, separators=(",", ":")).encode() + b"\n")
    return {"dtypes": dtypes, "weights": digest.hexdigest()}


def tensors(model: nn.Module) -> Iterator[tuple[str, nn.Module, Tensor]]:
    """Parameters, buffers and tensors in plain attributes, with their paths and modules, each once.

    Never through `state_dict()`: it rewrites the 4-bit weights of a live model.
    """
    moving = has_moving_rotary_tables(model)
    seen: set[int] = set()
    for path, module in model.named_modules():
        plain = {name: vars(module)[name] for name in counted_attributes(module)}
        for name, tensor in (*module._parameters.items(), *module._buffers.items(), *plain.items()):
            if not isinstance(tensor, Tensor) or id(tensor) in seen or (moving and name.endswith("inv_freq")):
                continue
            seen.add(id(tensor))
            yield f"{path}.{name}", module, tensor


def stored_parts(module: nn.Module, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The plain tensors whose bytes a weight is made of, as they lie in memory, with the ends of their names."""
    yield from _plain_tensors("", tensor)
    if tensor is module._parameters.get("weight"):  # of bitsandbytes: neither parameters nor buffers
        scales, state = getattr(tensor, "SCB", None), getattr(tensor, "quant_state", None)
        found = [("SCB", getattr(getattr(module, "state", None), "SCB", None) if scales is None else scales)]
        for prefix, level in (("", state), ("state2.", getattr(state, "state2", None))):
            found += [(prefix + name, getattr(level, name, None)) for name in QUANTISED_BY_ITS_STATE]
        yield from ((f".{name}", scale) for name, scale in found if isinstance(scale, Tensor))


def loaded_values(path: str, module: nn.Module, tensor: Tensor) -> Tensor:
    """A weight itself, or what accelerate put elsewhere."""
    if not tensor.is_meta:
        return tensor
    for candidate in offload_hooks(module):
        weights = getattr(candidate, "weights_map", None)
        if weights is not None:
            return weights[path.rpartition(".")[2]]
    raise UnsupportedModelError(
        f"{path} is on the meta device and no offload hook holds its values, so {type(module).__name__} cannot be "
        "told from another. Load the weights first."
    )


def _four_bits(tensor: Tensor, state: Any) -> Iterator[tuple[str, Tensor]]:
    """4-bit codes in their first order, and the scale of each block in bfloat16: the same before and after a forward.

    On a CPU with AVX512-BF16 the first forward of bitsandbytes interleaves the codes, and rounds and transposes the
    scales; what it keeps of them is bfloat16.
    """
    from bitsandbytes import functional

    codes, scales = tensor.data, state.absmax
    if getattr(state, "packing_format_for_cpu", False):
        plain = copy.copy(state)
        plain.original_nested = False  # quantising the scales again would round them once more
        codes, _ = functional._convert_weight_packed_for_cpu_inverse(codes, plain)
        scales = scales.T.reshape(-1)
    elif state.nested:
        scales = functional.dequantize_blockwise(scales, state.state2) + state.offset
    yield ".codes", codes.contiguous().view(torch.uint8).reshape(-1)
    yield ".scales", scales.float().to(torch.bfloat16).reshape(-1)
    yield ".values", state.code


def _plain_tensors(path: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A tensor, or the plain tensors that a wrapping class (torchao, quanto) is made of."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None or type(tensor) in (Tensor, nn.Parameter):
        yield path, tensor
        return
    for name in flatten()[0]:
        yield from _plain_tensors(f"{path}.{name}", getattr(tensor, name))


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
