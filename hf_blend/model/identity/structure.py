# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What a model is besides its weights: the class and the plain attributes of every module, and functions put into it.

Attributes count unless they are on the list of those that were looked at and found harmless. Functions and classes of
the libraries count by name, others by the file that they come from; what no file has under its name (a lambda, a
closure, a class of a notebook) counts as itself, and is known in this process alone.
"""

import functools
import hashlib
import importlib.util
import json
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, MethodType, MethodWrapperType, ModuleType
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor, nn

from ...errors import UnsupportedModelError
from .checksum import checksum

IGNORED_CONFIG_FIELDS = frozenset({
    # where it came from, not what it computes
    "_name_or_path", "name_or_path", "_commit_hash", "transformers_version", "architectures", "auto_map",
    # how it is called, not what it computes
    "use_cache", "return_dict", "output_attentions", "output_hidden_states", "_output_attentions",
    "_attn_implementation", "_attn_implementation_internal", "attn_implementation", "_attn_implementation_autoset",
    "_experts_implementation_internal",
    # the parameters say their dtype themselves, and without doubt
    "dtype", "torch_dtype",
    # read by generate and by tokenizers; what stands before a chunk is part of its key
    "bos_token_id", "eos_token_id", "pad_token_id",
    # heads and losses that no decoder layer reads
    "id2label", "label2id", "num_labels", "problem_type",
    # how weights are spread over devices; transformers 5.17 keeps it where 5.23 does not
    "base_model_tp_plan",
    # training only
    "initializer_range", "gradient_checkpointing", "_post_init_done",
})  # fmt: skip

IGNORED_ATTRIBUTES = frozenset({
    # compared as weights, or walked as modules
    "_parameters", "_buffers", "_modules",
    # how it was loaded, saved, spread over devices or compiled, not what it computes
    "name_or_path", "_is_hf_initialized", "hf_quantizer", "is_quantized", "quantization_method", "hf_device_map",
    "is_loaded_in_4bit", "is_loaded_in_8bit", "_is_loaded_in_4bit", "_is_loaded_in_8bit", "_hf_peft_config_loaded",
    "_weight_conversions", "_tp_plan", "_ep_plan", "_pp_plan", "_tp_size", "_device_mesh", "_no_split_modules",
    "_keep_in_fp32_modules", "_keep_in_fp32_modules_strict", "all_tied_weights_keys", "_tied_weights_keys",
    "_keys_to_ignore_on_load_missing", "_keys_to_ignore_on_load_unexpected", "_keys_to_ignore_on_save",
    "_fsdp_plan", "_skip_keys_device_placement", "_compiled_call", "_last_compile_config", "kernel_config",
    "_use_kernels", "support_avx512bf16_for_cpu", "padding_idx",
    # training only
    "gradient_checkpointing", "_gradient_checkpointing_func", "loss_function", "_loss_function", "loss_type",
    "warnings_issued", "_require_grads_hook", "_require_grads_hooks", "add_adapter",
    # read by generate; PEFT puts another one in for each generate, and its own back behind it
    "generation_config", "prepare_inputs_for_generation", "base_model_prepare_inputs_for_generation",
    # movers between devices, which accelerate wraps
    "to", "cpu", "cuda", "npu", "xpu", "mlu", "musa", "sdaa", "hpu", "neuron",
    # accelerate puts the weights in place around `_old_forward`, which counts as the forward
    "_hf_hook", "_old_forward",
    # what a forward itself writes
    "max_seq_len_cached", "compute_type_is_set", "_output_capturing_hooks_installed", "rope_deltas",
})  # fmt: skip
TORCH_INTERNALS = frozenset(vars(nn.Module()))
TABLES = ("_parameters", "_buffers", "_modules")  # of a module
LIBRARIES = ("torch", "transformers", "accelerate", "bitsandbytes", "peft", "torchao", "hf_blend")
BUILTINS = (BuiltinFunctionType, MethodDescriptorType, MethodWrapperType, type(object.__init__))
MAX_DEPTH = 6  # of objects inside attributes
QUANTISER_FIELDS = {"MatmulLtState": ("threshold", "has_fp16_weights"), "QuantState": ("blocksize", "quant_type")}
QUANTISER_TENSORS = ("absmax", "state2", "CB", "SCB")
_COMPILED = "_torchdynamo_orig_callable"  # what torch.compile made of a function has it
_ATOMS = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size})
_OPENED, _TENSORS = frozenset({list, tuple, set, frozenset}), frozenset({Tensor, nn.Parameter})
_PYTHON, _SITES = (f"{os.path.dirname(os.__file__)}{os.sep}", "<frozen"), ("site-packages", "dist-packages")
_QUANTISED = {"quant_state", "SCB"}  # of a weight
_UNWATCHED = IGNORED_CONFIG_FIELDS - {"_attn_implementation", "_attn_implementation_internal"}
_names: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()  # of what no file has, in this process


def is_library(module: str | None) -> bool:
    """Whether a dotted module name belongs to a library whose code is known by name."""
    return (module or "").partition(".")[0] in LIBRARIES


def qualified_name(value: Any) -> str:
    """Module and name of a function or class."""
    return f"{getattr(value, '__module__', None)}.{getattr(value, '__qualname__', type(value).__qualname__)}"


def is_stock(function: Any, home: str = "") -> bool:
    """Whether a function, and all that it wraps, was compiled from a library, from Python's own or a module's file.

    A wrapper may copy every name of what it wraps, but not the file.
    """
    own = getattr(sys.modules.get(home), "__file__", None)
    while isinstance(function, FunctionType):
        file = function.__code__.co_filename
        is_python = file.startswith(_PYTHON) and not any(name in file for name in _SITES)
        if not (is_python or file == own or file.startswith(_folders())):
            return False
        function = getattr(function, "__wrapped__", None)
        function = getattr(function, "__func__", function)
    return function is None or isinstance(function, BUILTINS)


@functools.cache
def _folders() -> tuple[str, ...]:
    specs = map(importlib.util.find_spec, LIBRARIES)
    return tuple(os.path.dirname(spec.origin) + os.sep for spec in specs if spec and spec.origin)


def _foreign_name(value: Any) -> list[str]:
    """A function or class that is no library's own: by its file if it is to be had there, else by itself."""
    home = value.__module__ or ""
    reached: Any = sys.modules.get(home)
    file = getattr(reached, "__file__", None)
    for name in value.__qualname__.split("."):
        reached = getattr(reached, name, None)
    if file and os.path.exists(file) and reached is value and (isinstance(value, type) or is_stock(value, home)):
        return [value.__qualname__, hashlib.sha256(Path(file).read_bytes()).hexdigest()]
    return [value.__qualname__, _names.setdefault(value, uuid4().hex)]


def config_part(value: Any) -> Any:
    """A config as plain values, without the ignored fields, at every depth."""
    if isinstance(value, dict):
        return {str(name): config_part(item) for name, item in value.items() if name not in IGNORED_CONFIG_FIELDS}
    if isinstance(value, (list, tuple)):
        return [config_part(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    if isinstance(value, Enum):
        return config_part(value.value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.dtype):
        return str(value)
    if hasattr(value, "to_dict"):
        return config_part(value.to_dict())
    raise UnsupportedModelError(
        f"the model's config holds {value!r:.80} ({type(value).__name__}), which cannot be told from another value in "
        "another process. Use numbers, texts, lists and dicts in configs."
    )


def counted_attributes(module: nn.Module) -> list[str]:
    """Names of the attributes of a module that count."""
    return [name for name in vars(module) if name not in TORCH_INTERNALS and name not in IGNORED_ATTRIBUTES]


def has_moving_rotary_tables(model: nn.Module) -> bool:
    """Dynamic and longrope models replace their frequencies as prompts grow; the config says all about them."""
    rope = json.dumps(config_part(getattr(model.config, "rope_parameters", None) or {}))
    return "dynamic" in rope or "longrope" in rope


class Structure:
    """What a model is besides its weights at one moment, and whether it is so still; keeps no model alive.

    What the walk over a model met is compared at each look, numbers and texts by value, objects by id. An id stands
    for the object that had it: it is noticed when one of them goes away.
    """

    def __init__(self, model: nn.Module) -> None:
        """Walk over a model."""
        modules, configs = dict(model.named_modules()), configs_inside(getattr(model, "config", None))
        self._inside = {id(module): f"@{path}" for path, module in modules.items()}
        self._inside |= {id(config): "@config" for config in configs}
        self._met: dict[int, tuple[Any, list[str]]] = {}  # by id: objects, and the names of what counts of each
        self._attention = attention_functions(getattr(config, "_attn_implementation", None) for config in configs)
        self._open: list[int] = []
        self._classes: dict[int, Any] = {}
        is_moving, kinds = has_moving_rotary_tables(model), dict.fromkeys(map(type, modules.values()))
        names = dict.fromkeys(kind.__module__ for kind in kinds if kind.__module__ != "__main__")  # which grows
        homes = [sys.modules[name] for name in names if name in sys.modules]
        functions = {name: function for name, function in self._attention.items() if function}
        self.parts = [
            [[path, type(one).__qualname__, self._attributes(path, one, is_moving)] for path, one in modules.items()],
            [self._of_class(kind) for kind in kinds],
            {name: value for home in homes for name, value in self._put(home).items()},
            {name: self._leaf(function) for name, function in functions.items() if not is_stock(function)},
        ]
        for met in (*configs, *(home for home in homes if not is_library(home.__name__))):
            self._meet(met)
        bases = dict.fromkeys(base for kind in kinds for base in kind.__mro__[:-1] if is_library(base.__module__))
        spaces = [*bases, *(home for home in homes if is_library(home.__name__))]
        self._spaces = [(space, dict(vars(space))) for space in spaces]
        self._gone: list[Any] = []
        self._owners = [(reference(owner, self._gone), names) for owner, names in self._met.values()]
        self.hooked: list[nn.Module] = []  # modules with forward hooks, when it was last asked
        self._noted, values = self._values()
        others = {id(value): value for value in values if type(value) not in _ATOMS}
        self._alive = [reference(value, self._gone) for value in others.values()]
        del self._met

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
            attributes = owner.__dict__
            values += type(owner), len(attributes)
            open_ += [attributes[name] for name in names]
            if attributes.get("_forward_hooks") or attributes.get("_forward_pre_hooks"):
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

    def _meet(self, value: Any) -> None:
        """Note an object, and the names of what counts of it."""
        attributes, fields = getattr(value, "__dict__", {}), QUANTISER_FIELDS.get(type(value).__name__)
        if fields is not None:
            names: Iterable[str] = (*fields, *QUANTISER_TENSORS)
        else:
            names = _QUANTISED if isinstance(value, Tensor) else {*attributes} - _UNWATCHED
        if isinstance(value, ModuleType):
            names = [name for name in names if isinstance(attributes[name], FunctionType)]
        if attributes:
            self._met[id(value)] = value, [name for name in names if name in attributes]

    def _attributes(self, path: str, module: nn.Module, is_moving: bool) -> dict[str, Any]:
        names, attributes = counted_attributes(module), vars(module)
        calls = (attributes.get("_compiled_call_impl"), getattr(attributes.get("forward"), _COMPILED, None))
        if any(call is not None for call in calls) or hasattr(module, "_orig_mod"):
            raise UnsupportedModelError(
                f"{path or 'the model'} ({type(module).__name__}) is compiled, and hooks cannot enter compiled code. "
                "Give hf_blend the model as it is before torch.compile or model.compile()."
            )
        is_moving = is_moving and any(name.endswith("inv_freq") for name in module._buffers)
        self._met[id(module)] = module, [*names, *(name for name in TABLES if not (is_moving and name == "_buffers"))]
        for weight in module._parameters.values():
            if _QUANTISED & getattr(weight, "__dict__", {}).keys():
                state = getattr(weight, "quant_state", None)
                for holder in (weight, state, getattr(state, "state2", None)):
                    self._meet(holder)
        leaves = {name: self._leaf(attributes[name]) for name in names if not isinstance(attributes[name], Tensor)}
        if "forward" in leaves and "_old_forward" in attributes:  # accelerate's; what it calls counts
            del leaves["forward"]
            if getattr(attributes["_old_forward"], "__func__", None) is not getattr(type(module), "forward", None):
                leaves["forward"] = self._leaf(attributes["_old_forward"])
        for name in ("active_adapter", "_active_adapter"):  # of PEFT: a name, or a list of them
            if isinstance(leaves.get(name), str):
                leaves[name] = [leaves[name]]
        if leaves.get("compute_dtype", ...) is None:  # of bitsandbytes: its first input will set it
            leaves["compute_dtype"] = str(next((p.dtype for p in module.parameters() if p.is_floating_point()), None))
        return leaves

    def _leaf(self, value: Any) -> Any:
        """An attribute as a value of JSON that says what it does, the same in every process where that can be said."""
        if isinstance(value, Enum):
            return self._leaf(value.value)
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, (torch.dtype, torch.layout, bytes, complex, range, slice)):
            return str(value)
        if isinstance(value, (torch.device, ModuleType)):
            return type(value).__name__
        if isinstance(value, Tensor):
            return ["tensor", str(value.dtype), list(value.shape), checksum(value)]
        if id(value) in self._inside:
            return self._inside[id(value)]
        if isinstance(value, functools.partial):
            return ["partial", *map(self._leaf, (value.func, [*value.args], value.keywords))]
        if isinstance(value, MethodType):
            return ["method", self._leaf(value.__func__), self._leaf(value.__self__)]
        if isinstance(value, (FunctionType, *BUILTINS)):
            return qualified_name(value) if is_stock(value) else _foreign_name(value)
        if isinstance(value, type):
            return self._of_class(value)
        self._meet(value)
        if isinstance(value, (list, tuple)):
            return [*map(self._leaf, value)]
        if isinstance(value, (set, frozenset)):
            return sorted(str(self._leaf(item)) for item in value)
        if isinstance(value, Mapping):
            return {str(name): self._leaf(item) for name, item in value.items()}
        return config_part(value.to_dict()) if hasattr(value, "to_dict") else self._fields(value)

    def _fields(self, value: Any) -> Any:
        """An object by its class and what it holds."""
        kind = type(value)
        if id(value) in self._open or len(self._open) >= MAX_DEPTH:
            return kind.__qualname__
        names = QUANTISER_FIELDS.get(kind.__name__, tuple(getattr(value, "__dict__", ())))
        if not names and not is_library(kind.__module__) and callable(value):
            raise UnsupportedModelError(
                f"the model holds {value!r:.60} ({qualified_name(kind)}), whose code cannot be told from other code. "
                "Use a function or an nn.Module there."
            )
        self._open.append(id(value))
        try:
            return [self._of_class(kind), {name: self._leaf(getattr(value, name, None)) for name in names}]
        finally:
            self._open.pop()

    def _of_class(self, kind: type) -> Any:
        """A class: its name if it is a library's own, else its file too; with the methods that were put into it."""
        if id(kind) in self._classes:
            return self._classes[id(kind)]
        self._classes[id(kind)] = kind.__qualname__
        described: list[Any] = [qualified_name(kind) if is_library(kind.__module__) else kind.__qualname__]
        for base in kind.__mro__:
            if is_library(base.__module__):
                put = self._put(base)
                described += [[qualified_name(base), put]] if put else []
            elif base.__module__.partition(".")[0] not in sys.stdlib_module_names:
                described.append([*_foreign_name(base), self._put(base)])
                self._meet(base)
        self._classes[id(kind)] = described
        return described

    def _put(self, space: type | ModuleType) -> dict[str, Any]:
        """Functions that come from elsewhere, in a class or a module where the model's code looks them up."""
        home, prefix = (
            (space.__module__, f"{space.__qualname__}.") if isinstance(space, type) else (space.__name__, "")
        )
        members = dict[str, Any]()
        for name, attribute in vars(space).items():
            function = attribute.fget if isinstance(attribute, property) else getattr(attribute, "__func__", attribute)
            if isinstance(function, FunctionType):
                is_named = function.__qualname__.endswith((prefix + name, "_unimplemented"))
                is_moved = not is_named and (name == "forward" or not is_library(home))
                if is_moved or not is_stock(function, home):
                    members[f"{home}.{prefix}{name}" if is_library(home) else prefix + name] = self._leaf(function)
        return members


def reference(value: Any, gone: list[Any]) -> Callable[[], Any]:
    """Reach an object that is not kept alive; a list grows when it goes away."""
    try:
        return weakref.ref(value, gone.append)
    except TypeError:  # it is held: a number, a text, a builtin container
        return lambda: value


def configs_inside(config: Any) -> list[Any]:
    """A config and those inside it, each once."""
    open_, configs = [config], dict[int, Any]()
    while open_:
        inner = open_.pop()
        if isinstance(inner, (list, tuple)):
            open_ += inner
        elif isinstance(inner, dict):
            open_ += inner.values()
        elif hasattr(inner, "to_dict") and id(inner) not in configs:
            configs[id(inner)] = inner
            open_ += getattr(inner, "__dict__", {}).values()
    return list(configs.values())


def attention_functions(names: Iterable[Any]) -> dict[str, Any]:
    """The functions of attention that transformers has under names, without the door of `open_door`."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    functions = {name: ALL_ATTENTION_FUNCTIONS.get(name) for name in names if isinstance(name, str)}
    return {name: getattr(function, "stock", function) for name, function in functions.items()}
