# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What a model is besides its weights: its config, the class, plain attributes and code of every module.

Attributes count unless they are on the list of those that were looked at and found harmless.
"""

import functools
import hashlib
import json
import sys
from collections import OrderedDict
from collections.abc import Iterable, Mapping, MutableMapping
from enum import Enum
from operator import itemgetter
from types import FunctionType, MethodType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...errors import UnsupportedModelError
from ..attention import stock_function
from ..placement import offload_hooks
from . import code
from .canonical import refuse_foreign_hooks
from .code import BUILTINS, class_name, function_name, is_library, is_stock, module_name, own_bases, own_name
from .objects import closed_over, digest_of_bytes, fields_of, parts_of

FORMAT = "hf_blend.fingerprint/4"
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

ON_MODULES = frozenset({  # of anyone
    # compared as weights, or walked as modules
    "_parameters", "_buffers", "_modules", *vars(nn.Module()),
    # movers between devices, which accelerate wraps
    "to", "cpu", "cuda", "npu", "xpu", "mlu", "musa", "sdaa", "hpu", "neuron",
    # accelerate puts the weights in place around `_old_forward`, which counts as the forward
    "_hf_hook", "_old_forward", "forward", "_is_hf_initialized",
})  # fmt: skip
ON_MODELS = frozenset({  # of transformers and of its kind
    # how it was loaded, saved, spread over devices or compiled, not what it computes
    "name_or_path", "hf_quantizer", "is_quantized", "quantization_method", "hf_device_map",
    "is_loaded_in_4bit", "is_loaded_in_8bit", "_is_loaded_in_4bit", "_is_loaded_in_8bit", "_hf_peft_config_loaded",
    "_weight_conversions", "_tp_plan", "_ep_plan", "_pp_plan", "_tp_size", "_device_mesh", "_no_split_modules",
    "_keep_in_fp32_modules", "_keep_in_fp32_modules_strict", "all_tied_weights_keys", "_tied_weights_keys",
    "_keys_to_ignore_on_load_missing", "_keys_to_ignore_on_load_unexpected", "_keys_to_ignore_on_save",
    "_fsdp_plan", "_skip_keys_device_placement", "_compiled_call", "_last_compile_config", "kernel_config",
    "_use_kernels", "warnings_issued", "_require_grads_hook", "_require_grads_hooks", "add_adapter",
    # read by generate; PEFT puts another one in for each generate, and its own back behind it
    "generation_config", "prepare_inputs_for_generation", "base_model_prepare_inputs_for_generation",
    # what a forward itself writes
    "_output_capturing_hooks_installed", "rope_deltas",
})  # fmt: skip
ON_LIBRARIES = frozenset({  # on classes of the libraries, which read nothing else out of them
    "padding_idx", "support_avx512bf16_for_cpu",
    # training only
    "gradient_checkpointing", "_gradient_checkpointing_func", "loss_function", "_loss_function", "loss_type",
    # what a forward itself writes, that of bitsandbytes from its first input unless the config names it
    "max_seq_len_cached", "compute_type_is_set", "compute_dtype",
})  # fmt: skip
IGNORED_ATTRIBUTES = ON_MODULES | ON_MODELS | ON_LIBRARIES
_ignored: MutableMapping[type, frozenset[str]] = WeakKeyDictionary()
OPAQUE = (
    "MatmulLtState", "QuantState",  # of bitsandbytes: the config says how it quantises, the weights the rest
    "lock", "RLock", "Generator", "Stream", "Event",  # with a state of its own, which no forward without dropout reads
)  # fmt: skip
MOVING = ("inv_freq", "long_inv_freq", "max_seq_len_cached")  # of rotary embeddings that change as prompts grow
_COMPILED = "_torchdynamo_orig_callable"  # what torch.compile made of a function has it
_PLAIN = (bool, int, float, str, type(None))
_WRITTEN = (torch.dtype, torch.layout, torch.device, complex, range, slice)
TENSOR = ["tensor"]  # its values are among the weights


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
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, torch.dtype):
        return str(value)
    if hasattr(value, "to_dict"):
        return config_part(value.to_dict())
    raise UnsupportedModelError(
        f"the model's config holds {value!r:.80} ({type(value).__name__}), which cannot be told from another value in "
        "another process. Use numbers, texts, lists and dicts in configs."
    )


def digest_of(value: object) -> str:
    """The SHA-256 of a value of JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


class Structure:
    """What a model is at one moment besides the values in its tensors.

    What is met again, be it a module, a tensor or another object, is described by the path where it was met first.

    Attributes:
        parts: all that counts, as values of JSON: two models, or two moments, are compared by it.
        tensors: parameters, buffers and tensors in plain attributes, with their paths and modules, each once. Never
            through `state_dict()`: it rewrites the 4-bit weights of a live model.
    """

    def __init__(self, model: nn.Module) -> None:
        """Walk over a model.

        Raises:
            UnsupportedModelError: a part of it is compiled, has a forward hook of others, or cannot be read.
        """
        modules = dict(model.named_modules())
        self.tensors: list[tuple[str, nn.Module, Tensor]] = []
        self._described: dict[int, Any] = {id(module): path for path, module in modules.items()}  # a path, or a value
        self._kept = list[Any]()  # so that no other object gets an id that was described
        self._attention = set[str]()  # names of the implementations in use
        config = config_part(model.config.to_dict())
        self._rope_types = _rope_types(config) & {"dynamic", "longrope"}
        kinds = {kind: number for number, kind in enumerate(dict.fromkeys(map(type, modules.values())))}
        self._ignored = {kind: ignored_attributes(kind) for kind in kinds}
        self._classes = dict[type, code.Contents]()
        names = dict.fromkeys(kind.__module__ for kind in kinds if kind.__module__ != "__main__")  # which grows
        homes = [sys.modules[name] for name in names if name in sys.modules]
        refuse_foreign_hooks(modules.values())
        try:
            rows = [[path, kinds[type(module)], *self._row(path, module)] for path, module in modules.items()]
        except RecursionError as error:
            raise UnsupportedModelError(
                f"an attribute of {type(model).__name__} holds objects that are nested too deeply to be compared. "
                "Keep them outside the model."
            ) from error
        self.parts: dict[str, Any] = {
            "format": FORMAT,
            "model_class": type(model).__name__,
            "config": config,
            "modules": rows,
            "classes": [self._class(kind, f"classes.{number}") for kind, number in kinds.items()],
            "patches": {name: patch for home in homes for name, patch in self._patches(home)},
        }
        functions = {name: stock_function(name) for name in sorted(self._attention)}
        self.parts["attention"] = {
            name: self._describe(function, name) for name, function in functions.items() if not is_stock(function)
        }

    def _row(self, path: str, module: nn.Module) -> list[Any]:
        """The attributes of a module that count, and where modules and tensors in it are if not below its path.

        Its tensors are added to `tensors`.
        """
        attributes, self._owner = vars(module), module
        forward = attributes.get("forward")
        is_compiled = "_orig_mod" in module._modules or attributes.get("_compiled_call_impl") is not None
        if is_compiled or hasattr(forward, _COMPILED):
            raise UnsupportedModelError(
                f"{path or 'the model'} ({type(module).__name__}) is compiled, and hooks cannot enter compiled code. "
                "Give hf_blend the model as it is before torch.compile or model.compile()."
            )
        tensors, shared, described = module._parameters | module._buffers, {}, {}
        skipped = self._ignored.get(type(module)) or ignored_attributes(type(module))
        skipped = skipped | self._moving(module) if "rope_type" in attributes or self._rope_types else skipped
        for name in sorted(tensors.keys() - skipped):
            if tensors[name] is not None and (state := self._describe(tensors[name], f"{path}.{name}")) is not TENSOR:
                shared[name] = state
        for name in sorted(attributes.keys() - skipped):
            value = attributes[name]
            described[name] = value if type(value) in _PLAIN else self._describe(value, f"{path}.{name}")
        if getattr(getattr(forward, "func", None), "__module__", "") == "accelerate.hooks":  # it calls the old one
            forward = attributes["_old_forward"]
        is_of_class = isinstance(forward, MethodType) and forward.__func__ is type(module).forward
        if forward is not None and not (is_of_class and forward.__self__ is module):
            described["forward"] = self._describe(forward, f"{path}.forward")
        for number, hook in enumerate(offload_hooks(module)):
            if not is_library(type(hook).__module__):
                described[f"_hf_hook.{number}"] = self._describe(hook, f"{path}._hf_hook.{number}")
        for name in ("active_adapter", "_active_adapter"):  # of PEFT: a name, or a list of them
            if isinstance(described.get(name), str):
                described[name] = ["list", described[name]]
        children = module._modules
        for name, child in children.items():
            if child is None or self._described.get(id(child)) != (f"{path}.{name}" if path else name):
                shared |= {"": [[name, self._describe(child, f"{path}.{name}")] for name, child in children.items()]}
                break
        return [described, shared] if shared else [described]

    def _class(self, kind: type, path: str) -> list[Any]:
        """A class by its name and, where it is met first, by the values in it."""
        described, values = code.class_and_values(kind, self._classes)
        if (earlier := self._described.get(id(kind))) is not None:
            return [*described, earlier]
        if values:
            self._described[id(kind)] = path
            self._kept.append(kind)
            described.append([[name, self._describe(value, f"{path}.{name}")] for name, value in values])
        return described

    def _patches(self, space: ModuleType) -> list[tuple[str, Any]]:
        """What was put into a module, by name."""
        contents, name = code.contents_of(space), space.__name__
        objects = {f"{name}.{at}": self._describe(value, f"{name}.{at}") for at, value in contents.objects.items()}
        return [*(contents.patches | objects).items()]

    def _moving(self, module: nn.Module) -> set[str]:
        """The tables of a module that a forward replaces as prompts grow; the config says all about them."""
        own = () if is_library(type(module).__module__) else self._rope_types
        kinds = getattr(module, "rope_type", own)
        moving = set[str]()
        for layers, kind in (kinds if isinstance(kinds, Mapping) else {"": kinds}).items():
            if "dynamic" in (kind or ()) or "longrope" in (kind or ()):
                moving |= {f"{layers}_{name}" for name in MOVING} | {"attention_scaling"} if layers else {*MOVING}
        return moving

    def _describe(self, value: Any, path: str) -> Any:
        """Anything that a module holds, as a value of JSON; the same in every process where that can be said.

        What is not plain is a list that begins with what it is.
        """
        if type(value) in _PLAIN:
            return value
        if (earlier := self._described.get(id(value))) is not None:
            return ["@", earlier] if isinstance(earlier, str) else earlier
        if isinstance(value, Tensor):  # most of what is met
            return self._describe_object(value, path)
        if isinstance(value, Enum):
            is_plain = isinstance(value, (int, str))
            return self._describe(value.value, path) if is_plain else [class_name(type(value)), value.name]
        if isinstance(value, _WRITTEN):
            return [type(value).__name__, *([] if isinstance(value, torch.device) else [str(value)])]
        if type(value) is bytes:
            return ["bytes", digest_of_bytes(value)]
        if type(value) is functools.partial:
            return ["partial", *(self._describe(item, path) for item in (value.func, value.args, value.keywords))]
        if isinstance(value, MethodType):
            return ["method", self._describe(value.__func__, path), self._describe(value.__self__, path)]
        if isinstance(value, (FunctionType, *BUILTINS)):
            return self._describe_function(value, path)
        if isinstance(value, type):
            return ["class", self._class(value, path)]
        if isinstance(value, (list, tuple, set, frozenset, WeakSet, Mapping)):
            return self._describe_container(value, path)
        return self._describe_object(value, path)

    def _describe_function(self, value: Any, path: str) -> list[Any]:
        """A function by its name, with what an extension's method is bound to and what a library's closure holds."""
        bound = getattr(value, "__self__", None)
        inner = [] if bound is None or isinstance(bound, (ModuleType, type)) else [bound]
        name = function_name(value)
        inner += closed_over(value) if isinstance(name, str) else []
        return ["function", name, *(self._describe(item, f"{path}.{at}") for at, item in enumerate(inner))]

    def _describe_container(self, value: Any, path: str) -> list[Any]:
        """A container by what is in it, not by where it was met first: configs share lists as they like."""
        self._described[id(value)] = path  # for what is in it and leads back
        kind = type(value)
        is_builtin = kind in (list, tuple, set, frozenset, dict)
        described: list[Any] = [kind.__name__ if is_builtin else self._class(kind, path)]
        if isinstance(value, Mapping):
            keys = [(json.dumps(self._describe(name, f"{path}.{at}")), value[name]) for at, name in enumerate(value)]
            pairs = keys if kind is OrderedDict else sorted(keys, key=itemgetter(0))
            described += [[key, self._describe(item, path + "." + key.strip('"'))] for key, item in pairs]
        elif isinstance(value, (set, frozenset, WeakSet)):
            items = self._sorted(value, path)
            described += sorted(json.dumps(self._describe(item, f"{path}.{at}")) for at, item in enumerate(items))
        else:
            described += [self._describe(item, f"{path}.{at}") for at, item in enumerate(value)]
        if not is_builtin and (isinstance(value, (list, tuple, set, frozenset, dict)) or own_bases(kind)):
            described.append({name: self._describe(item, f"{path}.{name}") for name, item in fields_of(value).items()})
        del self._described[id(value)]
        return described

    def _sorted(self, items: Iterable[Any], path: str) -> list[Any]:
        """The items of a set by what they are, as their order in memory differs from process to process."""
        return sorted(items, key=lambda item: "" if type(item) in _PLAIN else json.dumps(self._apart(item, path)))

    def _apart(self, item: Any, path: str) -> Any:
        """An item of a set, described as if it were not met before or behind others of the set."""
        before, tensors = dict(self._described), len(self.tensors)
        described, self._described = self._describe(item, path), before
        if len(self.tensors) > tensors:
            raise UnsupportedModelError(
                f"{path} is a set with a tensor, but tensors are compared in an order, and a set has none. Use a list "
                "or a dict."
            )
        return described

    def _describe_object(self, value: Any, path: str) -> Any:
        """An object that was not described before. A tensor is added to `tensors`, a config counts by its digest."""
        self._described[id(value)] = path
        self._kept.append(value)
        if isinstance(value, Tensor):
            self.tensors.append((path, self._owner, value))
            return TENSOR
        if isinstance(value, nn.Module):  # in a list, where its model does not know of it
            refuse_foreign_hooks([value])
            owner, row = self._owner, self._row(path, value)
            self._owner = owner
            return [self._class(type(value), path), *row]
        if hasattr(value, "to_dict"):
            if name := getattr(value, "_attn_implementation", None):
                self._attention.add(name)
            self._described[id(value)] = ["config", digest_of(config_part(value.to_dict()))]
            return self._described[id(value)]
        if isinstance(value, ModuleType):
            return ["module", module_name(value)]
        if type(value).__name__ in OPAQUE:
            return [type(value).__qualname__]
        parts = parts_of(value)
        if parts is None:
            return own_name(value, path)
        return [
            self._class(type(value), path),
            {name: self._describe(parts[name], f"{path}.{name}") for name in sorted(parts)},
        ]


def ignored_attributes(kind: type) -> frozenset[str]:
    """Names of attributes that do not count on modules of a class, of one's own only what its code does not name."""
    if kind not in _ignored:
        others = ON_LIBRARIES if issubclass(kind, PreTrainedModel) else ON_LIBRARIES | ON_MODELS
        _ignored[kind] = IGNORED_ATTRIBUTES - code.own_words(kind, others)
    return _ignored[kind]


def _rope_types(config: Any, is_rope: bool = False) -> set[str]:
    """The types of rotary embeddings that a config has."""
    if not isinstance(config, dict):
        return set()
    own = {config[name] for name in ("type", "rope_type") if is_rope and isinstance(config.get(name), str)}
    return own.union(*(_rope_types(value, is_rope or name.startswith("rope")) for name, value in config.items()))
