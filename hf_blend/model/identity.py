# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The identity of a model, as far as its keys and values depend on it.

Two models with one fingerprint compute the same KV from the same tokens, up to the noise of the dtype. A fingerprint
is a digest of the config, the classes of all modules, PEFT's choice of adapters, and all weights. Names, paths, the
device and the attention implementation (eager, sdpa, flash) are left out: they change KV by no more than that noise,
and a store that one machine filled serves another.

All weights are read when a model is first seen. Each later call compares config, classes, adapters, and of every
tensor the address, the dtype, the version and a sample of its values: a fused optimizer or a write through `.data`
changes no version. What differs is read again. docs/security.md says what is not seen; the canary of each stored chunk
finds most of that between processes. A forward hook may change what a model computes, and hooks cannot be compared: so
forward hooks of others are refused.

A release of transformers that adds a field to a config changes the fingerprint, and the store is cold: a field that
was not reviewed is not assumed to be harmless.

Between two turns a model may change: an adapter is switched, weights are written in place, the dtype or the attention
changes. So a cache records the *author* of its K and V, the model as it was when it computed them, and compares it
where a turn begins.
"""

import copy
import functools
import hashlib
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_hooks

from ..errors import ConfigError, UnsupportedModelError
from .anatomy import (
    DEVICE_TYPES,
    EXTENDED,
    decoder_layers,
    forget,
    offload_hooks,
    refuse_extended,
    text_config,
)

Hook = TypeVar("Hook", bound=Callable[..., Any])
NamedTensor: TypeAlias = tuple[nn.Module, str, Tensor]  # the module that has it, and its name there
FORMAT = "hf_blend.fingerprint/5"
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
ADAPTER_ATTRIBUTES = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")  # of PEFT's layers
COMPILED_FORWARD = "_torchdynamo_orig_callable"  # an attribute of what torch.compile made of a function
PLAIN = (Tensor, nn.Parameter)
QUANTISED = {"quant_state", "SCB"}
QUANTISED_BY_ITS_STATE = ("absmax", "code", "offset")
SAMPLED = 128  # values of each tensor, about
MOVING_TABLES = ("dynamic", "longrope")  # types of rotary embeddings that replace their frequencies as prompts grow
ROW_LANES = 1 << 17  # 1 MiB at a time, so that the work stays in the caches of a CPU
_MIX = 0x9E3779B97F4A7C15 - (1 << 64)
KNOWN = ("hf_blend", "transformers", "accelerate", "torch")  # their hooks watch, or put weights in place
HARMLESS = ("make_inputs_require_grad", "make_inputs_require_grads")  # of PEFT, for training
_MARK = "_hf_blend_observer"
_WRAPPERS = ("torch.nn.parallel", "torch.distributed")
_lock = threading.RLock()


def refuse_wrapper(model: nn.Module) -> None:
    """Refuse what is around a causal language model, or inside one, with what to pass instead."""
    name = type(model).__name__
    if type(model).__module__.startswith(_WRAPPERS) or (hasattr(model, "module") and not hasattr(model, "config")):
        raise UnsupportedModelError(
            f"{name} is a wrapper that spreads a model over processes or devices. Pass the model inside it "
            "(model.module), with one cache per replica."
        )
    if not hasattr(model, "config"):
        raise UnsupportedModelError(
            f"{name} has no config, so it is no model of transformers. Pass what AutoModelForCausalLM loads."
        )
    can_generate = getattr(model, "can_generate", None)
    if can_generate is not None and not can_generate():
        raise UnsupportedModelError(
            f"{name} has no language modelling head, so it cannot generate. Pass the whole causal language model, as "
            "AutoModelForCausalLM loads it, and not its base model."
        )


def observer(hook: Hook) -> Hook:
    """Mark a forward hook that changes nothing, such as one that logs, so that a model with it can be blended.

        layer.register_forward_hook(hf_blend.observer(log_norms))

    Args:
        hook: a function or method that returns None and does not write to what it is given.

    Returns:
        The same function.
    """
    getattr(hook, "__func__", hook).__dict__[_MARK] = True
    return hook


def _refuse_unseen_code(model: nn.Module, modules: Iterable[nn.Module]) -> None:
    """Refuse compiled code, which hooks cannot enter, and forward hooks that are neither ours nor the libraries'."""
    hooks: list[tuple[Any, str]] = []
    for module in modules:
        attributes = vars(module)
        is_compiled = "_orig_mod" in module._modules or attributes.get("_compiled_call_impl") is not None
        if is_compiled or hasattr(attributes.get("forward"), COMPILED_FORWARD):
            place = "the model" if module is model else "a layer"
            raise UnsupportedModelError(
                f"{place} ({type(module).__name__}) is compiled, and hooks cannot enter compiled code. Give hf_blend "
                "the model as it is before torch.compile or model.compile()."
            )
        if module._forward_hooks or module._forward_pre_hooks:
            for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
                hooks.append((hook, f"a {type(module).__name__}"))
    for everywhere in (torch_hooks._global_forward_pre_hooks, torch_hooks._global_forward_hooks):
        hooks += [(hook, "every module") for hook in everywhere.values()]
    for hook, place in hooks:
        inner = hook.func if isinstance(hook, functools.partial) else hook
        home = getattr(inner, "__module__", None) or type(inner).__module__
        name = getattr(inner, "__qualname__", type(inner).__qualname__)
        package = str(home).partition(".")[0]
        if package in KNOWN or name.rpartition(".")[2] in HARMLESS or getattr(hook, _MARK, False) is True:
            continue
        if package == "peft":
            raise UnsupportedModelError(
                f"{place} has the forward hook {name} of PEFT: an adapter was chosen for this request alone "
                "(adapter_names=…), which no stored chunk can be told by. Choose it for the model with set_adapter."
            )
        raise UnsupportedModelError(
            f"{place} has the forward hook {home}.{name}, which may change keys and values unseen. Remove it for "
            "blending (handle.remove()), or mark it with hf_blend.observer if it only looks."
        )


def refuse_autocast(model: nn.Module, layers: Sequence[nn.Module]) -> None:
    """Refuse a forward that runs in another precision than the stored chunks."""
    own = {weight.device.type for layer in (layers[0], layers[-1]) for weight in layer.parameters()}
    for kind in filter(torch.is_autocast_enabled, own.intersection(DEVICE_TYPES)):
        dtype = str(torch.get_autocast_dtype(kind)).removeprefix("torch.")
        raise ConfigError(
            f"torch.autocast is on ({dtype} on {kind}), but stored chunks are computed in the model's own dtype "
            f"({model.dtype}). Leave the autocast block, or load the model with dtype=torch.{dtype}."
        )


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
    if isinstance(value, (bool, int, float, str, type(None))):
        return value
    if isinstance(value, torch.dtype):
        return str(value)
    if hasattr(value, "to_dict"):
        return config_part(value.to_dict())
    raise UnsupportedModelError(
        f"the model's config holds {value!r:.80} ({type(value).__name__}), which cannot be told from another value in "
        "another process. Use numbers, texts, lists and dicts in configs."
    )


def modules_of(model: nn.Module) -> list[nn.Module]:
    """All modules, each once, in the order of `model.modules()`, in a third of its time."""
    modules: dict[nn.Module, None] = {}
    waiting: list[nn.Module | None] = [model]
    while waiting:
        module = waiting.pop()
        if module is None or module in modules:
            continue
        modules[module] = None
        waiting.extend(reversed(module._modules.values()))
    return list(modules)


def tensors_of(modules: Sequence[nn.Module]) -> list[NamedTensor]:
    """Parameters and buffers of a model's modules, each once, but for frequencies that change as prompts grow.

    Never through `state_dict()`: it rewrites the 4-bit weights of a live model.
    """
    tensors: dict[Tensor, NamedTensor] = {}
    for module in modules:
        named = [*module._parameters.items(), *module._buffers.items()]
        if not named:
            continue
        rope_type = str(vars(module).get("rope_type", ""))
        is_moving = any(kind in rope_type for kind in MOVING_TABLES)
        for name, tensor in named:
            if tensor is None or (is_moving and name.endswith("inv_freq")):
                continue
            tensors.setdefault(tensor, (module, name, tensor))
    return list(tensors.values())


def weight_digest(model: nn.Module, tensors: Sequence[NamedTensor]) -> str:
    """Read all tensors of `tensors_of` once: a digest of their dtypes, shapes and bytes, in 64 hex digits."""
    digest = hashlib.sha256()
    paths = {module: path for path, module in model.named_modules()}
    for module, name, tensor in tensors:
        path = f"{paths[module]}.{name}"
        loaded = loaded_values(path, module, tensor)
        state = getattr(loaded, "quant_state", None)
        is_four_bits = hasattr(state, "blocksize") and getattr(state, "absmax", None) is not None
        for part, plain in _four_bits(loaded, state) if is_four_bits else stored_parts(module, loaded):
            row = [path + part, str(plain.dtype), list(plain.shape), checksum(plain)]
            digest.update(json.dumps(row, separators=(",", ":")).encode() + b"\n")
    return digest.hexdigest()


def stored_parts(module: nn.Module, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """The plain tensors whose bytes a weight is made of, as they lie in memory, with the ends of their names."""
    if type(tensor) in PLAIN and not QUANTISED & vars(tensor).keys():
        return [("", tensor)]
    parts = [*_plain_tensors("", tensor)]
    if tensor is module._parameters.get("weight"):  # of bitsandbytes: neither parameters nor buffers
        scales, state = getattr(tensor, "SCB", None), getattr(tensor, "quant_state", None)
        beside = [(".SCB", getattr(getattr(module, "state", None), "SCB", None) if scales is None else scales)]
        for prefix, level in ((".", state), (".state2.", getattr(state, "state2", None))):
            beside += [(prefix + name, getattr(level, name, None)) for name in QUANTISED_BY_ITS_STATE]
        parts += [(name, scale) for name, scale in beside if isinstance(scale, Tensor)]
    return parts


def loaded_values(path: str, module: nn.Module, tensor: Tensor) -> Tensor:
    """A weight itself, or what accelerate put elsewhere."""
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


def _four_bits(tensor: Tensor, state: Any) -> Iterator[tuple[str, Tensor]]:
    """4-bit codes in their first order, and the scale of each block in bfloat16: the same before and after a forward.

    On a CPU with AVX512-BF16 the first forward of bitsandbytes interleaves the codes, and rounds and transposes the
    scales; what it keeps of them is bfloat16.
    """
    from bitsandbytes import functional

    codes, scales = tensor.data, state.absmax
    if getattr(state, "packing_format_for_cpu", False):
        plain = copy.copy(state)
        plain.original_nested = False  # quantising the scales again would round them once more
        codes, _ = functional._convert_weight_packed_for_cpu_inverse(codes, plain)
        scales = scales.T.reshape(-1)
    elif state.nested:
        scales = functional.dequantize_blockwise(scales, state.state2) + state.offset
    yield ".codes", codes.contiguous().view(torch.uint8).reshape(-1)
    yield ".scales", scales.float().to(torch.bfloat16).reshape(-1)
    yield ".values", state.code


def _plain_tensors(path: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A tensor, or the plain tensors that a wrapping class (torchao, quanto) is made of."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None or type(tensor) in PLAIN:
        yield path, tensor
        return
    for name in flatten()[0]:
        yield from _plain_tensors(f"{path}.{name}", getattr(tensor, name))


@torch.no_grad()
def checksum(tensor: Tensor) -> str:
    """Sum up the bits of a tensor on its own device, so that any changed, moved or swapped value changes the sum.

    The bytes are taken as 64-bit lanes; each is mixed, multiplied by an odd number that belongs to its position, and
    added. All steps are integers that wrap around, so the order of adding does not matter, and a single changed lane
    always shows.
    """
    rows = tensor.detach().contiguous().view(-1).view(torch.uint8).split(ROW_LANES * 8)
    total = _summed(torch.stack([_summed(_lanes(row)) for row in rows]))
    return f"{total.item() % (1 << 64):016x}"


def _lanes(data: Tensor) -> Tensor:
    """Bytes as int64, filled up with zeros; a tensor's length is written beside its sum."""
    if data.numel() % 8:
        data = nn.functional.pad(data, (0, -data.numel() % 8))
    if data.storage_offset() % 8 or data.data_ptr() % 8:
        data = data.clone()
    return data.view(torch.int64)


def _summed(lanes: Tensor) -> Tensor:
    mixed = lanes * _MIX
    mixed ^= mixed >> 32
    mixed *= _multipliers(lanes.device)[: len(lanes)]
    return mixed.sum()


@functools.lru_cache(maxsize=16)
def _multipliers(device: torch.device) -> Tensor:
    """Odd numbers without pattern, one for each lane of a row, and for each row."""
    numbers = torch.arange(1, ROW_LANES + 1, device=device) * _MIX
    for shift in (31, 27):
        numbers ^= numbers >> shift
        numbers *= _MIX
    return numbers | 1


def located(tensors: Sequence[NamedTensor]) -> tuple[list[tuple[Any, ...]], list[Tensor]]:
    """Where the tensors of `tensors_of` are, and in which version; and the plain tensors that lie there.

    Weights that accelerate keeps elsewhere count by the map that they are fetched from.
    """
    locations: list[tuple[Any, ...]] = []
    stored: list[Tensor] = []
    for module, name, tensor in tensors:
        if tensor.is_meta:  # accelerate makes a new one after every forward
            maps = [id(getattr(hook, "weights_map", None)) for hook in offload_hooks(module)]
            locations.append((name, *maps))
            continue
        parts = [("", tensor)]
        if type(tensor) not in PLAIN or not QUANTISED.isdisjoint(vars(tensor)):
            parts = stored_parts(module, tensor)
        for part, plain in parts:
            version = -1 if plain.is_inference() else plain._version  # these count no versions
            locations.append((name, part, plain.data_ptr(), plain.dtype, version))
            stored.append(plain)
    return locations, stored


@torch.inference_mode()
def sampled(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The bytes of evenly spread values of each tensor, one piece for each device and dtype."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        count = tensor.numel()
        step = max(1, count // SAMPLED)
        if tensor.is_contiguous():  # one call for what the others need three
            values = tensor.as_strided((-(-count // step),), (step,))
        else:
            values = tensor.detach().reshape(-1)[::step]
        by_kind.setdefault((tensor.device, tensor.dtype), []).append(values)
    return [torch.cat(values).view(torch.uint8) for values in by_kind.values()]


@dataclass
class _Record:
    """The identity of a live model, and what a change of the model is noticed by."""

    form: tuple[Any, ...] = ()  # what is compared in each call besides the tensors
    structure: str = ""  # digest of config, classes, dtypes and adapters
    weights: str = ""  # digest of all weights; empty: never read
    fingerprint: str = ""  # of structure and weights; empty: the weights were never read
    # Of the tensors when they were read
    locations: list[tuple[Any, ...]] = field(default_factory=list)
    samples: list[Tensor] = field(default_factory=list)
    state: int = 0  # how many changes were noticed
    # What shows at a glance; None: it has to be looked at as a whole
    outline: tuple[Any, ...] | None = None
    tuners: list[nn.Module] = field(default_factory=list)  # PEFT's modules
    adapters: list[Any] = field(default_factory=list)  # of these


_records: WeakKeyDictionary[nn.Module, _Record] = WeakKeyDictionary()


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


def identity_of(model: nn.Module, reread: bool = False, asks_device: bool = True) -> str:
    """The fingerprint of what a model computes alone, also inside `self_extend`.

    If it does not ask the device, the model counts as that of the last call if it is the same at a glance, so that a
    forward can begin: whoever uses it compares it with that of a call that asks, before anything leaves.
    """
    with _lock:
        if not asks_device and not reread:
            record = _glance(model)
            if record.fingerprint:
                return record.fingerprint
        modules = modules_of(model)
        record = _compare_structure(model, modules, reread)
        tensors = tensors_of(modules)
        locations, stored = located(tensors)
        samples = sampled(stored)  # before all is read: a change meanwhile shows
        is_known = bool(record.weights) and not reread and locations == record.locations
        if is_known and samples:
            # Equal by their bits, so that NaN is itself; the device is asked once
            flags = [(one != other).any() for one, other in zip(samples, record.samples, strict=True)]
            is_known = not torch.stack([flag.to(flags[0].device) for flag in flags]).any().item()
        if not is_known:
            record.weights = weight_digest(model, tensors)
            record.locations = locations
            record.samples = samples
            record.state += 1
            record.fingerprint = _digest_of([record.structure, record.weights])
        return record.fingerprint


def structure_of(model: nn.Module) -> str:
    """A digest of all that makes a fingerprint except the weights; of the last look, if it is the same at a glance."""
    with _lock:
        return _glance(model).structure


def state_of(model: nn.Module) -> int:
    """How often something in a model whose fingerprint was asked for was read again, because it differed."""
    return _records[model].state


def _glance(model: nn.Module) -> _Record:
    """A model's record, updated if its decoder layers, its dtype or the adapters that act are not the last ones."""
    record = _records.get(model) or _compare_structure(model, modules_of(model))
    layers = decoder_layers(model)
    compiled = [(vars(layer).get("forward"), layer._compiled_call_impl) for layer in (model, *layers)]
    outline = layers, compiled, model.dtype
    if record.outline == outline and record.adapters == _adapters_of(record.tuners):
        return record
    modules = modules_of(model)
    record = _compare_structure(model, modules)
    record.tuners = [module for module in modules if "_active_adapter" in vars(module)]
    record.adapters = _adapters_of(record.tuners)
    record.outline = outline
    return record


def _compare_structure(model: nn.Module, modules: list[nn.Module], reread: bool = False) -> _Record:
    """A model's record, updated to the config, classes and adapters that the model has now."""
    record = _records.get(model)
    if record is None:
        refuse_wrapper(model)
        record = _Record()
    _refuse_unseen_code(model, modules)
    kinds = list(map(type, modules))
    dtypes = [weight.dtype for module in modules for weight in module._parameters.values() if weight is not None]
    adapters = _adapters_of(modules)
    form = (dict(vars(text_config(model))), kinds, dtypes, adapters)
    _records[model] = record
    if reread or form != record.form:
        record.form = form
        structure = _digest_of(
            {
                "format": FORMAT,
                "config": config_part(model.config.to_dict()),
                "classes": [f"{kind.__module__}.{kind.__qualname__}" for kind in kinds],
                "dtypes": sorted(set(map(str, dtypes))),
                "adapters": adapters,
            }
        )
        if reread or structure != record.structure:  # a setting that does not count leaves it the same
            record.structure = structure
            if record.weights:
                record.fingerprint = _digest_of([structure, record.weights])
            record.outline = None
            forget(model)
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


def _digest_of(value: object) -> str:
    """The SHA-256 of a value of JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


class Author(NamedTuple):
    """A model at one moment: all that its K and V depend on in this process."""

    fingerprint: str  # weights, adapter, dtype, structure and code; see `fingerprint`
    attention: str  # name of the attention implementation, which a fingerprint leaves out
    dtype: str
    autocast: str  # the dtype of `torch.autocast` where it was on; else empty
    is_training: bool  # it may drop out

    @property
    def form(self) -> tuple[str, str]:
        """Two authors with one form compute K and V of the same dtypes."""
        return self.dtype, self.autocast

    def stored_name(self) -> str:
        """The fingerprint, under which its K and V may be saved.

        Raises:
            ConfigError: they were computed under autocast or in training mode, which no fingerprint names.
        """
        if self.autocast or self.is_training:
            raise ConfigError(
                "the K and V of this cache were computed under torch.autocast or in training mode "
                f"({self.autocast or 'training'}), but what is saved is expected to be what the model computes by "
                "itself. Prefill outside the autocast block, behind model.eval()."
            )
        return self.fingerprint

    def difference(self, other: "Author") -> str:
        """In words, how this author differs from another one."""
        names = ("dtype", "attention", "autocast", "is_training")
        pairs = [(name, getattr(self, name), getattr(other, name)) for name in names]
        words = [f"the {name} {mine!r} instead of {others!r}" for name, mine, others in pairs if mine != others]
        return ", ".join(words) or "another adapter, other weights or other code"


def author_of(model: nn.Module, asks_device: bool = True) -> Author:
    """The author of what a model computes now; costs as much as `identity_of`, which says what `asks_device` means.

    Raises:
        UnsupportedModelError: a forward hook of others was put into the model.
    """
    device, dtype = model.device.type, str(model.dtype).removeprefix("torch.")
    is_cast = device in DEVICE_TYPES and torch.is_autocast_enabled(device)
    autocast = str(torch.get_autocast_dtype(device)).removeprefix("torch.") if is_cast else ""
    attention = getattr(text_config(model), "_attn_implementation", None) or ""
    return Author(identity_of(model, asks_device=asks_device), attention, dtype, autocast, model.training)


def refuse_other_author(author: Author | None, now: Author, tokens: int, do: str) -> None:
    """Refuse to continue `tokens` whose author is not the model as it is now; `author` is None where it is unknown."""
    if author not in (None, now):
        raise ConfigError(
            f"{tokens} tokens whose K and V are held were computed by another model than the one that is expected to "
            f"continue them: now it has {now.difference(author)}. {do}"
        )
