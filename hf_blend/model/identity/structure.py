# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What a model is besides its weights: the class and the plain attributes of every module, and patched code.

Attributes count unless they are on the list of those that were looked at and found harmless. Code of the libraries
counts by name; code that is not theirs (a patched `forward`, custom modelling code, an activation of one's own) counts
by its bytecode, with the constants, defaults, closures and globals that it uses. What cannot be written down is
refused by name.
"""

import contextlib
import functools
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import UnsupportedModelError
from .code import (
    BUILTINS,
    CALLABLES,
    checksum,
    code_digest,
    global_names,
    is_installed,
    is_library,
    is_stock,
    plain_function,
    qualified_name,
)

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
SHARED_CODE = (  # of transformers and torch, called by the modelling code of many
    "torch.nn.functional", "transformers.activations", "transformers.modeling_rope_utils",
    "transformers.masking_utils", "transformers.integrations.sdpa_attention", "transformers.cache_utils",
)  # fmt: skip
TORCH_FUNCTIONS = tuple(  # of torch itself, that compute with tensors; operators are in torch.Tensor
    name for name in vars(torch)
    if not name.startswith("_") and (hasattr(torch._C._VariableFunctions, name) or name in torch.functional.__all__)
)  # fmt: skip
TORCH_INTERNALS = frozenset(vars(nn.Module()))
_COMPILED = "_torchdynamo_orig_callable"  # what torch.compile made of a function has it
TABLES = ("_parameters", "_buffers", "_modules")  # of a module
_PLAIN = (bool, int, float, str, tuple, type(None))
MAX_DEPTH = 6  # of objects inside attributes
QUANTISER_FIELDS = {"MatmulLtState": ("threshold", "has_fp16_weights"), "QuantState": ("blocksize", "quant_type")}
QUANTISER_TENSORS = ("absmax", "state2", "CB", "SCB")
_QUANTISED = {"quant_state", "SCB"}  # of a weight
_UNWATCHED = IGNORED_CONFIG_FIELDS - {"_attn_implementation", "_attn_implementation_internal"}


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
        self._inside |= {id(one): "@config" for one in configs}
        self.met: dict[int, tuple[Any, list[str]]] = {}  # by id: objects, and the names of what counts of each
        self.is_foreign = False  # code was met that is no library's own
        self.attention = attention_functions(getattr(one, "_attn_implementation", None) for one in configs)
        self._open: list[int] = []
        self._codes: dict[int, Any] = {}
        self._has_moving_tables = has_moving_rotary_tables(model)
        classes = dict.fromkeys(map(type, modules.values()))
        self.namespaces = list(_namespaces(classes))
        foreign = {
            name: one
            for name, one in self.attention.items()
            if one and (isinstance(one, BUILTINS) or not is_stock(one))
        }
        self.parts = [
            [[path, type(one).__qualname__, self._attributes(path, one)] for path, one in modules.items()],
            [self.of_class(one) for one in classes],
            self._patched_functions(),
            {name: self.leaf(one, f"the attention {name!r}") for name, one in foreign.items()},
        ]
        for one in configs:
            self._meet(one)

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
        """A function: its name if it is a library's own, else what it runs and what it uses."""
        if isinstance(function, functools.partial):
            arguments = [self.leaf([*function.args], where), self.leaf(function.keywords, where)]
            return ["partial", self.leaf(function.func, where), *arguments]
        if isinstance(function, MethodType):
            return ["method", self.leaf(function.__func__, where), self.leaf(function.__self__, where)]
        return qualified_name(function) if is_stock(function) else self._foreign(function, where)

    def _foreign(self, function: FunctionType, where: str) -> Any:
        """Code that is no library's own, by what it runs and what it can reach."""
        if id(function) in self._codes:
            return self._codes[id(function)]
        if is_installed(function):
            return [qualified_name(function), code_digest(function.__code__)]
        self.is_foreign = True
        self._codes[id(function)] = function.__qualname__  # if it calls itself
        code = function.__code__
        cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
        filled = {}
        for name, cell in cells:
            with contextlib.suppress(ValueError):  # it is empty
                filled[name] = cell.cell_contents
        reached = {name: function.__globals__[name] for name in global_names(code) if name in function.__globals__}
        found = [
            code_digest(code),
            self.leaf([function.__defaults__, function.__kwdefaults__], where),
            {name: self._reached(value, f"{where} ({name})") for name, value in sorted(filled.items())},
            {name: self._global(value, f"{where} ({name})") for name, value in sorted(reached.items())},
            self.leaf(getattr(function, "__wrapped__", None), where),
        ]
        self._codes[id(function)] = found
        return found

    def _reached(self, value: Any, where: str) -> Any:
        if isinstance(value, nn.Module) and id(value) not in self._inside:
            raise UnsupportedModelError(
                f"{where} is a {type(value).__name__} that is no part of the model, so what it computes cannot be "
                "followed. Make it a submodule, or undo the patch."
            )
        return self.leaf(value, where)

    def _global(self, value: Any, where: str) -> Any:
        """A global of foreign code: objects count by class alone, since loggers and registries are among them."""
        plain = (*_PLAIN, list, dict, set, Tensor, torch.dtype, Enum)
        if isinstance(value, (FunctionType, type)) and is_installed(value):
            return qualified_name(value)
        if isinstance(value, (*plain, *CALLABLES, type)):
            return self.leaf(value, where)
        return type(value).__qualname__

    def of_class(self, kind: type) -> Any:
        """A class: its name if it is a library's own, with what was put into it; else its name and code."""
        if id(kind) in self._codes:
            return self._codes[id(kind)]
        self._codes[id(kind)] = kind.__qualname__
        found: list[Any] = [qualified_name(kind) if is_library(kind.__module__) else kind.__qualname__]
        for base in kind.__mro__:
            if is_library(base.__module__):
                put = self._body(base)
                found += [[qualified_name(base), put]] if put else []
            elif base.__module__.partition(".")[0] not in (*sys.stdlib_module_names, "builtins"):
                self.is_foreign = self.is_foreign or not is_installed(base)
                found.append([base.__qualname__, self._body(base)])
        self._codes[id(kind)] = found
        return found

    def _body(self, base: type) -> dict[str, Any]:
        """What counts of a class: of a library's the methods that are not its own; of others all, and plain values."""
        is_own, found = is_library(base.__module__), dict[str, Any]()
        for name, attribute in vars(base).items():
            function, where = plain_function(attribute), f"{base.__qualname__}.{name}"
            if function is None:
                if not is_own and isinstance(attribute, _PLAIN) and not name.startswith("__"):
                    found[name] = self.leaf(attribute, where)
                continue
            is_moved = name == "forward" and base is not nn.Module and not function.__qualname__.endswith(where)
            if is_moved or not (is_own and is_stock(function)):
                found[name] = self.of_function(function, where)
        return found

    def _patched_functions(self) -> dict[str, Any]:
        """Functions that were put into the libraries' own modules, where the model's code looks them up."""
        found = {f"torch.Tensor.{name}": value for name, value in self._body(Tensor).items()}
        spaces = [(space.__name__, vars(space)) for space in self.namespaces if isinstance(space, ModuleType)]
        for home, space in [*spaces, ("torch", {name: getattr(torch, name) for name in TORCH_FUNCTIONS})]:
            for name, value in space.items():
                if not isinstance(value, FunctionType) or is_stock(value):
                    continue
                is_standard = (value.__module__ or "").partition(".")[0] in sys.stdlib_module_names
                if not (is_standard and is_installed(value)):
                    found[f"{home}.{name}"] = self.of_function(value, f"{home}.{name}")
        return found


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


def _namespaces(classes: Iterable[type]) -> Iterator[type | ModuleType]:
    """The classes of a model with their bases and of tensors, and the modules that their code looks names up in."""
    classes = list(classes)
    yield from dict.fromkeys([*(base for kind in classes for base in kind.__mro__[:-1]), Tensor])
    homes = dict.fromkeys(kind.__module__ for kind in classes if is_library(kind.__module__))
    yield from (sys.modules[name] for name in dict.fromkeys([*homes, *SHARED_CODE]) if name in sys.modules)
