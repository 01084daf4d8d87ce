# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Has a model changed since it was last looked at? A question that every request asks, so it may cost little.

Structure: all that the walk met is compared again, numbers and texts by value, objects by id. An id stands for the
object that had it: the watch notices when one of them goes away. Weights: by identity, address and version, and,
because an optimizer or a write through `.data` changes none of these, by a sample of the content of every tensor,
gathered with one copy and compared bit for bit, with one synchronisation per model on an accelerator.

Nothing here keeps a model alive.
"""

import weakref
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, nn

from ..placement import offload_hooks
from .structure import Structure, attention_functions
from .weights import loaded_values, stored_parts, tensors

WHOLE_BYTES = 4 << 20  # models up to this size are compared whole
RUNS, RUN_ELEMENTS = 16, 8  # of each tensor: so many places, evenly spread, and so many elements at each
UNVERSIONED_RUNS = 64  # for tensors whose version does not count: those made in inference mode
_ATOMS = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size})
_OPENED, _TENSORS = frozenset({list, tuple, set, frozenset}), frozenset({Tensor, nn.Parameter})


def _reference(value: Any, gone: list[Any]) -> Callable[[], Any]:
    """Reach an object that is not kept alive; a list grows when it goes away."""
    try:
        return weakref.ref(value, gone.append)
    except TypeError:  # it is held: a number, a text, a builtin container
        return lambda: value


class StructureWatch:
    """The structure of a model at one moment."""

    def __init__(self, structure: Structure) -> None:
        """Remember what a walk over a model met."""
        self._attention = structure.attention
        self._spaces = [(space, dict(vars(space))) for space in structure.namespaces]
        self._gone: list[Any] = []
        self._owners = [(_reference(owner, self._gone), names) for owner, names in structure.met.values()]
        self.hooked: list[nn.Module] = []  # modules with forward hooks, when it was last asked
        self._noted, values = self._values()
        others = {id(value): value for value in values if type(value) not in _ATOMS}
        self._alive = [_reference(value, self._gone) for value in others.values()]

    def is_same(self) -> bool:
        """Whether the model has the structure still."""
        try:
            same = self._values()[0] == self._noted and not self._gone
            same = same and all(noted == vars(space) for space, noted in self._spaces)
            return same and attention_functions(self._attention) == self._attention
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError):  # gone, or no longer comparable
            return False

    def _values(self) -> tuple[list[Any], list[Any]]:
        """All that was met, as it is now, with what is inside of containers: as it can be compared, and itself."""
        open_, values, self.hooked = list[Any](), list[Any](), []
        for ref, names in self._owners:
            owner = ref()
            held = owner.__dict__
            values += type(owner), len(held)
            open_ += [held[name] for name in names]
            if held.get("_forward_hooks") or held.get("_forward_pre_hooks"):
                self.hooked.append(owner)
        for value in open_:  # which grows
            kind = type(value)
            if kind in _ATOMS:
                values.append(value)
            elif isinstance(value, dict):
                values += kind, len(value), *value
                open_ += value.values()
            elif kind in _OPENED:
                values += kind, len(value)
                open_ += value
            elif kind in _TENSORS and value.is_meta:  # accelerate makes a new one after every forward
                values.append(value.shape)
            else:
                values.append(value)
        return [value if type(value) in _ATOMS else id(value) for value in values], values


class WeightWatch:
    """The weights of a model at one moment: where they are, and a sample of what is in them."""

    def __init__(self, model: nn.Module) -> None:
        """Remember a model's weights."""
        self._places, parts = _placed(model)
        self._gone: list[Any] = []
        hooks = [hook for module in model.modules() for hook in offload_hooks(module)]
        sources = ((hook, getattr(hook, "weights_map", None)) for hook in hooks)  # where accelerate fetches weights
        self._sources = [[_reference(one, self._gone) for one in pair] for pair in sources if pair[1] is not None]
        self._parts = [_reference(part, self._gone) for part in parts]
        is_small = sum(part.nbytes for part in parts) <= WHOLE_BYTES
        self._views: dict[tuple[torch.device, int], list[Callable[[], Tensor]]] = {}
        for part in parts:
            if part.numel():
                width, view = _view(part, is_small)
                self._views.setdefault((part.device, width), []).append(view)
        self._trace, self._sample = self._traced(), self._sampled()

    def is_same(self, model: nn.Module | None = None) -> bool:
        """Whether the weights are the same still, as far as a sample shows; all devices answer together.

        Bits are compared, not values, so that NaN is itself.
        """
        if model is not None:
            places, parts = _placed(model)
            if places != self._places or [*map(id, parts)] != [id(ref()) for ref in self._parts]:
                return False
        if any(getattr(hook(), "weights_map", None) is not found() for hook, found in self._sources):
            return False
        if self._gone or self._traced() != self._trace:
            return False
        flags = [(new != old).any() for new, old in zip(self._sampled(), self._sample, strict=True)]
        return not flags or not torch.stack([flag.to(flags[0].device) for flag in flags]).any().item()

    def _traced(self) -> list[tuple[int, int]]:
        parts = [ref() for ref in self._parts]
        return [(part.data_ptr(), -1 if part.is_inference() else part._version) for part in parts]

    @torch.inference_mode()
    def _sampled(self) -> list[Tensor]:
        """The sampled bytes of all tensors, one piece per device."""
        pieces: dict[torch.device, list[Tensor]] = {}
        for (device, _), views in self._views.items():
            pieces.setdefault(device, []).append(torch.cat([view() for view in views]).view(-1))
        whole = [found[0] if len(found) == 1 else torch.cat(found) for found in pieces.values()]
        return [one if one.numel() % 8 else one.view(torch.int64) for one in whole]  # words compare faster than bytes


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
        held: Any = ref()
        data = torch.empty(0, dtype=torch.uint8, device=held.device).set_(held.untyped_storage())
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
        stored = [part for _, part in stored_parts(module, tensor)]
        names += [(name, number) for number in range(len(stored))]
        parts += stored
    return names, parts
