# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The tensors of a model: a digest of all their bytes, and whether they are the same still, which may cost little.

Each request compares tensors by identity, address and version and, as an optimizer or a write through `.data` changes
none of these, by a sample of the content of every tensor, gathered with one copy and compared bit for bit, with one
synchronisation per model on an accelerator.
"""

import copy
import hashlib
import json
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import UnsupportedModelError
from ..placement import offload_hooks
from .checksum import checksum
from .structure import counted_attributes, has_moving_rotary_tables, reference

QUANTISED_BY_ITS_STATE = ("absmax", "code", "offset")
WHOLE_BYTES = 4 << 20  # models up to this size are compared whole
RUNS, RUN_ELEMENTS = 16, 8  # of each tensor: so many places, evenly spread, and so many elements at each
UNVERSIONED_RUNS = 64  # for tensors whose version does not count: those made in inference mode


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
        tensors = [("SCB", getattr(getattr(module, "state", None), "SCB", None) if scales is None else scales)]
        for prefix, level in (("", state), ("state2.", getattr(state, "state2", None))):
            tensors += [(prefix + name, getattr(level, name, None)) for name in QUANTISED_BY_ITS_STATE]
        yield from ((f".{name}", scale) for name, scale in tensors if isinstance(scale, Tensor))


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


class WeightWatch:
    """The weights of a model at one moment: where they are, and a sample of what is in them."""

    def __init__(self, model: nn.Module) -> None:
        """Remember a model's weights."""
        self._places, parts = _placed(model)
        self._gone: list[Any] = []
        hooks = [hook for module in model.modules() for hook in offload_hooks(module)]
        sources = ((hook, getattr(hook, "weights_map", None)) for hook in hooks)  # where accelerate fetches weights
        self._sources = [[reference(source, self._gone) for source in pair] for pair in sources if pair[1] is not None]
        self._parts = [reference(tensor, self._gone) for tensor in parts]
        is_small = sum(tensor.nbytes for tensor in parts) <= WHOLE_BYTES
        self._views: dict[tuple[torch.device, int], list[Callable[[], Tensor]]] = {}
        for tensor in parts:
            if tensor.numel():
                width, view = _view(tensor, is_small)
                self._views.setdefault((tensor.device, width), []).append(view)
        self._trace, self._sample = self._traced(), self._sampled()

    def is_same(self, model: nn.Module | None = None) -> bool:
        """Whether the weights are the same still, as far as a sample shows; all devices answer together.

        Bits are compared, not values, so that NaN is itself.
        """
        if model is not None:
            places, parts = _placed(model)
            if places != self._places or [*map(id, parts)] != [id(ref()) for ref in self._parts]:
                return False
        if any(getattr(hook(), "weights_map", None) is not source() for hook, source in self._sources):
            return False
        if self._gone or self._traced() != self._trace:
            return False
        flags = [(new != old).any() for new, old in zip(self._sampled(), self._sample, strict=True)]
        return not flags or not torch.stack([flag.to(flags[0].device) for flag in flags]).any().item()

    def _traced(self) -> list[tuple[int, int]]:
        parts = [ref() for ref in self._parts]
        return [(tensor.data_ptr(), -1 if tensor.is_inference() else tensor._version) for tensor in parts]

    @torch.inference_mode()
    def _sampled(self) -> list[Tensor]:
        """The sampled bytes of all tensors, one piece per device."""
        pieces: dict[torch.device, list[Tensor]] = {}
        for (device, _), views in self._views.items():
            pieces.setdefault(device, []).append(torch.cat([view() for view in views]).view(-1))
        whole = [samples[0] if len(samples) == 1 else torch.cat(samples) for samples in pieces.values()]
        # words compare faster than bytes
        return [sample if sample.numel() % 8 else sample.view(torch.int64) for sample in whole]


@torch.inference_mode()
def _view(tensor: Tensor, whole: bool) -> tuple[int, Callable[[], Tensor]]:
    """What makes a sample of a tensor's memory, bytes `[runs, width]`, without a copy; and the width.

    The runs are evenly spread; the last of them ends with the last element. On the CPU the view is made once: that
    halves the time, and keeps no more alive than memory that a model let go of since, until it is looked at again.
    """
    ref, size = weakref.ref(tensor), tensor.element_size()
    count = 1 + sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    width = count if whole else min(count, RUN_ELEMENTS)
    runs = min(UNVERSIONED_RUNS if tensor.is_inference() else RUNS, -(-count // width))
    step = max(1, (count - width) // max(1, runs - 1))
    first = tensor.storage_offset() + count - width - step * (runs - 1)

    def view() -> Tensor:
        owner: Any = ref()
        data = torch.empty(0, dtype=torch.uint8, device=owner.device).set_(owner.untyped_storage())
        return data.as_strided((runs, width * size), (step * size, 1), first * size)

    made = view() if tensor.device.type == "cpu" else None
    return width * size, (view if made is None else lambda: made)


def _placed(model: nn.Module) -> tuple[list[Hashable], list[Tensor]]:
    """Where the tensors of a model are, and those that are in memory."""
    names, parts = list[Hashable](), list[Tensor]()
    for path, module, tensor in tensors(model):
        name: Hashable = path
        if tensor.is_meta:
            first, second = (loaded_values(path, module, tensor) for _ in range(2))
            name, tensor = (path, tensor.shape), first
            if first is not second:  # read again at each use
                names.append(name)
                continue
        stored = [stored_tensor for _, stored_tensor in stored_parts(module, tensor)]
        names += [(name, number) for number in range(len(stored))]
        parts += stored
    return names, parts
