# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The decoder layers of a stock model, and the arguments that each of them is called with.

Nothing here knows the name of a model. Arguments are found through the signature of a layer's `forward`, because some
models pass them by position, and some call the cache `layer_past`.
"""

import inspect
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..errors import UnsupportedModelError
from .cache_class import cache_class_for
from .extras import layer_extensions
from .identity.canonical import canonical
from .placement import input_device

EXTENDED: ContextVar[tuple[Any, ...]] = ContextVar("self_extend", default=())  # configs of models that are inside it
TOKEN_STATES = ("", "SlidingWindow", "Dummy")  # cache layers of transformers, less "Dynamic" and "Layer"
PER_TOKEN = ("output_hidden_states", "output_attentions", "output_router_logits")  # a row for every token of a layer
_reshaping: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
_infos: WeakKeyDictionary[nn.Module, "LayerInfo"] = WeakKeyDictionary()
UNREADABLE = (AttributeError, LookupError, TypeError, ValueError)  # a config that transformers' own cache refuses


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Find the decoder layers of a causal language model, in the order in which they run."""
    count = getattr(text_config(model), "num_hidden_layers", None)
    lists = _lists_of(decoder_of(model), count)
    if len(lists) != 1:
        raise UnsupportedModelError(
            f"{type(model).__name__} has {len(lists)} lists of {count} layers in its decoder, but exactly one is "
            "expected: the decoder layers. Blending cannot enter this model; use a decoder-only model for text."
        )
    return list(lists[0])


def decoder_of(model: nn.Module) -> nn.Module:
    """The module that holds the decoder layers: what `get_decoder` gives, or a module inside that (Llama 4)."""
    decoder: nn.Module = model.get_decoder() if hasattr(model, "get_decoder") else model
    count = getattr(text_config(model), "num_hidden_layers", None)
    base = getattr(model, "base_model", model)  # ModernBERT's decoder gives its head, Llama 4 the model itself
    inside = list(model.children()) if decoder is model else []
    return next((module for module in (decoder, base, *inside) if _lists_of(module, count)), decoder)


def wants_all_rows(model: nn.Module) -> bool:
    """Return True if a decoder needs all rows behind its last layer, because it reshapes them, as GPT-J does."""
    if model in _reshaping:
        return _reshaping[model]

    def drop(layer: nn.Module, args: Any, output: Any) -> Any:
        return (output[0][:, 1:], *output[1:]) if isinstance(output, tuple) else output[..., 1:, :]

    handle = decoder_layers(model)[-1].register_forward_hook(drop)
    try:
        device = input_device(model)
        with canonical(model):
            decoder_of(model)(input_ids=torch.zeros((1, 4), dtype=torch.long, device=device), use_cache=False)
        _reshaping[model] = False
    except RuntimeError:
        _reshaping[model] = True
    finally:
        handle.remove()
    return _reshaping[model]


def refuse_other_states(model: nn.Module, only_keys: bool = False) -> None:
    """Refuse a model with a layer whose state cannot be blended or, with `only_keys`, moved as a sequence."""
    complaint = other_states(text_config(model), only_keys)
    if complaint:
        done = "kept as a sequence" if only_keys else "blended"
        raise UnsupportedModelError(f"{type(model).__name__} cannot be {done}: {complaint}")


def other_states(config: Any, only_keys: bool = False) -> str:
    """Why not every layer of a config keeps K and V of each token; empty if all do."""
    added = () if only_keys else ("Indexed", *(kind for extension in layer_extensions() for kind in extension.states))
    supported = (*TOKEN_STATES, *added)
    moved = "and only these can be moved. Use a BlendCache, or plain generate."
    blended = "which cannot stand behind other tokens. Use full prefill."
    for index, layer in enumerate(stock_layers(config)):
        name = type(layer).__name__.removeprefix("Dynamic").removesuffix("Layer")
        if name not in supported:
            kind = f"layer {index} keeps a state of another kind ({name}) than K and V of each token, "
            return kind + (moved if only_keys else blended)
    return ""


def stock_layers(config: Any) -> list[Any]:
    """The cache layers that transformers makes for the config of a text model; none where it refuses the config."""
    from transformers import DynamicCache

    try:
        return list(DynamicCache(config=config).layers)
    except UNREADABLE:
        return []  # the first forward shows what it keeps


def full_cache(model: nn.Module) -> Any:
    """A stock cache in which no layer forgets what lies outside its window."""
    from transformers import Cache, DynamicCache

    layers = stock_layers(text_config(model))
    if not any(hasattr(layer, "recurrent_states") or has_indexer(layer) for layer in layers):
        return DynamicCache()  # without a config no layer has a window
    return cache_class_for(Cache, model)(layers=list(map(_without_window, layers)))


def stock_cache(model: nn.Module) -> Any:
    """The cache that transformers makes for a model's config, in a form that the model takes."""
    from transformers import Cache, DynamicCache

    kind = cache_class_for(Cache, model)
    return DynamicCache(config=model.config) if kind is Cache else kind(layers=stock_layers(text_config(model)))


def _without_window(layer: Any) -> Any:
    from transformers.cache_utils import DynamicLayer, LinearAttentionAndFullAttentionLayer

    if not getattr(layer, "is_sliding", False):
        return layer
    states = getattr(layer, "number_of_states", 0)
    return LinearAttentionAndFullAttentionLayer(states) if states else DynamicLayer()


def is_linear(module: nn.Module) -> bool:
    """Return True for a product with a weight, quantised or not."""
    return hasattr(module, "in_features") and hasattr(module, "out_features")


def has_indexer(layer: Any) -> bool:
    """Whether a cache layer, of transformers or of a blend cache, can hold the keys of an indexer."""
    return hasattr(layer, "update_indexer")


def keeps_nothing(layer: Any) -> bool:
    """Whether a cache layer of transformers is a place holder: of no attention, or of one over K and V of others."""
    return type(layer).__name__ == "DummyLayer"


def _lists_of(module: nn.Module, count: int | None) -> list[nn.ModuleList]:
    return [child for child in module.children() if isinstance(child, nn.ModuleList) and len(child) == count]


def text_config(model: nn.Module) -> Any:
    """The config that describes the text decoder; for a text-only model, the config itself."""
    config = model.config
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def windowed_layer(model: nn.Module) -> int | None:
    """The first layer of a model that attends within a window or a chunk only; None if all see everything."""
    config = text_config(model)
    kinds = getattr(config, "layer_types", None) or ()
    if kinds:
        return next((index for index, kind in enumerate(kinds) if kind != "full_attention"), None)
    uses = getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
    return 0 if uses else None


def is_extended(model: nn.Module) -> bool:
    """Whether a model is inside `self_extend`, where it attends otherwise than it does alone."""
    return any(config is text_config(model) for config in EXTENDED.get())


def refuse_extended(model: nn.Module) -> None:
    """Refuse what stores K and V, or brings stored ones, for a model that is inside `self_extend`."""
    if is_extended(model):
        raise UnsupportedModelError(
            f"{type(model).__name__} is inside self_extend, where layer 1 and those behind it compute other K and V, "
            "but what is stored is expected to be its own. Blend, save and archive outside the block."
        )


def layer_configs(config: Any, count: int) -> list[Any]:
    """One config for each of `count` layers; the same one for all where they do not differ."""
    own = getattr(config, "per_layer_config", None)
    return list(own) if own is not None and len(own) == count else [config] * count


def bos_prefix(model: nn.Module) -> tuple[int, ...]:
    """The tokens before each chunk unless a caller names others: the model's BOS, if it has just one.

    This is so where the tokenizer adds no BOS, too: with nothing before it, the first token of every chunk would draw
    the attention that the first token of a prompt draws. A chunk that begins a prompt has nothing before it.
    """
    bos = getattr(text_config(model), "bos_token_id", None)
    return (bos,) if isinstance(bos, int) else ()


@dataclass(frozen=True)
class LayerInfo:
    """What is known of a decoder layer, found once."""

    has_attention: bool  # by what transformers' attention modules have in common
    attention: tuple[nn.Module, ...]  # those that look up their function by name, and hand it their keywords

    @classmethod
    def of(cls, layer: nn.Module) -> "LayerInfo":
        """What is known of a layer, as long as it lives."""
        if layer not in _infos:
            attends = any(hasattr(module, "num_key_value_groups") for module in layer.modules())
            inside = (module for module in layer.modules() if module is not layer and hasattr(module, "layer_idx"))
            _infos[layer] = cls(attends, tuple(filter(_looks_up, inside)))
        return _infos[layer]


def _looks_up(module: nn.Module) -> bool:
    from transformers import AttentionInterface

    forward = inspect.unwrap(type(module).forward)
    names = (forward.__globals__.get(name) for name in forward.__code__.co_names)
    if not any(isinstance(value, AttentionInterface) for value in names):
        return False  # GPT-J and others compute it in their own code
    parameters = inspect.signature(forward).parameters.values()
    takes_keywords = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
    return takes_keywords and hasattr(getattr(module, "config", None), "_attn_implementation")


@dataclass
class LayerCall:
    """The arguments of one call of a decoder layer, by the names of its `forward`.

    Attributes:
        layer: the layer.
        hidden: its hidden states, `[batch, rows, width]`; may be changed.
        arguments: all others; may be changed.
        mask_name: the name of the mask of its attention.
        given: all arguments as the model passed them.
    """

    layer: nn.Module
    hidden: Tensor
    arguments: dict[str, Any]
    mask_name: str
    given: dict[str, Any]

    @classmethod
    def bind(cls, layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> "LayerCall":
        """Give each positional argument its name."""
        names = parameter_names(type(layer))  # type: ignore[arg-type]
        named = {**dict(zip(names, args, strict=False)), **kwargs}
        # where a mixer beside the attention has a mask of its own, that of the attention is the causal one
        mask_name = "causal_mask" if "causal_mask" in named else "attention_mask"
        others = {name: value for name, value in named.items() if name != names[0]}
        return cls(layer, named[names[0]], others, mask_name, named)

    @property
    def cache(self) -> Any:
        """The cache that the layer was given."""
        from transformers import Cache

        return next((value for value in self.arguments.values() if isinstance(value, Cache)), None)


@lru_cache(maxsize=256)
def parameter_names(module_class: type[nn.Module]) -> tuple[str, ...]:
    """Names of the positional parameters of the `forward` of a class of modules, in order."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = list(inspect.signature(module_class.forward).parameters.values())[1:]
    return tuple(parameter.name for parameter in parameters if parameter.kind in kinds)


def gather_rows(value: Tensor, index: Tensor, axis: int = 1) -> Tensor:
    """Take rows along an axis, each batch entry its own; the batch is the axis before it.

    Shapes: value `[batch or 1, rows, …]`, index `[batch, kept]` → `[batch, kept, …]`.
    """
    index = index.to(value.device)
    if index.shape[0] == 1:
        return value.index_select(axis, index[0])
    value = value.expand(*value.shape[: axis - 1], index.shape[0], *value.shape[axis:])
    shape = (*(1 for _ in value.shape[: axis - 1]), *index.shape, *(1 for _ in value.shape[axis + 1 :]))
    return torch.take_along_dim(value, index.view(shape), dim=axis)
