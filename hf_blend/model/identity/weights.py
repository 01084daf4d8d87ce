# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The tensors of a model: a digest of all their bytes, and a sample that shows for little whether they changed.

Each request compares tensors by address, dtype and version. A fused optimizer or a write through `.data` changes none
of these, so a sample of the values of every tensor is compared too, bit for bit, with one synchronisation per model.
"""

import copy
import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ...errors import UnsupportedModelError
from ..placement import offload_hooks
from .checksum import checksum

PLAIN, QUANTISED = (Tensor, nn.Parameter), {"quant_state", "SCB"}
QUANTISED_BY_ITS_STATE = ("absmax", "code", "offset")
SAMPLED = 128  # values of each tensor, about
MOVING_TABLES = ("dynamic", "longrope")  # types of rotary embeddings that replace their frequencies as prompts grow
NamedTensor: TypeAlias = tuple[str, nn.Module, Tensor]  # with its path and the module that has it


def tensors_of(model: nn.Module) -> list[NamedTensor]:
    """Parameters and buffers of a model, each once, but for frequencies that change as prompts grow.

    Never through `state_dict()`: it rewrites the 4-bit weights of a live model.
    """
    tensors: list[NamedTensor] = []
    seen: set[Tensor] = set()
    for path, module in model.named_modules():
        rope_type = str(vars(module).get("rope_type", ""))
        is_moving = any(kind in rope_type for kind in MOVING_TABLES)
        for name, tensor in (module._parameters | module._buffers).items():
            if tensor is None or tensor in seen or (is_moving and name.endswith("inv_freq")):
                continue
            seen.add(tensor)
            tensors.append((f"{path}.{name}", module, tensor))
    return tensors


def weight_digest(tensors: Sequence[NamedTensor]) -> str:
    """Read all tensors of `tensors_of` once: a digest of their dtypes, shapes and bytes, in 64 hex digits."""
    digest = hashlib.sha256()
    for path, module, tensor in tensors:
        loaded = loaded_values(path, module, tensor)
        state = getattr(loaded, "quant_state", None)
        is_four_bits = hasattr(state, "blocksize") and getattr(state, "absmax", None) is not None
        for name, plain in _four_bits(loaded, state) if is_four_bits else stored_parts(module, loaded):
            row = [path + name, str(plain.dtype), list(plain.shape), checksum(plain)]
            digest.update(json.dumps(row, separators=(",", ":")).encode() + b"\n")
    return digest.hexdigest()


def stored_parts(module: nn.Module, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """The plain tensors whose bytes a weight is made of, as they lie in memory, with the ends of their names."""
    if type(tensor) in PLAIN and not QUANTISED & vars(tensor).keys():
        return [("", tensor)]
    parts = [*_plain_tensors("", tensor)]
    if tensor is module._parameters.get("weight"):  # of bitsandbytes: neither parameters nor buffers
        scales, state = getattr(tensor, "SCB", None), getattr(tensor, "quant_state", None)
        beside = [(".SCB", getattr(getattr(module, "state", None), "SCB", None) if scales is None else scales)]
        for prefix, level in ((".", state), (".state2.", getattr(state, "state2", None))):
            beside += [(prefix + name, getattr(level, name, None)) for name in QUANTISED_BY_ITS_STATE]
        parts += [(name, scale) for name, scale in beside if isinstance(scale, Tensor)]
    return parts


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
    if flatten is None or type(tensor) in PLAIN:
        yield path, tensor
        return
    for name in flatten()[0]:
        yield from _plain_tensors(f"{path}.{name}", getattr(tensor, name))


class WeightSample:
    """The tensors of a model at one moment: where they are, and a sample of what is in them.

    Weights that accelerate keeps elsewhere count by the map that they are fetched from.
    """

    def __init__(self, tensors: Sequence[NamedTensor]) -> None:
        """Take a sample of what `tensors_of` gave."""
        self._locations: list[tuple[Any, ...]] = []
        stored: list[Tensor] = []
        for path, module, tensor in tensors:
            if tensor.is_meta:  # accelerate makes a new one after every forward
                maps = [id(getattr(hook, "weights_map", None)) for hook in offload_hooks(module)]
                self._locations.append((path, *maps))
                continue
            for name, plain in stored_parts(module, tensor):
                version = -1 if plain.is_inference() else plain._version  # these count no versions
                self._locations.append((path, name, plain.data_ptr(), plain.dtype, version))
                stored.append(plain)
        self._samples = sampled(stored)

    def is_same(self, other: "WeightSample") -> bool:
        """Whether two samples show no difference; bits are compared, not values, so that NaN is itself."""
        if self._locations != other._locations:
            return False
        flags = [(new != old).any() for new, old in zip(self._samples, other._samples, strict=True)]
        # one question to the device, however many dtypes there are
        return not flags or not torch.stack([flag.to(flags[0].device) for flag in flags]).any().item()


@torch.inference_mode()
def sampled(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The bytes of evenly spread values of each tensor, one piece for each device and dtype."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        values = tensor.detach().reshape(-1)
        step = max(1, values.numel() // SAMPLED)
        by_kind.setdefault((tensor.device, tensor.dtype), []).append(values[::step])
    return [torch.cat(values).view(torch.uint8) for values in by_kind.values()]
