# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Has a model changed since it was last looked at? A question that every request asks, so it may cost little.

Structure is compared object by object: every counted attribute, parameter, submodule and config field must be the
same object, or an equal number, text or container. What a module holds is compared by ids first; an id stands for the
object that had it as long as that lives. Weights are compared by identity, address and version, and, because an
optimizer or a write through `.data` changes none of these, by a sample of the content of every tensor, gathered with
one copy and compared bit for bit, with one synchronisation per model on an accelerator.

Nothing here keeps a model alive.
"""

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from operator import itemgetter
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ..placement import offload_hooks
from .code import CALLABLES, is_library
from .structure import (
    IGNORED_CONFIG_FIELDS,
    QUANTISER_FIELDS,
    TORCH_FUNCTIONS,
    Structure,
    configs_inside,
    counted_attributes,
    foreign_attention,
)
from .weights import has_moving_rotary_tables, loaded_values, stored_parts, tensors

WHOLE_BYTES = 4 << 20  # models up to this size are compared whole
RUNS, RUN_ELEMENTS = 16, 8  # of each tensor: so many places, evenly spread, and so many elements at each
UNVERSIONED_RUNS = 64  # for tensors whose version does not count: those made in inference mode
TABLES = ("_parameters", "_buffers", "_modules")  # of a module
_tables, _torch_functions = itemgetter(*TABLES), itemgetter(*TORCH_FUNCTIONS)
_ATOMS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, type)


class _Same:
    """Equal to one object only, which it does not keep alive."""

    __slots__ = ("_ref",)

    def __init__(self, value: Any) -> None:
        try:
            self._ref: Callable[[], Any] = weakref.ref(value)
        except TypeError:
            self._ref = lambda: value

    def __eq__(self, other: object) -> bool:
        return self._ref() is other

    __hash__ = None  # type: ignore[assignment]


class _PlaceHolder(_Same):
    """Equal to any tensor without data of one shape: accelerate makes a new one after every forward."""

    __slots__ = ("_shape",)

    def __init__(self, value: Tensor) -> None:
        self._shape = value.shape

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tensor) and other.is_meta and other.shape == self._shape


class _Moving:
    """Equal to anything: the frequencies of a model that replaces them as prompts grow."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


class StructureWatch:
    """The structure of a model at one moment."""

    def __init__(self, model: nn.Module, structure: Structure) -> None:
        """Remember a model."""
        self._is_foreign = structure.is_foreign
        self._model = weakref.ref(model)
        self._attention = foreign_attention(model).keys()
        self._parts = structure.parts if structure.is_foreign else None
        self._spaces = [(one, dict(vars(one))) for one in structure.namespaces if _is_lasting(one)]
        found: list[Any] = [*model.modules()]
        self._torch = _torch_functions(vars(torch))
        self._notes = [_noted(module, found) for module in tuple(found)]
        if has_moving_rotary_tables(model):
            for note in self._notes:
                buffers = note.frozen[1]  # see `_counted`
                moving = {name: _Moving() for name in buffers if name.endswith("inv_freq")}
                buffers.update(moving)
                if moving:  # the tensor goes away when the frequencies change, and the model is the same
                    note.ids, note.alive = None, ()
        seen = {id(module) for module in model.modules()}
        found += configs_inside(getattr(model, "config", None))
        while found:
            one = found.pop()
            if id(one) not in seen:
                seen.add(id(one))
                self._notes.append(_noted(one, found))

    def is_same(self, hooked: list[nn.Module]) -> bool:
        """Whether the model has the structure still; cheap where all of its code is the libraries' own."""
        try:
            for note in self._notes:
                owner = note.owner()
                held = owner.__dict__
                if type(owner) is not note.kind or len(held) != note.size:
                    return False
                values, ids = note.get(held), None
                if note.ids is not None:
                    ids = [id(one) for table in _tables(held) for one in (*table, *table.values())]
                    ids += map(id, values[len(TABLES) :])
                # what was noted is on the left: a tensor there would compare its values
                if (ids is None or note.ids != ids) and note.frozen != values:
                    return False
                for one in note.alive:
                    if one() is None:
                        return False
                if isinstance(owner, nn.Module) and (held["_forward_hooks"] or held["_forward_pre_hooks"]):
                    hooked.append(owner)
            same = all(held == vars(space) for space, held in self._spaces)
            same = same and self._torch == _torch_functions(vars(torch))
            same = same and foreign_attention(self._model()).keys() == self._attention
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError):  # gone, or no longer comparable
            return False
        return same and (not self._is_foreign or Structure(self._model()).parts == self._parts)


@dataclass
class _Note:
    """What an object (not kept alive) held."""

    owner: Callable[[], Any]
    kind: type
    size: int  # of its `__dict__`
    get: Callable[[dict[str, Any]], tuple[Any, ...]]  # what counts of it
    frozen: tuple[Any, ...]
    ids: list[int] | None = None  # of all that a module held; None for what can change in place
    alive: tuple[Callable[[], Any], ...] = ()  # whose ids these are, as far as it can go away


def _noted(owner: Any, found: list[Any]) -> _Note:
    """Note an object; objects inside it are added to those found."""
    held, names = vars(owner), _counted(owner)
    if not names:
        return _Note(weakref.ref(owner), type(owner), len(held), lambda _: (), ())
    names = names * 2 if len(names) == 1 else names  # of two names and more, itemgetter makes a tuple
    frozen = tuple(_frozen(held[name], found) for name in names)
    note = _Note(weakref.ref(owner), type(owner), len(held), itemgetter(*names), frozen)
    if isinstance(owner, nn.Module):
        objects = [one for table in _tables(held) for one in (*table, *table.values())]
        objects += note.get(held)[len(TABLES) :]
        refs = [_reference(one) for one in objects]
        if None not in refs:
            note.ids, note.alive = [*map(id, objects)], tuple(refs)  # type: ignore[arg-type]
    return note


def _reference(value: Any) -> Callable[[], Any] | None:
    """A way to see that an object lives still; None for what can change in place."""
    if isinstance(value, (dict, list, tuple, set, frozenset)):
        return None
    try:
        return weakref.ref(value)
    except TypeError:  # it is held: a number, a text
        return lambda: (value,)


class WeightWatch:
    """The weights of a model at one moment: where they are, and a sample of what is in them."""

    def __init__(self, model: nn.Module) -> None:
        """Remember a model's weights."""
        self._places, parts = _placed(model)
        self._sources = [(weakref.ref(one), [*map(_Same, maps)]) for one in model.modules() if (maps := _maps(one))]
        self._refs = [weakref.ref(part) for part in parts]
        self._versioned = [not part.is_inference() for part in parts]
        is_small = sum(part.nbytes for part in parts) <= WHOLE_BYTES
        self._views: dict[tuple[torch.device, torch.dtype, int], list[Callable[[], Tensor]]] = {}
        for part in parts:
            if part.numel():
                width, view = _view(part, is_small)
                kind = torch.uint8 if part.element_size() == 1 else part.dtype
                self._views.setdefault((part.device, kind, width), []).append(view)
        self._trace, self._sample = self._traced(), self._sampled()

    def is_same(self, model: nn.Module | None = None) -> bool:
        """Whether the weights are the same still, as far as a sample shows; all devices answer together.

        Bits are compared, not values, so that NaN is itself.
        """
        if model is not None:
            places, parts = _placed(model)
            if places != self._places or any(ref() is not part for ref, part in zip(self._refs, parts, strict=True)):
                return False
        if any(sources != _maps(ref()) for ref, sources in self._sources):
            return False
        trace = self._traced()
        if trace is None or trace != self._trace:
            return False
        flags = [(new != old).any() for new, old in zip(self._sampled(), self._sample, strict=True)]
        return not flags or not torch.stack([flag.to(flags[0].device) for flag in flags]).any().item()

    def _traced(self) -> list[tuple[int, int]] | None:
        parts = [part for ref in self._refs if (part := ref()) is not None]
        if len(parts) < len(self._refs):
            return None
        pairs = zip(parts, self._versioned, strict=True)
        return [(part.data_ptr(), part._version if counts else -1) for part, counts in pairs]

    @torch.inference_mode()
    def _sampled(self) -> list[Tensor]:
        """The sampled bytes of all tensors, one piece per device."""
        pieces: dict[torch.device, list[Tensor]] = {}
        for (device, *_), views in self._views.items():
            pieces.setdefault(device, []).append(torch.cat([view() for view in views]).view(-1).view(torch.uint8))
        whole = [found[0] if len(found) == 1 else torch.cat(found) for found in pieces.values()]
        return [one if one.numel() % 8 else one.view(torch.int64) for one in whole]  # words compare faster than bytes


@torch.inference_mode()
def _view(tensor: Tensor, whole: bool) -> tuple[int, Callable[[], Tensor]]:
    """What makes a sample of a tensor, `[runs, width]`, without a copy where its memory is dense; and the width.

    The runs are evenly spread; the last of them ends with the last element. On the CPU the view is made once: that
    halves the time, and keeps no more alive than memory that a model let go of since, until it is looked at again.
    """
    ref, count, is_byte = weakref.ref(tensor), tensor.numel(), tensor.element_size() == 1
    is_dense = tensor.is_contiguous() or (tensor.dim() == 2 and tensor.t().is_contiguous())
    width = count if whole or not is_dense else min(count, RUN_ELEMENTS)
    runs = min(UNVERSIONED_RUNS if tensor.is_inference() else RUNS, -(-count // width))
    step = (count - width) // max(1, runs - 1)
    shape, strides = (runs, width), (max(1, step), 1)
    first = tensor.storage_offset() + count - width - step * (runs - 1)

    def view() -> Tensor:
        part: Any = ref()
        part = part.view(torch.uint8) if is_byte else part
        return part.as_strided(shape, strides, first) if is_dense else part.reshape(1, -1)

    made = view() if is_dense and tensor.device.type == "cpu" else None
    return width, (view if made is None else lambda: made)


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
        stored = list(stored_parts(module, tensor))
        names += [(name, number) for number in range(len(stored))]
        parts += stored
    return names, parts


def _maps(module: nn.Module | None) -> list[Any]:
    """Where accelerate fetches the weights of a module from."""
    hooks = offload_hooks(module) if module is not None else ()
    return [one for hook in hooks if (one := getattr(hook, "weights_map", None)) is not None]


def _counted(owner: Any) -> list[str]:
    """Names of the attributes of an object that count."""
    if isinstance(owner, nn.Module):
        return [*TABLES, *counted_attributes(owner)]
    if isinstance(owner, Tensor):
        return [name for name in ("quant_state", "SCB") if name in vars(owner)]
    names = QUANTISER_FIELDS.get(type(owner).__name__)
    if names is not None:
        return [name for name in (*names, "absmax", "state2", "CB", "SCB") if name in vars(owner)]
    return [name for name in vars(owner) if name not in IGNORED_CONFIG_FIELDS]


def _frozen(value: Any, found: list[Any]) -> Any:
    """A copy that is equal to a value as long as the value says the same."""
    if isinstance(value, _ATOMS):
        return value
    if isinstance(value, dict):
        copied = {name: _frozen(item, found) for name, item in value.items()}
        return OrderedDict(copied) if isinstance(value, OrderedDict) else copied
    if isinstance(value, (list, tuple)):
        return type(value)([_frozen(item, found) for item in value]) if type(value) in (list, tuple) else _Same(value)
    if isinstance(value, (set, frozenset)):
        return set(value)
    if isinstance(value, Tensor) and value.is_meta:
        return _PlaceHolder(value)
    is_object = getattr(value, "__dict__", None) and not isinstance(value, (*CALLABLES, nn.Module, ModuleType))
    if is_object and (not isinstance(value, Tensor) or _counted(value)):
        found.append(value)
    return _Same(value)


def _is_lasting(space: type | ModuleType) -> bool:
    """Whether what a class or Python module holds lives as long as the process."""
    return is_library(space.__module__ if isinstance(space, type) else space.__name__)
