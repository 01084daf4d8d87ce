# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The identity of a model as far as its keys and values depend on it.

Two models with one fingerprint compute the same KV from the same tokens, up to the noise of the dtype. The device and
the attention implementation (eager, sdpa, flash) are left out on purpose: they change KV by no more than that noise,
and a store that was filled on one machine should serve another. Names and paths are left out too: a model is its
weights and its config, whatever it is called.

A release of transformers that adds a field to a config changes the fingerprint, and the store starts cold: a field
that nobody has looked at must not be assumed harmless.
"""

import hashlib
import json
import threading
from collections.abc import Iterator
from enum import Enum
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from .anatomy import refuse_extended
from .checksum import checksum
from .errors import UnsupportedModelError
from .placement import offload_hooks

__all__ = ["IGNORED_CONFIG_FIELDS", "describe_fingerprint", "fingerprint"]

FORMAT = "hf_blend.fingerprint/1"

IGNORED_CONFIG_FIELDS = frozenset(
    {
        # where it came from, not what it computes
        "_name_or_path", "_commit_hash", "transformers_version", "architectures", "auto_map",
        # how it is called, not what it computes
        "use_cache", "return_dict", "output_attentions", "output_hidden_states", "_output_attentions",
        "_attn_implementation", "_attn_implementation_internal", "attn_implementation", "_attn_implementation_autoset",
        "_experts_implementation_internal",
        # the parameters say their dtype themselves, and without doubt
        "dtype", "torch_dtype",
        # read by generate and by tokenizers; the sink is part of each chunk's key
        "bos_token_id", "eos_token_id", "pad_token_id",
        # heads and losses that no decoder layer reads
        "id2label", "label2id", "num_labels", "problem_type",
        # how weights are spread over devices; transformers 5.17 keeps it where 5.23 does not
        "base_model_tp_plan",
        # training only
        "initializer_range", "gradient_checkpointing", "_post_init_done",
    }
)  # fmt: skip

_ADAPTER_STATE = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")

_known: WeakKeyDictionary[nn.Module, tuple[object, dict[str, Any]]] = WeakKeyDictionary()
_lock = threading.Lock()


def fingerprint(model: nn.Module) -> str:
    """Say who a model is, in 64 hex digits; equal across processes, devices and machines.

    All weights are read once per live model, then only when a parameter was replaced or changed in place. A change
    through `parameter.data` that keeps its memory goes unseen by torch and so by this: assign, or use `copy_`.

    Args:
        model: a model of transformers, on any device, quantised or with adapters or not.

    Returns:
        The fingerprint.

    Raises:
        UnsupportedModelError: a weight or a config value cannot be read, or the model is inside `self_extend`.
    """
    return describe_fingerprint(model)["fingerprint"]


def describe_fingerprint(model: nn.Module) -> dict[str, Any]:
    """Show what a fingerprint is made of.

    Args:
        model: as in `fingerprint`.

    Returns:
        `fingerprint`, and its parts: `format`, `model_class`, `config`, `adapters`, `dtypes` (bytes of weights by
        dtype) and `weights` (sha256 over name, dtype, shape and checksum of each).
    """
    refuse_extended(model)
    small = {
        "format": FORMAT,
        "model_class": type(model).__name__,
        "config": _config_part(model.config.to_dict()),
        "adapters": _adapter_part(model),
    }
    token = (_canonical(small), [_trace(module, tensor) for _, module, tensor in _tensors(model)])
    with _lock:
        seen, parts = _known.get(model, (None, {}))
        if seen != token:
            parts = {**small, **_weight_part(model)}
            parts["fingerprint"] = hashlib.sha256(_canonical(parts).encode()).hexdigest()
            _known[model] = (token, parts)
        return dict(parts)


def _config_part(value: Any) -> Any:
    """A config as plain values, without the ignored fields, at every depth."""
    if isinstance(value, dict):
        return {str(name): _config_part(item) for name, item in value.items() if name not in IGNORED_CONFIG_FIELDS}
    if isinstance(value, (list, tuple)):
        return [_config_part(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    if isinstance(value, Enum):
        return _config_part(value.value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.dtype):
        return str(value)
    if hasattr(value, "to_dict"):
        return _config_part(value.to_dict())
    raise UnsupportedModelError(
        f"the model's config holds {value!r:.80} ({type(value).__name__}), which cannot be told from another value in "
        "another process. Use numbers, texts, lists and dicts in configs."
    )


def _adapter_part(model: nn.Module) -> list[Any]:
    """Which adapters act, and how strongly; their weights are among the others."""
    found = []
    for path, module in model.named_modules():
        state = {name: vars(module)[name] for name in _ADAPTER_STATE if name in vars(module)}
        if state:
            found.append([path, _config_part(state)])
    return found


def _weight_part(model: nn.Module) -> dict[str, Any]:
    digest, dtypes = hashlib.sha256(), dict[str, int]()
    for path, module in model.named_modules():
        for name, tensor in _quantiser_state(module):
            digest.update(_row(f"{path}.{name}", tensor))
    for path, module, tensor in _tensors(model):
        loaded = _loaded(path, module, tensor)
        dtypes[str(loaded.dtype)] = dtypes.get(str(loaded.dtype), 0) + loaded.nbytes
        digest.update(_row(path, loaded))
    return {"dtypes": dtypes, "weights": digest.hexdigest()}


def _row(path: str, tensor: Tensor) -> bytes:
    rows = [
        [part, str(plain.dtype), list(plain.shape), checksum(plain)] for part, plain in _plain_tensors(path, tensor)
    ]
    return _canonical(rows).encode() + b"\n"


def _tensors(model: nn.Module) -> Iterator[tuple[str, nn.Module, Tensor]]:
    """Parameters and buffers with their paths and modules, each once.

    Never through `state_dict()`: it rewrites the 4-bit weights of a live model.
    """
    moving = _has_moving_rotary_tables(model)
    seen: set[int] = set()
    for path, module in model.named_modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None or id(tensor) in seen or (moving and name.endswith("inv_freq")):
                continue
            seen.add(id(tensor))
            yield f"{path}.{name}", module, tensor


def _has_moving_rotary_tables(model: nn.Module) -> bool:
    """Dynamic and longrope models replace their frequencies as prompts grow; the config says all about them."""
    rope = _canonical(_config_part(getattr(model.config, "rope_parameters", None) or {}))
    return "dynamic" in rope or "longrope" in rope


def _quantiser_state(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Scales and codes of bitsandbytes, which are neither parameters nor buffers."""
    weight = module._parameters.get("weight")
    scales = getattr(weight, "SCB", None)
    found = [("SCB", getattr(getattr(module, "state", None), "SCB", None) if scales is None else scales)]
    state = getattr(weight, "quant_state", None)
    for prefix, level in (("", state), ("state2.", getattr(state, "state2", None))):
        found += [(prefix + name, getattr(level, name, None)) for name in ("absmax", "code", "offset")]
    return [(name, tensor) for name, tensor in found if isinstance(tensor, Tensor)]


def _loaded(path: str, module: nn.Module, tensor: Tensor) -> Tensor:
    """The tensor itself, or what accelerate put elsewhere."""
    if not tensor.is_meta:
        return tensor
    for candidate in offload_hooks(module):
        weights = getattr(candidate, "weights_map", None)
        if weights is not None:
            return weights[path.rpartition(".")[2]]
    raise UnsupportedModelError(
        f"{path} is on the meta device and no offload hook holds its values, so {type(module).__name__} cannot be "
        "told from another. Load the weights first."
    )


def _plain_tensors(path: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A tensor, or the plain tensors that a wrapping class (torchao, quanto) is made of."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None or type(tensor) in (Tensor, nn.Parameter):
        yield path, tensor
        return
    for name in flatten()[0]:
        yield from _plain_tensors(f"{path}.{name}", getattr(tensor, name))


def _trace(module: nn.Module, tensor: Tensor) -> tuple[int, ...]:
    """What changes when a tensor is replaced or written to, at no cost.

    4-bit weights are repacked by their first forward on a CPU; they are the same weights after it. Offloaded weights
    have a new place holder after every forward; they are the same as long as they are fetched from the same place.
    """
    if tensor.is_meta:
        return (*(id(getattr(hook, "weights_map", None)) for hook in offload_hooks(module)), *tensor.shape)
    if hasattr(tensor, "quant_state"):
        return (id(tensor),)
    version = -1 if tensor.is_inference() else tensor._version
    return id(tensor), tensor.data_ptr(), version


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
