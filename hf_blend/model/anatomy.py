# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The parts of a stock model: its decoder layers, the arguments they are called with, its cache, device and costs.

Nothing here knows the name of a model. Arguments are found through the signature of a layer's `forward`, because some
models pass them by position, and some call the cache `layer_past`. What a token costs in a layer is counted by
watching the model run.

The K and V of a placeholder token are those of an image, a video or a sound, and those behind equal ids may differ.
So nothing that holds a placeholder is stored or looked up, and a prompt that comes with an image is computed in full.
Both questions are answered strictly: an argument of the model's forward that is not known to belong to text counts as
another input, and an id under a name of the config that is not known to be a text token counts as a placeholder.
"""

import inspect
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import astuple, dataclass
from functools import cache, lru_cache, partial, wraps
from typing import Any, NamedTuple, Protocol, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import GenerationMixin

from .. import plugins
from ..errors import PromptError, UnsupportedModelError

DEVICE_TYPES = ("cpu", "cuda", "xpu", "mps")
EXTENDED: ContextVar[tuple[Any, ...]] = ContextVar("self_extend", default=())  # configs of models that are inside it
TOKEN_STATES = ("", "SlidingWindow", "Dummy")  # cache layers of transformers, less "Dynamic" and "Layer"
PER_TOKEN = ("output_hidden_states", "output_attentions", "output_router_logits")  # a row for every token of a layer
Found = TypeVar("Found")
_found: WeakKeyDictionary[nn.Module, dict[Any, Any]] = WeakKeyDictionary()  # results of `per_model`
FACTS: dict[str, "Fact"] = {}  # the results that are kept beside a store, by the name of their function
_infos: WeakKeyDictionary[nn.Module, "LayerInfo"] = WeakKeyDictionary()
UNREADABLE = (AttributeError, LookupError, TypeError, ValueError)  # a config that transformers' own cache refuses
KEYWORDS = ("cache", "past_key_values")
KEYWORD = next(
    name for name in KEYWORDS if name in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
)
TAKES, GIVES = "set_linear_cache", "get_linear_cache"  # by which these models hand over their states
TEXT_ARGUMENTS = frozenset({
    *KEYWORDS, "input_ids", "attention_mask", "position_ids", "cache_position", "layer_past", "inputs_embeds",
    "labels", "shift_labels", "num_items_in_batch", "logits_to_keep", "num_logits_to_keep",
})  # fmt: skip
TEXT_WHERE_ZERO = frozenset({"mm_token_type_ids", "moe_mm_token_type_ids"})  # 0: text
TEXT_TOKENS = frozenset({
    "bos", "eos", "pad", "unk", "sep", "cls", "mask", "eod", "decoder_start", "forced_bos", "forced_eos",
    "user", "system", "assistant", "im_start", "im_end",
})  # fmt: skip
MODAL_WORDS = frozenset({
    "image", "img", "im", "video", "vision", "visual", "audio", "speech", "frame", "slice", "patch", "media",
    "newline",
})  # fmt: skip
_ID_FIELD = re.compile(r"_?(?P<stem>.+?)(?P<token>_token)?_(?:ids?|index)")
Spans = Sequence[tuple[slice, slice]]  # columns of an output, and where they are among those stored of a layer
CONVOLUTION_AXES = 3  # of the weight of a 1-D convolution


class Fact(NamedTuple):
    """A function of a model whose result is kept beside a store, and what turns the result into JSON and back."""

    find: Callable[[nn.Module], Any]
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


def per_model(
    find: Callable[[nn.Module], Found],
    encode: Callable[[Found], Any] | None = None,
    decode: Callable[[Any], Found] | None = None,
) -> Callable[[nn.Module], Found]:
    """Keep the result of a function of a model until a look at the model finds another structure.

    With `encode` and `decode`, which turn a result into JSON and back, it is kept beside a store, too (`facts`).
    """
    if encode is not None and decode is not None:
        FACTS[find.__name__] = Fact(find, encode, decode)

    @wraps(find)
    def find_once(model: nn.Module) -> Found:
        found = _found.setdefault(model, {})
        if find not in found:
            found[find] = find(model)
        result: Found = found[find]
        return result

    return find_once


def found_facts(model: nn.Module) -> dict[str, Any]:
    """What was found of the facts of a model, by name."""
    found = _found.get(model, {})
    return {name: found[fact.find] for name, fact in FACTS.items() if fact.find in found}


def set_facts(model: nn.Module, facts: Mapping[str, Any]) -> None:
    """Take over what was found of a model earlier."""
    for name, value in facts.items():
        _found.setdefault(model, {})[FACTS[name].find] = value


def forget(model: nn.Module) -> None:
    """Drop what `per_model` functions found: the model has another structure now."""
    _found.pop(model, None)


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Find the decoder layers of a causal language model, in the order in which they run."""
    _, lists = _find_decoder(model)
    if len(lists) != 1:
        count = getattr(text_config(model), "num_hidden_layers", None)
        raise UnsupportedModelError(
            f"{type(model).__name__} has {len(lists)} lists of {count} layers in its decoder, but exactly one is "
            "expected: the decoder layers. Blending cannot enter this model; use a decoder-only model for text."
        )
    return list(lists[0])


def decoder_of(model: nn.Module) -> nn.Module:
    """The module that holds the decoder layers: what `get_decoder` gives, or a module inside that (Llama 4)."""
    decoder, _ = _find_decoder(model)
    return decoder


def _find_decoder(model: nn.Module) -> tuple[nn.Module, list[nn.ModuleList]]:
    """A model's decoder, and the lists in it that have as many modules as the config has layers."""
    decoder: nn.Module = model.get_decoder() if hasattr(model, "get_decoder") else model
    count = getattr(text_config(model), "num_hidden_layers", None)
    base = getattr(model, "base_model", model)  # ModernBERT's decoder gives its head, Llama 4 the model itself
    inside = list(model.children()) if decoder is model else []
    for module in (decoder, base, *inside):
        lists = [child for child in module.children() if isinstance(child, nn.ModuleList) and len(child) == count]
        if lists:
            return module, lists
    return decoder, []


@partial(per_model, encode=bool, decode=bool)
def wants_all_rows(model: nn.Module) -> bool:
    """Return True if a decoder needs all rows behind its last layer, because it reshapes them, as GPT-J does."""

    def drop(layer: nn.Module, args: Any, output: Any) -> Any:
        return (output[0][:, 1:], *output[1:]) if isinstance(output, tuple) else output[..., 1:, :]

    handle = decoder_layers(model)[-1].register_forward_hook(drop)
    try:
        device = input_device(model)
        with canonical(model):
            decoder_of(model)(input_ids=torch.zeros((1, 4), dtype=torch.long, device=device), use_cache=False)
    except RuntimeError:
        return True
    finally:
        handle.remove()
    return False


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


@lru_cache(maxsize=256)
def _keyword(forward: Any) -> str:
    parameters = inspect.signature(forward).parameters
    return next((name for name in KEYWORDS if name in parameters), KEYWORD)


def cache_argument(model: nn.Module, cache: Any) -> dict[str, Any]:
    """A cache as the keyword argument of a model's forward or of its `generate`.

    Models with code of their own may know the older name only. A wrapper, whose forward names neither, hands on what
    it is given: it gets the name that transformers uses.
    """
    return {_keyword(type(model).forward): cache}


def cache_among(arguments: Mapping[str, Any]) -> Any:
    """The cache among the keyword arguments of a call, under either name; None where there is none."""
    return next((arguments[name] for name in KEYWORDS if arguments.get(name) is not None), None)


def without_cache(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments of a call but for its cache."""
    return {name: value for name, value in arguments.items() if name not in KEYWORDS}


def cache_class_for(kind: type, model: object) -> type:
    """A class of caches in the form that a model takes."""
    own = _own_cache(type(model))  # type: ignore[arg-type]
    return kind if own is None else _derived(kind, own)


@cache
def _own_cache(model_class: type) -> type | None:
    """The class in the file of a model that keeps the states of its linear layers; None where it has none."""
    from transformers import Cache

    files = (sys.modules.get(base.__module__) for base in model_class.__mro__)
    named = (value for file in files if file is not None for value in list(vars(file).values()))
    caches = (value for value in named if isinstance(value, type) and issubclass(value, Cache))
    return next((value for value in caches if hasattr(value, TAKES) and hasattr(value, GIVES)), None)


@cache
def _derived(kind: type, own: type) -> type:
    from transformers import Cache

    if issubclass(kind, own):
        return kind
    stock = {name: getattr(Cache, name) for name in vars(own) if hasattr(Cache, name)}
    stock = {name: member for name, member in stock.items() if callable(member) or not name.startswith("__")}
    bridge = type(own.__name__, (own,), {**stock, TAKES: _take, GIVES: _give})
    return bridge if kind is Cache else type(kind.__name__, (kind, bridge), {"__doc__": kind.__doc__})


def _take(cache: Any, layer_idx: int, linear_cache: Tensor) -> None:
    """Keep the state of a layer, `[batch, heads, head_dim, head_dim]`."""
    cache.update_recurrent_state(linear_cache, layer_idx)


def _give(cache: Any, layer_idx: int) -> Tensor | None:
    """The state of a layer behind the last token; None where there was none."""
    layer = cache.layers[layer_idx]
    state: Tensor | None = layer.recurrent_states[0] if layer.is_recurrent_states_initialized[0] else None
    return state


def offload_hooks(module: nn.Module) -> tuple[Any, ...]:
    """The hooks that accelerate put around a module's forward; empty without any."""
    hook = getattr(module, "_hf_hook", None)
    return () if hook is None else (hook, *getattr(hook, "hooks", ()))


def input_device(model: nn.Module) -> torch.device:
    """Where a model takes its ids: where its embeddings are, or are brought for a call."""
    table = model.get_input_embeddings()
    if not table.weight.is_meta:
        return table.weight.device
    for hook in offload_hooks(table):
        if getattr(hook, "execution_device", None) is not None:
            return torch.device(hook.execution_device)
    raise UnsupportedModelError(
        f"the input embeddings of {type(model).__name__} are on the meta device and no offload hook holds their "
        "values, so it cannot be run. Load the weights first."
    )


def other_inputs(model: nn.Module, arguments: Mapping[str, Any]) -> tuple[str, ...]:
    """The arguments of a forward that may change what its tokens stand for, or who sees whom.

    An input of the model is what its forward names, and whatever holds a tensor (a wrapper names nothing). Anything
    else is a keyword of `generate`, such as a tokenizer.
    """
    named = parameter_names(type(model))  # type: ignore[arg-type]
    others = []
    for name, value in arguments.items():
        if name in TEXT_ARGUMENTS or isinstance(value, bool | int | float | str):
            continue
        if name in TEXT_WHERE_ZERO and isinstance(value, Tensor) and not value.any():
            continue
        if holds_tensor(value) or (name in named and not _is_empty(value)):
            others.append(name)
    return tuple(sorted(others))


def holds_tensor(value: Any) -> bool:
    """Return True for a tensor, and for a list or a mapping that has one inside."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return any(holds_tensor(item) for item in value)
    return isinstance(value, Tensor)


def _is_empty(value: Any) -> bool:
    """None, and what holds nothing else: `generate` passes such a dict where there was no image to encode."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return all(_is_empty(item) for item in value)
    return value is None


def placeholder_ids(config: Any) -> frozenset[int]:
    """The tokens that stand for something else than text, or mark where it begins and ends."""
    token_ids, configs = set[int](), [config]
    for inner in configs:  # which grows
        for name, value in vars(inner).items():
            field = _ID_FIELD.fullmatch(name)
            if hasattr(value, "to_dict"):
                configs.append(value)
            elif field is not None:
                stem, token = field["stem"], field["token"]
                if stem not in TEXT_TOKENS if token else not MODAL_WORDS.isdisjoint(stem.split("_")):
                    ids = value if isinstance(value, list | tuple) else (value,)
                    token_ids.update(token_id for token_id in ids if type(token_id) is int and token_id >= 0)
    return frozenset(token_ids)


def is_quantised(model: nn.Module) -> bool:
    """Whether a model was loaded in few bits: products are coarser than its dtype, and rows may feel each other."""
    return getattr(model.config, "quantization_config", None) is not None


def text_ids(model: nn.Module, tokens: int, seed: int = 0) -> Tensor:
    """Random tokens of text, the same for each number of them and seed; `[tokens]`."""
    others, text = torch.tensor(sorted(placeholder_ids(model.config))), torch.arange(text_config(model).vocab_size)
    text = text[~torch.isin(text, others)]
    return text[torch.randint(len(text), (tokens,), generator=torch.Generator().manual_seed(seed))]


@per_model
def placeholders_of(model: nn.Module) -> frozenset[int]:
    """`placeholder_ids` of a model's config."""
    return placeholder_ids(model.config)


def refuse_placeholders(
    model: nn.Module, token_ids: Iterable[int], what: str, placeholders: frozenset[int] | None = None
) -> None:
    """Refuse tokens whose K and V do not follow from their ids; the placeholders are looked for where not given."""
    refused = (placeholder_ids(model.config) if placeholders is None else placeholders).intersection(token_ids)
    if refused:
        raise PromptError(
            f"{what} holds the placeholder token {min(refused)}, where {type(model).__name__} puts an image, video or "
            "sound: equal tokens would share the KV of different ones, but only text is expected here. Cut the text "
            "there; as a part of a prompt the placeholder is computed in place."
        )


class LayerExtra(Protocol):
    """A part of a decoder layer that keeps something of each token beside K and V."""

    @property
    def module(self) -> nn.Module:
        """The part."""

    @property
    def projections(self) -> Any:
        """Each has `module`, the linear module that computes it, and `width`, how much of it is stored."""

    def record(self, cache: Any, tokens: int) -> Any:
        """Note what it keeps of all tokens in calls with this cache, between `enter` and `leave` of what this gives.

        Behind the call its `states` are that, `[batch, tokens, width]`, or None.
        """


@dataclass(frozen=True)
class LayerExtension:
    """The layers that one extension adds.

    Attributes:
        states: the kinds of transformers' cache layers that it knows, less "Dynamic" and "Layer".
        find: gives of each decoder layer of a model what keeps something beside K and V, or None.
        make_layer: gives the layer for one of transformers; None: unknown.
    """

    states: tuple[str, ...]
    find: Callable[[nn.Module], Sequence[LayerExtra | None]]
    make_layer: Callable[[Any], Any]


_registered: list[LayerExtension] = []


def register(extension: LayerExtension) -> None:
    """Add the layers of an extension; called by its module `extra_layers`."""
    _registered.append(extension)


@cache
def layer_extensions() -> list[LayerExtension]:
    """The extensions that are installed."""
    plugins.extensions("extra_layers")
    return _registered


def extras_of(model: nn.Module, layers: int) -> list[LayerExtra | None]:
    """By decoder layer, the part that keeps something beside K and V; None for most."""
    extras: list[LayerExtra | None] = [None] * layers
    for extension in layer_extensions():
        extras = [mine or other for mine, other in zip(extras, extension.find(model), strict=True)]
    return extras


@dataclass(frozen=True)
class LayerCost:
    """FLOPs (two per multiply-add) that one token costs in one decoder layer."""

    before_kv: float
    after_kv: float
    per_key: float
    always: float = 0.0

    def of_columns(self, columns: Tensor) -> float:
        """FLOPs of the tokens at some columns, each looking at all columns up to its own (the lower triangle)."""
        tokens, keys = columns.numel(), float((columns + 1).sum())
        return tokens * (self.before_kv + self.after_kv) + keys * self.per_key

    def of_all(self, columns: Tensor) -> float:
        """`of_columns`, and what is done for every token, for tokens all of which are computed."""
        return self.of_columns(columns) + columns.numel() * self.always


def _costs_to_json(costs: list[LayerCost]) -> list[Any]:
    return [astuple(cost) for cost in costs]


def _costs_of_json(rows: list[list[float]]) -> list[LayerCost]:
    return [LayerCost(*map(float, row)) for row in rows]


@partial(per_model, encode=_costs_to_json, decode=_costs_of_json)
@torch.no_grad()
def layer_costs(model: nn.Module) -> list[LayerCost]:
    """Cost of a token in each decoder layer, found by one forward of four tokens."""
    layers = decoder_layers(model)
    decoder = decoder_of(model)
    cache = full_cache(model)
    extras = extras_of(model, len(layers))
    before = [0.0] * len(layers)
    after = [0.0] * len(layers)
    always = [0.0] * len(layers)
    reached: set[int] = set()  # the layers that have handed over their K and V
    keyed = {index for index, layer in enumerate(cache.layers) if hasattr(layer, "keys")}
    update = cache.update
    thread = threading.get_ident()  # others may run the model meanwhile

    def updated(keys: Tensor, values: Tensor, index: int, *args: Any, **kwargs: Any) -> Any:
        reached.add(index)
        return update(keys, values, index, *args, **kwargs)

    def count(index: int, module: Any, *_: Any) -> None:
        if threading.get_ident() != thread:
            return
        extra = extras[index]
        side = after if index in reached else before
        if extra is not None and any(module is inner for inner in extra.module.modules()):
            widths = [projection.width for projection in extra.projections if projection.module is module]
            if not widths:
                side = always
            elif widths[0]:
                side = before
            else:
                side = after
        elif extra is not None and index not in keyed:
            side = after
        side[index] += 2.0 * module.in_features * module.out_features

    # Count the products of four tokens
    cache.update = updated
    linears = []
    for index, layer in enumerate(layers):
        linears += [(index, module) for module in layer.modules() if is_linear(module)]
    ids = torch.zeros((1, 4), dtype=torch.long, device=input_device(model))
    with hooked(linears, count):
        decoder(input_ids=ids, **cache_argument(decoder, cache))
    # Add what no linear module computes
    costs = []
    for index, config in enumerate(layer_configs(text_config(model), len(layers))):
        extra = extras[index]
        if extra is not None:
            always[index] += _scan(extra.module, cache.layers[index])
        attends = index in reached or (extra is None and LayerInfo.of(layers[index]).has_attention)
        per_key = _per_key(config) if attends else 0.0
        costs.append(LayerCost(before[index], after[index], per_key, always[index]))
    return costs


def _scan(mixer: nn.Module, states: Any) -> float:
    """FLOPs of a token in convolution and recurrence: each number of the state decays, takes the token up, is read."""
    weights = sum(weight.numel() for weight in mixer.parameters() if weight.dim() == CONVOLUTION_AXES)
    state = sum(state[0].numel() for state in states.recurrent_states.values() if state is not None)
    return 2.0 * weights + 6.0 * state


def _per_key(config: Any) -> float:
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 4.0 * config.num_attention_heads * width


@contextmanager
def canonical(model: nn.Module) -> Iterator[None]:
    """Run without dropout, autocast and gradients, and restore the caller's state afterwards."""
    training = [module for module in model.modules() if module.training]
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        for kind in filter(torch.is_autocast_enabled, DEVICE_TYPES):
            stack.enter_context(torch.autocast(kind, enabled=False))
        stack.callback(_set_mode, training, True)
        _set_mode(training, False)
        yield


@contextmanager
def notes_kept(model: nn.Module) -> Iterator[None]:
    """Put back the tensors that a forward writes into attributes of its modules, such as where its images end."""
    before = [(vars(module), dict(vars(module))) for module in model.modules()]
    try:
        yield
    finally:
        for attributes, saved in before:
            attributes |= {name: saved.get(name) for name, value in attributes.items() if isinstance(value, Tensor)}


def _set_mode(modules: list[nn.Module], training: bool) -> None:
    for module in modules:
        module.training = training


@contextmanager
def hooked(modules: Iterable[tuple[Any, nn.Module]], call: Callable[..., Any], behind: bool = False) -> Iterator[None]:
    """Call `call(key, module, args, kwargs)` before each of some modules, or behind it with its output as well."""
    handles = list[RemovableHandle]()

    def hook(key: Any, module: nn.Module, args: tuple[Any, ...], *rest: Any) -> Any:
        return call(key, module, args, *(rest if len(rest) > behind else ({}, *rest)))

    try:
        for key, module in modules:
            register: Any = module.register_forward_hook if behind else module.register_forward_pre_hook
            handles.append(register(partial(hook, key), with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()
