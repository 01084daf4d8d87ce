# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The tensors of a model in the one form that all its storage layouts share, and a digest of all their bytes."""

import copy
import hashlib
import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import UnsupportedModelError
from ..placement import offload_hooks
from .code import checksum
from .structure import counted_attributes, has_moving_rotary_tables

QUANTISED_BY_ITS_STATE = ("absmax", "code", "offset")


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
