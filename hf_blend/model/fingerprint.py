# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The identity of a model, as far as its keys and values depend on it.

Two models with one fingerprint compute the same KV from the same tokens, up to the noise of the dtype. A fingerprint
is a digest of the config, the classes of all modules, PEFT's choice of adapters, and all weights. Names, paths, the
device and the attention implementation (eager, sdpa, flash) are left out: they change KV by no more than that noise,
and a store that one machine filled serves another.

All weights are read when a model is first seen. Each later call compares config, classes, adapters, and of every
tensor the address, the dtype, the version and a sample of its values. What differs is read again. docs/security.md
says what is not seen; the canary of each stored chunk finds most of that between processes.

A release of transformers that adds a field to a config changes the fingerprint, and the store is cold: a field that
was not reviewed is not assumed to be harmless.
"""

import functools
import hashlib
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ..errors import UnsupportedModelError
from .anatomy import EXTENDED, refuse_extended, text_config
from .identity.canonical import refuse_foreign_hooks, refuse_wrapper
from .identity.config import config_part
from .identity.weights import WeightSample, tensors_of, weight_digest

Found = TypeVar("Found")

FORMAT = "hf_blend.fingerprint/5"
ADAPTER_ATTRIBUTES = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")  # of PEFT's layers
COMPILED_FORWARD = "_torchdynamo_orig_callable"  # an attribute of what torch.compile made of a function


@dataclass(eq=True)
class _Form:
    """What is compared of a model in each call besides its tensors."""

    config: dict[str, Any]  # the attributes of the text config, shallow
    kinds: list[type]  # of all modules
    dtypes: list[torch.dtype]  # of all parameters
    adapters: list[Any]  # as `_adapters_of` gives them


@dataclass
class _Record:
    """The identity of a live model, and what a change of the model is noticed by."""

    form: _Form | None = None
    structure: str = ""  # digest of config, classes, dtypes and adapters
    sample: WeightSample | None = None  # taken before the weights were read
    weights: str = ""  # digest of all weights
    state: int = 0  # how many changes were noticed
    found: dict[Callable[..., Any], Any] = field(default_factory=dict)  # of `per_model`, for this structure


_records: WeakKeyDictionary[nn.Module, _Record] = WeakKeyDictionary()
_lock = threading.RLock()


def fingerprint(model: nn.Module, *, reread: bool = False) -> str:
    """The identity of a model in 64 hex digits; equal across processes, devices and machines.

    Args:
        model: a causal language model.
        reread: read config and weights again, also where nothing shows that they changed.

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
        record = _compare_structure(model, reread)
        tensors = tensors_of(model)
        sample = WeightSample(tensors)  # before all is read: a change meanwhile shows
        if reread or record.sample is None or not sample.is_same(record.sample):
            record.weights = weight_digest(tensors)
            record.sample = sample
            record.state += 1
        return _digest_of([record.structure, record.weights])


def structure_of(model: nn.Module) -> str:
    """A digest of all that makes a fingerprint except the weights, in 64 hex digits."""
    with _lock:
        return _compare_structure(model).structure


def state_of(model: nn.Module) -> int:
    """How often something in a model whose fingerprint was asked for was read again, because it differed."""
    return _records[model].state


def per_model(find: Callable[[nn.Module], Found]) -> Callable[[nn.Module], Found]:
    """Keep the result of a function of a model until a look at the model finds another structure."""

    @functools.wraps(find)
    def find_once(model: nn.Module) -> Found:
        record = _records.get(model)
        if record is None:
            with _lock:
                record = _compare_structure(model)
        if find not in record.found:
            record.found[find] = find(model)
        result: Found = record.found[find]
        return result

    return find_once


def _compare_structure(model: nn.Module, reread: bool = False) -> _Record:
    """A model's record, updated to the config, classes and adapters that the model has now."""
    refuse_wrapper(model)
    modules = list(model.modules())
    refuse_foreign_hooks(modules)
    _refuse_compiled(model, modules)
    form = _Form(
        config=dict(vars(text_config(model))),
        kinds=list(map(type, modules)),
        dtypes=[weight.dtype for module in modules for weight in module._parameters.values() if weight is not None],
        adapters=_adapters_of(modules),
    )
    record = _records.setdefault(model, _Record())
    if reread or form != record.form:
        record.form = form
        structure = _digest_of(
            {
                "format": FORMAT,
                "config": config_part(model.config.to_dict()),
                "classes": [f"{kind.__module__}.{kind.__qualname__}" for kind in form.kinds],
                "dtypes": sorted(set(map(str, form.dtypes))),
                "adapters": form.adapters,
            }
        )
        if reread or structure != record.structure:  # a setting that does not count leaves it the same
            record.structure = structure
            record.found = {}
            record.state += 1
    return record


def _adapters_of(modules: list[nn.Module]) -> list[Any]:
    """For each module of PEFT which adapters act, which are merged, and how much each counts, as values of JSON."""
    adapters = []
    for number, module in enumerate(modules):
        attributes = vars(module)
        if "_active_adapter" not in attributes:
            continue
        values = {name: attributes[name] for name in ADAPTER_ATTRIBUTES if name in attributes}
        if isinstance(values["_active_adapter"], str):  # one name, or a list of them
            values["_active_adapter"] = [values["_active_adapter"]]
        adapters.append([number, json.dumps(values, sort_keys=True, default=str)])
    return adapters


def _refuse_compiled(model: nn.Module, modules: list[nn.Module]) -> None:
    for module in modules:
        attributes = vars(module)
        is_compiled = "_orig_mod" in module._modules or attributes.get("_compiled_call_impl") is not None
        if is_compiled or hasattr(attributes.get("forward"), COMPILED_FORWARD):
            place = "the model" if module is model else "a layer"
            raise UnsupportedModelError(
                f"{place} ({type(module).__name__}) is compiled, and hooks cannot enter compiled code. Give hf_blend "
                "the model as it is before torch.compile or model.compile()."
            )


def _digest_of(value: object) -> str:
    """The SHA-256 of a value of JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
