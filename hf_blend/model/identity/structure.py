# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What a model is besides its weights: the class and the plain attributes of every module, and functions put into it.

Attributes count unless they are on the list of those that were looked at and found harmless. Functions and classes of
the libraries count by name, others by the file that they come from; what no file has under its name (a lambda, a
closure, a class of a notebook) counts as itself, and is known in this process alone.
"""

import functools
import hashlib
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, MethodType, MethodWrapperType, ModuleType
from typing import Any
from uuid import uuid4
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ...errors import UnsupportedModelError

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
CALLABLES = (FunctionType, MethodType, functools.partial, *BUILTINS)
MAX_DEPTH = 6  # of objects inside attributes
QUANTISER_FIELDS = {"MatmulLtState": ("threshold", "has_fp16_weights"), "QuantState": ("blocksize", "quant_type")}
QUANTISER_TENSORS = ("absmax", "state2", "CB", "SCB")
_COMPILED = "_torchdynamo_orig_callable"  # what torch.compile made of a function has it
_PLAIN = (bool, int, float, str, tuple, type(None))
_PYTHON, _SITES = (f"{os.path.dirname(os.__file__)}{os.sep}", "<frozen"), ("site-packages", "dist-packages")
_QUANTISED = {"quant_state", "SCB"}  # of a weight
_UNWATCHED = IGNORED_CONFIG_FIELDS - {"_attn_implementation", "_attn_implementation_internal"}
_names: WeakKeyDictionary[Any, str] = WeakKeyDictionary()  # of what no file has, in this process


def is_library(module: str | None) -> bool:
    """Whether a dotted module name belongs to a library whose code is known by name."""
    return (module or "").partition(".")[0] in LIBRARIES


def qualified_name(value: Any) -> str:
    """Module and name of a function or class."""
    return f"{getattr(value, '__module__', None)}.{getattr(value, '__qualname__', type(value).__qualname__)}"


def is_stock(function: Any, *files: str) -> bool:
    """Whether a function, and all that it wraps, was compiled from the libraries, Python's own or some more files.

    A wrapper may copy every name of what it wraps, but not the file.
    """
    folders = _folders(tuple(name for name in LIBRARIES if name in sys.modules))
    while isinstance(function, FunctionType):
        file = function.__code__.co_filename
        is_python = file.startswith(_PYTHON) and not any(name in file for name in _SITES)
        if not (is_python or file.startswith(folders) or file in files):
            return False
        function = getattr(function, "__wrapped__", None)
        function = getattr(function, "__func__", function)
    return function is None or isinstance(function, BUILTINS)


@functools.lru_cache(maxsize=8)
def _folders(names: tuple[str, ...]) -> tuple[str, ...]:
    files = (getattr(sys.modules[name], "__file__", None) for name in names)
    return tuple(os.path.dirname(file) + os.sep for file in files if file)


def _files(module: str) -> tuple[str, ...]:
    """The file of an imported module; none of a notebook's."""
    return tuple(filter(None, [getattr(sys.modules.get(module), "__file__", None)]))


def _foreign_name(value: Any) -> list[str]:
    """A function or class that is no library's own: by its file if it is to be had there, else by itself."""
    reached: Any = sys.modules.get(value.__module__ or "")
    for name in value.__qualname__.split("."):
        reached = getattr(reached, name, None)
    files = _files(value.__module__ or "")
    if reached is value and files and (isinstance(value, type) or is_stock(value, *files)):
        return [value.__qualname__, hashlib.sha256(Path(files[0]).read_bytes()).hexdigest()]
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
    """One walk over a model, and what it found."""

    def __init__(self, model: nn.Module) -> None:
        """Walk over a model."""
        modules, configs = dict(model.named_modules()), configs_inside(getattr(model, "config", None))
        self._inside = {id(module): f"@{path}" for path, module in modules.items()}
        self._inside |= {id(config): "@config" for config in configs}
        self.met: dict[int, tuple[Any, list[str]]] = {}  # by id: objects, and the names of what counts of each
        self.attention = attention_functions(getattr(config, "_attn_implementation", None) for config in configs)
        self._open: list[int] = []
        self._classes: dict[int, Any] = {}
        self._has_moving_tables = has_moving_rotary_tables(model)
        classes = dict.fromkeys(map(type, modules.values()))
        homes = [sys.modules[name] for name in dict.fromkeys(kind.__module__ for kind in classes) if name in sys.modules]
        bases = dict.fromkeys(base for kind in classes for base in kind.__mro__[:-1] if is_library(base.__module__))
        self.namespaces = [*bases, *(home for home in homes if is_library(home.__name__))]  # of the libraries
        foreign = {name: function for name, function in self.attention.items() if function}
        self.parts = [
            [[path, type(module).__qualname__, self._attributes(path, module)] for path, module in modules.items()],
            [self.of_class(kind) for kind in classes],
            {name: value for home in homes if home.__name__ != "__main__" for name, value in self._replaced(home).items()},
            {name: self.leaf(one, f"the attention {name!r}") for name, one in foreign.items() if not is_stock(one)},
        ]
        for config in configs:
            self._meet(config)

    def _attributes(self, path: str, module: nn.Module) -> dict[str, Any]:
        names, held = counted_attributes(module), vars(module)
        calls = (held.get("_compiled_call_impl"), getattr(held.get("forward"), _COMPILED, None))
        if any(call is not None for call in calls) or hasattr(module, "_orig_mod"):
            raise UnsupportedModelError(
                f"{path or 'the model'} ({type(module).__name__}) is compiled, and hooks cannot enter compiled code. "
                "Give hf_blend the model as it is before torch.compile or model.compile()."
            )
        is_moving = self._has_moving_tables and any(name.endswith("inv_freq") for name in module._buffers)
        self.met[id(module)] = module, [*names, *(name for name in TABLES if not (is_moving and name == "_buffers"))]
        for weight in module._parameters.values():
            if _QUANTISED & getattr(weight, "__dict__", {}).keys():
                state = getattr(weight, "quant_state", None)
                for one in (weight, state, getattr(state, "state2", None)):
                    self._meet(one)
        found = {k: self.leaf(held[k], f"{path}.{k}") for k in names if not isinstance(held[k], Tensor)}
        if "forward" in found and "_old_forward" in held:  # accelerate's; what it calls counts
            del found["forward"]
            inner = held["_old_forward"]
            if getattr(inner, "__func__", None) is not getattr(type(module), "forward", None):
                found["forward"] = self.leaf(inner, f"{path}.forward")
        for name in ("active_adapter", "_active_adapter"):  # of PEFT: a name, or a list of them
            if isinstance(found.get(name), str):
                found[name] = [found[name]]
        if found.get("compute_dtype", ...) is None:  # of bitsandbytes: its first input will set it
            found["compute_dtype"] = str(next((p.dtype for p in module.parameters() if p.is_floating_point()), None))
        return found

    def _meet(self, value: Any) -> None:
        """Note an object, and the names of what counts of it."""
        held, fields = getattr(value, "__dict__", {}), QUANTISER_FIELDS.get(type(value).__name__)
        if fields is not None:
            names: Iterable[str] = (*fields, *QUANTISER_TENSORS)
        else:
            names = _QUANTISED if isinstance(value, Tensor) else {*held} - _UNWATCHED
        if held:
            self.met[id(value)] = value, [name for name in names if name in held]

    def leaf(self, value: Any, where: str) -> Any:
        """An attribute as a value of JSON that says what it does, the same in every process."""
        if isinstance(value, Enum):
            return self.leaf(value.value, where)
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
        if isinstance(value, CALLABLES):
            return self.of_function(value, where)
        if isinstance(value, type):
            return self.of_class(value)
        self._meet(value)
        if isinstance(value, (list, tuple)):
            return [self.leaf(item, where) for item in value]
        if isinstance(value, (set, frozenset)):
            return sorted(str(self.leaf(item, where)) for item in value)
        if isinstance(value, Mapping):
            return {str(name): self.leaf(item, f"{where}.{name}") for name, item in value.items()}
        if hasattr(value, "to_dict"):
            return config_part(value.to_dict())
        return self._fields(value, where)

    def _fields(self, value: Any, where: str) -> Any:
        """An object by its class and what it holds."""
        kind = type(value)
        if id(value) in self._open or len(self._open) >= MAX_DEPTH:
            return kind.__qualname__
        names = QUANTISER_FIELDS.get(kind.__name__, tuple(getattr(value, "__dict__", ())))
        if not names and not is_library(kind.__module__) and callable(value):
            raise UnsupportedModelError(
                f"{where} is {value!r:.60} ({qualified_name(kind)}), whose code cannot be told from other code in "
                "another process. Use a function or an nn.Module there."
            )
        self._open.append(id(value))
        try:
            held = {name: self.leaf(getattr(value, name, None), f"{where}.{name}") for name in names}
        finally:
            self._open.pop()
        return [self.of_class(kind), held]

    def of_function(self, function: Any, where: str) -> Any:
        """A function: its name if it is a library's own, else its file or itself."""
        if isinstance(function, functools.partial):
            arguments = [self.leaf([*function.args], where), self.leaf(function.keywords, where)]
            return ["partial", self.leaf(function.func, where), *arguments]
        if isinstance(function, MethodType):
            return ["method", self.leaf(function.__func__, where), self.leaf(function.__self__, where)]
        return qualified_name(function) if is_stock(function) else _foreign_name(function)

    def of_class(self, kind: type) -> Any:
        """A class: its name if it is a library's own, else its file too; with what was put into it."""
        if id(kind) in self._classes:
            return self._classes[id(kind)]
        self._classes[id(kind)] = kind.__qualname__
        found: list[Any] = [qualified_name(kind) if is_library(kind.__module__) else kind.__qualname__]
        for base in kind.__mro__:
            if is_library(base.__module__):
                put = self._put(base)
                found += [[qualified_name(base), put]] if put else []
            elif base.__module__.partition(".")[0] not in sys.stdlib_module_names:
                found.append([*_foreign_name(base), self._put(base)])
                self._meet(base)
        self._classes[id(kind)] = found
        return found

    def _put(self, base: type) -> dict[str, Any]:
        """Methods of a class that come from elsewhere; of one that is no library's own plain values too."""
        is_own, files, found = is_library(base.__module__), _files(base.__module__), dict[str, Any]()
        for name, attribute in vars(base).items():
            function, where = _plain_function(attribute), f"{base.__qualname__}.{name}"
            if function is None:
                if not is_own and isinstance(attribute, _PLAIN) and not name.startswith("__"):
                    found[name] = self.leaf(attribute, where)
                continue
            is_moved = name == "forward" and base is not nn.Module and not function.__qualname__.endswith(where)
            if is_moved or not is_stock(function, *files):
                found[name] = self.of_function(function, where)
        return found

    def _replaced(self, home: ModuleType) -> dict[str, Any]:
        """Functions that come from elsewhere, in a module where the model's code looks them up."""
        names = {name: value for name, value in vars(home).items() if isinstance(value, FunctionType)}
        if not is_library(home.__name__):
            self.met[id(home)] = home, [*names]
        return {
            f"{home.__name__}.{name}": self.of_function(value, name)
            for name, value in names.items()
            if not is_stock(value, *_files(home.__name__))
        }


def _plain_function(attribute: Any) -> FunctionType | None:
    """The function behind an attribute of a class: a method, a property's getter, or what a decorator wraps."""
    attribute = attribute.fget if isinstance(attribute, property) else attribute
    attribute = getattr(attribute, "__func__", attribute)
    return attribute if isinstance(attribute, FunctionType) else None


def configs_inside(config: Any) -> list[Any]:
    """A config and those inside it, each once."""
    open_, found = [config], dict[int, Any]()
    while open_:
        one = open_.pop()
        if isinstance(one, (list, tuple)):
            open_ += one
        elif isinstance(one, dict):
            open_ += one.values()
        elif hasattr(one, "to_dict") and id(one) not in found:
            found[id(one)] = one
            open_ += getattr(one, "__dict__", {}).values()
    return list(found.values())


def attention_functions(names: Iterable[Any]) -> dict[str, Any]:
    """The functions of attention that transformers has under names, without the door of `open_door`."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    found = {name: ALL_ATTENTION_FUNCTIONS.get(name) for name in names if isinstance(name, str)}
    return {name: getattr(one, "stock", one) for name, one in found.items()}
