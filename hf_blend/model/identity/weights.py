# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The tensors of a model: a digest of all their bytes, and a sample that shows for little whether they changed.

Each request compares tensors by identity, address and version. An optimizer or a write through `.data` changes none of
these, so a sample of the content of every tensor is compared too, bit for bit, with one synchronisation per model.
"""

import copy
import hashlib
import json
from collections.abc import Hashable, Iterable, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ...errors import UnsupportedModelError
from ..placement import offload_hooks
from .checksum import checksum

PLAIN, QUANTISED = (Tensor, nn.Parameter), {"quant_state", "SCB"}
QUANTISED_BY_ITS_STATE = ("absmax", "code", "offset")
WHOLE_BYTES = 4 << 20  # models up to this size are compared whole
RUNS, RUN_ELEMENTS = 16, 8  # of each tensor: so many places, evenly spread, and so many elements at each
Tensors: TypeAlias = Iterable[tuple[str, nn.Module, Tensor]]  # with their paths and modules
UNVERSIONED_RUNS = 64  # for tensors whose version does not count: those made in inference mode


def weight_digest(tensors: Tensors) -> str:
    """Read all tensors of a `Structure` once: a digest of their dtypes, shapes and bytes, in 64 hex digits."""
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

    def __init__(self, tensors: Tensors) -> None:
        """Take a sample of the tensors of a `Structure`."""
        self._locations, stored = list[Hashable](), list[Tensor]()
        for path, module, tensor in tensors:
            if tensor.is_meta:  # accelerate makes a new one after every forward
                self._locations += [path, *(id(getattr(hook, "weights_map", None)) for hook in offload_hooks(module))]
                continue
            for name, plain in stored_parts(module, tensor):
                version = -1 if plain.is_inference() else plain._version
                self._locations.append((path, name, id(plain), plain.data_ptr(), version))
                stored.append(plain)
        self._samples = sampled(stored)

    def is_same(self, other: "WeightSample") -> bool:
        """Whether two samples show no difference; bits are compared, not values, so that NaN is itself."""
        if self._locations != other._locations:
            return False
        flags = [(new != old).any() for new, old in zip(self._samples, other._samples, strict=True)]
        return not flags or not torch.stack([flag.to(flags[0].device) for flag in flags]).any().item()


@torch.inference_mode()
def sampled(tensors: list[Tensor]) -> list[Tensor]:
    """The sampled bytes of tensors, one piece for each device and length of a run."""
    is_small = sum(tensor.nbytes for tensor in tensors) <= WHOLE_BYTES
    pieces: dict[tuple[torch.device, int], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            runs = _runs(tensor, is_small)
            pieces.setdefault((tensor.device, runs.shape[1]), []).append(runs)
    return [torch.cat(runs) for runs in pieces.values()]


def _runs(tensor: Tensor, is_whole: bool) -> Tensor:
    """A sample of a tensor's memory as bytes `[runs, width]`, without a copy.

    The runs are evenly spread; the last of them ends with the last element.
    """
    count = tensor.numel()
    if not tensor.is_contiguous():
        count = 1 + sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    width = count if is_whole else min(count, RUN_ELEMENTS)
    runs = min(UNVERSIONED_RUNS if tensor.is_inference() else RUNS, -(-count // width))
    step = max(1, (count - width) // max(1, runs - 1))
    first = tensor.storage_offset() + count - width - step * (runs - 1)
    return tensor.as_strided((runs, width), (step, 1), first).view(torch.uint8)
