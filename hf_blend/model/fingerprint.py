# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The identity of a model, as far as its keys and values depend on it.

Two models with one fingerprint compute the same KV from the same tokens, up to the noise of the dtype. A fingerprint
is a digest of the structure and of all weights. The structure is the config, the class and the plain attributes of
every module, and all code that is not the libraries' own. Names, paths, the device and the attention implementation
(eager, sdpa, flash) are left out: they change KV by no more than that noise, and a store that one machine filled
serves another.

All weights are read when a model is first seen. After that each call walks over the structure, compares it, and
compares a sample of every tensor. The weights are read again only where the sample differs. docs/security.md says what
is not seen.

A release of transformers that adds a field to a config, or an attribute to a module, changes the fingerprint, and the
store is cold: a field that was not reviewed is not assumed to be harmless.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from torch import nn

from .anatomy import EXTENDED, refuse_extended
from .identity.canonical import refuse_wrapper
from .identity.structure import Structure, digest_of
from .identity.weights import Tensors, WeightSample, weight_digest

T = TypeVar("T")


@dataclass
class _Record:
    """The identity of a live model, and what a change of the model is noticed by."""

    parts: dict[str, Any] = field(default_factory=dict)  # `Structure.parts`, when last compared
    digest: str = ""  # of the parts
    weights: str = ""  # digest of all weights, when last read
    sample: WeightSample | None = None  # of the weights, taken before they were read
    fingerprint: str = ""  # of both digests; empty while it has to be made again
    state: int = 0  # how many changes were noticed


_records: WeakKeyDictionary[nn.Module, _Record] = WeakKeyDictionary()
_lock = threading.RLock()


def fingerprint(model: nn.Module, *, reread: bool = False) -> str:
    """The identity of a model in 64 hex digits; equal across processes, devices and machines.

    Args:
        model: a causal language model.
        reread: read all weights again, also where nothing shows that they changed.

    Raises:
        UnsupportedModelError: it is a wrapper, compiled, without weights, inside `self_extend`, or has a forward hook
            of others.
    """
    if EXTENDED.get():  # some model is inside `self_extend`
        refuse_extended(model)
    return identity_of(model, reread)


def identity_of(model: nn.Module, reread: bool = False) -> str:
    """The fingerprint of what a model computes alone, also inside `self_extend`."""
    with _lock:
        record, tensors = _look_at(model)
        sample = WeightSample(tensors)  # before all is read: a change meanwhile shows
        if reread or record.sample is None or not sample.is_same(record.sample):
            record.weights = weight_digest(tensors)
            record.fingerprint, record.sample, record.state = "", sample, record.state + 1
        record.fingerprint = record.fingerprint or digest_of([record.digest, record.weights])
        return record.fingerprint


class PerStructure(Generic[T]):
    """A function of a model, whose result is kept while the model lives and its structure stays the same."""

    def __init__(self, find: Callable[[nn.Module], T]) -> None:
        """Wrap a function."""
        self._find = find
        self._results: WeakKeyDictionary[nn.Module, tuple[str, T]] = WeakKeyDictionary()

    def __call__(self, model: nn.Module, digest: str = "") -> T:
        """The kept result, or a new one; `digest` is the structure's, where the caller has it already."""
        digest = digest or structure_digest(model)
        result = self._results.get(model)
        if result is None or result[0] != digest:
            result = self._results[model] = digest, self._find(model)
        return result[1]


def structure_digest(model: nn.Module) -> str:
    """A digest of all that makes a fingerprint except the weights, in 64 hex digits."""
    with _lock:
        return _look_at(model)[0].digest


def state_of(model: nn.Module) -> int:
    """How often a model's fingerprint was made again because something in it differed."""
    return _records[model].state


def _look_at(model: nn.Module) -> tuple[_Record, Tensors]:
    """A model's record, updated to the structure that the model has now, and its tensors."""
    refuse_wrapper(model)
    structure, record = Structure(model), _records.setdefault(model, _Record())
    if structure.parts != record.parts:
        record.parts, record.digest = structure.parts, digest_of(structure.parts)
        record.fingerprint, record.state = "", record.state + 1
    return record, structure.tensors
