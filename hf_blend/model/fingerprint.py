# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The identity of a model as far as its keys and values depend on it.

Two models with one fingerprint compute the same KV from the same tokens, up to the noise of the dtype. It is made of
the config, the content of all weights, and the structure: class and plain attributes of every module, and code that is
not that of the libraries. The device and the attention implementation (eager, sdpa, flash) are left out on purpose:
they change KV by no more than that noise, and a store that was filled on one machine should serve another. Names and
paths are left out too.

All weights are read when a model is first seen. After that each call compares the structure, and a sample of every
tensor's content, and reads everything again only where something differs. What that cannot see is said in
docs/how_it_works.md.

A release of transformers that adds a field to a config, or an attribute to a module, changes the fingerprint, and the
store starts cold: a field that nobody has looked at must not be assumed harmless.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from torch import nn

from ..threads import new_lock
from .anatomy import EXTENDED, refuse_extended
from .identity.canonical import refuse_foreign_hooks, refuse_wrapper
from .identity.structure import IGNORED_ATTRIBUTES, IGNORED_CONFIG_FIELDS, Structure, config_part
from .identity.weights import WeightWatch, weight_digest

__all__ = ["IGNORED_ATTRIBUTES", "IGNORED_CONFIG_FIELDS", "PerStructure", "fingerprint", "structure_digest"]

FORMAT = "hf_blend.fingerprint/2"
T = TypeVar("T")


@dataclass
class _Known:
    """What was found out about a live model, and how to notice that it changed."""

    watch: Structure
    structure: dict[str, Any]
    digest: str  # of it
    weights: dict[str, Any] = field(default_factory=dict)
    weight_watch: WeightWatch | None = None
    fingerprint: str = ""
    state: int = 0  # counts the changes that were noticed


_known: WeakKeyDictionary[nn.Module, _Known] = WeakKeyDictionary()
_lock = new_lock()


def fingerprint(model: nn.Module, *, reread: bool = False) -> str:
    """Say who a model is, in 64 hex digits; equal across processes, devices and machines."""
    if EXTENDED.get():  # some model is inside `self_extend`
        refuse_extended(model)
    return identity_of(model, reread)


def identity_of(model: nn.Module, reread: bool = False) -> str:
    """The fingerprint of what a model computes alone, also inside `self_extend`."""
    with _lock:
        record = _structure_of(model)
        if reread or record.weight_watch is None or not record.weight_watch.is_same():
            watch = WeightWatch(model)  # first the sample: a change meanwhile shows
            record.weights = weight_digest(model)
            record.fingerprint, record.weight_watch, record.state = "", watch, record.state + 1
        record.fingerprint = record.fingerprint or _sha256({**record.structure, **record.weights})
        return record.fingerprint


class PerStructure(Generic[T]):
    """Something that is found out about a model, remembered while the model lives and has the same structure."""

    def __init__(self, find: Callable[[nn.Module], T]) -> None:
        """Remember what a function gives."""
        self._find = find
        self._found: WeakKeyDictionary[nn.Module, tuple[str, T]] = WeakKeyDictionary()

    def __call__(self, model: nn.Module, digest: str = "") -> T:
        """What was found, or is found now."""
        digest = digest or structure_digest(model)
        record = self._found.get(model)
        if record is None or record[0] != digest:
            record = self._found[model] = digest, self._find(model)
        return record[1]


def structure_digest(model: nn.Module) -> str:
    """A digest of all that makes a fingerprint except the weights, in 64 hex digits."""
    with _lock:
        return _structure_of(model).digest


def state_of(model: nn.Module) -> int:
    """How often a model's fingerprint was made anew because something in it differed."""
    return _known[model].state


def _structure_of(model: nn.Module) -> _Known:
    record = _known.get(model)
    if record is not None and record.watch.is_same():
        refuse_foreign_hooks(record.watch.hooked)
        return record
    refuse_wrapper(model)
    refuse_foreign_hooks(model.modules())
    structure = Structure(model)
    parts = {
        "format": FORMAT,
        "model_class": type(model).__name__,
        "config": config_part(model.config.to_dict()),
        "structure": _sha256(structure.parts),
    }
    renewed = _Known(structure, parts, _sha256(parts))
    if record is not None:
        renewed.state = record.state + 1
        if record.weight_watch is not None and record.weight_watch.is_same(model):
            renewed.weights, renewed.weight_watch = record.weights, record.weight_watch
    _known[model] = renewed
    return renewed


def _sha256(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
