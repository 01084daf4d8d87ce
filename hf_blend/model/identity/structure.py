# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What a model is besides its weights: its config, the class, plain attributes and code of every module.

Attributes count unless they are on the list of those that were looked at and found harmless.
"""

import functools
import hashlib
import json
import sys
from collections.abc import Mapping
from enum import Enum
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import UnsupportedModelError
from ..attention import stock_function
from .canonical import refuse_foreign_hooks
from .code import BUILTINS, class_name, function_name, is_stock, patches

FORMAT = "hf_blend.fingerprint/3"
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
    "_hf_hook", "_old_forward", "forward",
    # what a forward itself writes, that of bitsandbytes from its first input unless the config names it
    "max_seq_len_cached", "compute_type_is_set", "compute_dtype", "_output_capturing_hooks_installed", "rope_deltas",
})  # fmt: skip
SKIPPED = IGNORED_ATTRIBUTES | vars(nn.Module()).keys()
OPAQUE = ("MatmulLtState", "QuantState")  # of bitsandbytes: the config says how it quantises, the weights the rest
MAX_DEPTH = 6  # of objects inside attributes
_COMPILED = "_torchdynamo_orig_callable"  # what torch.compile made of a function has it
_PLAIN = (bool, int, float, str, type(None))
_WRITTEN = (torch.dtype, torch.layout, torch.device, bytes, complex, range, slice)


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

    Attributes:
        parts: all that counts, as values of JSON: two models, or two moments, are compared by it.
        tensors: parameters, buffers and tensors in plain attributes, with their paths and modules, each once. Never
            through `state_dict()`: it rewrites the 4-bit weights of a live model.
    """

    def __init__(self, model: nn.Module) -> None:
        """Walk over a model.

        Raises:
            UnsupportedModelError: a part of it is compiled, or has a forward hook of others.
        """
        modules = dict(model.named_modules())
        refuse_foreign_hooks(modules.values())
        self.tensors: list[tuple[str, nn.Module, Tensor]] = []
        # by the id of an object how it is described when it is met again: a module by its path
        self._described = {id(module): f"@{path}" for path, module in modules.items()}
        self._depth = 0  # of objects inside objects
        self._attention = set[str]()  # names of the implementations in use
        config = config_part(model.config.to_dict())
        written = json.dumps(config)
        # dynamic and longrope models replace their frequencies as prompts grow; the config says all about them
        self._moving_tables = 'type": "dynamic"' in written or 'type": "longrope"' in written
        kinds = dict.fromkeys(map(type, modules.values()))
        names = dict.fromkeys(kind.__module__ for kind in kinds if kind.__module__ != "__main__")  # which grows
        homes = [sys.modules[name] for name in names if name in sys.modules]
        self.parts: dict[str, Any] = {
            "format": FORMAT,
            "model_class": type(model).__name__,
            "config": config,
            "modules": [
                [path, type(module).__qualname__, self._fields(path, module)] for path, module in modules.items()
            ],
            "classes": [class_name(kind) for kind in kinds],
            "patches": {name: patch for home in homes for name, patch in patches(home).items()},
        }
        functions = {name: stock_function(name) for name in sorted(self._attention)}
        self.parts["attention"] = {
            name: self._describe(function, name) for name, function in functions.items() if not is_stock(function)
        }

    def _fields(self, path: str, module: nn.Module) -> dict[str, Any]:
        """The attributes of a module that count; its tensors are added to `tensors`."""
        attributes, self._owner = vars(module), module
        forward = attributes.get("forward")
        is_compiled = "_orig_mod" in module._modules or attributes.get("_compiled_call_impl") is not None
        if is_compiled or hasattr(forward, _COMPILED):
            raise UnsupportedModelError(
                f"{path or 'the model'} ({type(module).__name__}) is compiled, and hooks cannot enter compiled code. "
                "Give hf_blend the model as it is before torch.compile or model.compile()."
            )
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and id(tensor) not in self._described:
                    self._describe_object(tensor, f"{path}.{name}")
        described = {}
        for name, value in attributes.items():
            if name in SKIPPED or (self._moving_tables and name.endswith("inv_freq")):
                continue
            described[name] = value if type(value) in _PLAIN else self._describe(value, f"{path}.{name}")
        forward = attributes.get("_old_forward", forward)  # of accelerate, whose own calls it
        if forward is not None and forward != MethodType(type(module).forward, module):
            described["forward"] = self._describe(forward, f"{path}.forward")
        for name in ("active_adapter", "_active_adapter"):  # of PEFT: a name, or a list of them
            if isinstance(described.get(name), str):
                described[name] = [described[name]]
        return described

    def _describe(self, value: Any, path: str) -> Any:
        """Anything that a module holds, as a value of JSON; the same in every process where that can be said."""
        if type(value) in _PLAIN:
            return value
        if id(value) in self._described:
            return self._described[id(value)]
        if isinstance(value, Enum):
            return self._describe(value.value, path)
        if isinstance(value, (int, float, str)):
            return value
        if isinstance(value, _WRITTEN):
            return type(value).__name__ if isinstance(value, torch.device) else str(value)
        if isinstance(value, functools.partial):
            return ["partial", *(self._describe(item, path) for item in (value.func, [*value.args], value.keywords))]
        if isinstance(value, MethodType):
            return ["method", function_name(value.__func__), self._describe(value.__self__, path)]
        if isinstance(value, (FunctionType, *BUILTINS)):
            return function_name(value)
        if isinstance(value, type):
            return class_name(value)
        if isinstance(value, (list, tuple)):
            return [self._describe(item, path) for item in value]
        if isinstance(value, (set, frozenset)):
            return sorted(str(self._describe(item, path)) for item in value)
        if isinstance(value, Mapping):
            return {str(name): self._describe(item, f"{path}.{name}") for name, item in value.items()}
        return self._describe_object(value, path)

    def _describe_object(self, value: Any, path: str) -> Any:
        """An object that was not described before. A tensor is added to `tensors`, a config counts by its digest."""
        self._described[id(value)] = type(value).__qualname__
        if isinstance(value, Tensor):
            if not (self._moving_tables and path.endswith("inv_freq")):
                self.tensors.append((path, self._owner, value))
            self._described[id(value)] = "Tensor"
            return "Tensor"
        if hasattr(value, "to_dict"):
            if name := getattr(value, "_attn_implementation", None):
                self._attention.add(name)
            self._described[id(value)] = digest_of(config_part(value.to_dict()))
            return self._described[id(value)]
        if isinstance(value, ModuleType) or type(value).__name__ in OPAQUE:
            return type(value).__qualname__
        fields, self._depth = getattr(value, "__dict__", {}), self._depth + 1
        names = sorted(fields) if self._depth <= MAX_DEPTH else ()
        described = [class_name(type(value)), {name: self._describe(fields[name], f"{path}.{name}") for name in names}]
        self._depth -= 1
        return described
