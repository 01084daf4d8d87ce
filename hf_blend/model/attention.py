# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""How blending gets into the attention of a layer without changing the model.

A layer of transformers calls its attention by a name in the config, such as "sdpa". `register_attention` puts a
function under that name, once per process. It calls the function that was there before (the stock one), but for calls
with one of two keywords, which layers hand on to it:

* `ROWS`: the `RowLines` of a call in which only some rows of a prompt are computed. They attend in blocks, since stock
  sdpa would copy K and V once per query head, and flash attention has no such mask. The keyword is an argument of the
  layer; `layers_handing_on` finds out which layers hand it on.
* `OVERRIDE`: a function to call instead. A hook of `hook_attention` adds it to the keywords of the attention module.

Keywords belong to one call, so calls of others are not affected. No config and no module is written to.
"""

import inspect
import threading
from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface, Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..errors import UnsupportedModelError
from .anatomy import LayerCall, LayerInfo, decoder_layers, decoder_of, full_cache, text_config
from .cache_keyword import cache_argument
from .fingerprint import per_model
from .hooks import hooked
from .identity.canonical import canonical
from .placement import input_device
from .row_masks import AttentionFn

STOCK = "sdpa"
OVERRIDE = "hf_blend_override"
ROWS = "hf_blend_rows"
PROBE_TOKENS = 4
FAILURES = (AttributeError, LookupError, RuntimeError, TypeError, ValueError)  # of code that takes no such keyword
AttentionOverride = Callable[..., Any]  # an attention function, with the stock function before all other arguments


class StopForward(Exception):
    """A layer has come as far as it should."""


def register_attention(name: str) -> None:
    """Wrap the function that transformers has under a name, so that it takes row masks and overrides too."""
    stock = ALL_ATTENTION_FUNCTIONS.get(name)
    if hasattr(stock, "stock"):
        return
    function = partial(_attend, stock)
    function.stock = stock  # type: ignore[attr-defined]
    AttentionInterface.register(name, function)
    if ALL_ATTENTION_FUNCTIONS.get(name) is not function:  # the user's own function is there
        ALL_ATTENTION_FUNCTIONS[name] = function


def stock_function(name: str) -> AttentionFn | None:
    """The function that transformers or the user has under a name; None where models bring their own."""
    function = ALL_ATTENTION_FUNCTIONS.get(name)
    return getattr(function, "stock", function)


@lru_cache(maxsize=256)
def eager_function(kind: type[nn.Module]) -> AttentionFn:
    """The function that a class of attention modules calls for "eager", which transformers has under no name."""
    forward = inspect.unwrap(kind.forward)
    names = (*forward.__code__.co_names, "eager_attention_forward")
    functions = (forward.__globals__.get(name) for name in names if name.endswith("eager_attention_forward"))
    function: AttentionFn | None = next((candidate for candidate in functions if candidate is not None), None)
    if function is None:
        raise UnsupportedModelError(
            f"{kind.__name__} attends with 'eager', whose function was not found. Load the model with "
            "attn_implementation='sdpa'."
        )
    return function


def _attend(
    stock: AttentionFn | None,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """What is called in place of a stock function: an override, blocks of rows, or the stock function itself.

    Args:
        stock: the function that was under the name before; None where "eager" has none.
        module: the attention module that calls.
        query: `[batch, heads, rows, head_dim]`.
        key: `[batch, kv_heads, keys, head_dim]`.
        value: `[batch, kv_heads, keys, value_dim]`.
        attention_mask: whatever the stock function takes; with `ROWS` it is not looked at.
        **kwargs: further arguments of the stock function, `OVERRIDE` and `ROWS`.

    Returns:
        The output `[batch, rows, heads, value_dim]`, and the attention weights if the function gives any.
    """
    stock = stock or eager_function(type(module))  # type: ignore[arg-type]
    override = kwargs.pop(OVERRIDE, None) or _marked.take(key)
    if override is not None:
        return override(partial(_attend, stock), module, query, key, value, attention_mask, **kwargs)
    rows = kwargs.pop(ROWS, None)
    if rows is None:
        return stock(module, query, key, value, attention_mask, **kwargs)
    return rows.attend(stock, module, query, key, value, attention_mask, **kwargs)


class _Marked(threading.local):
    """The keys that a cache has just returned in this thread, and what its layer's attention calls for them."""

    keys: Tensor | None = None
    override: AttentionOverride | None = None

    def take(self, keys: Tensor) -> AttentionOverride | None:
        """The override of these very keys, once."""
        if self.keys is not keys:
            return None
        override = self.override
        self.keys = self.override = None
        return override


_marked = _Marked()


def with_override(keys: Tensor, override: AttentionOverride) -> Tensor:
    """A view of the keys that a cache returns; the layer's attention calls a function for it instead.

    Where a cache decodes, no hook of it is in the model: what it returns from `update` is all that a layer sees of it.
    """
    _marked.keys = keys.view_as(keys)  # the cache's tensor may be returned elsewhere, too
    _marked.override = override
    return _marked.keys


class _RowProbe:
    """Stands for the rows of one layer, and finds out whether they and the layer's mask reach its attention."""

    def __init__(self, mask: Tensor) -> None:
        self.mask = mask
        self.arrived = False

    def to(self, *_: Any, **__: Any) -> "_RowProbe":
        """The same on another device."""
        return self

    def attend(
        self, stock: AttentionFn, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **_: Any
    ) -> tuple[Tensor, None]:
        """Compute nothing."""
        self.arrived = mask is self.mask
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None


@per_model
def layers_handing_on(model: nn.Module) -> frozenset[int]:
    """The layers that hand `ROWS` on to the registered function, and only hand on their mask.

    All others look into the mask (indexers), drop keywords, or attend in code of their own: they need a plain mask. It
    is found by one forward of a few tokens, whose attention computes nothing.
    """
    layers, cache, name = decoder_layers(model), full_cache(model), text_config(model)._attn_implementation or "eager"
    probes: dict[int, _RowProbe] = {}

    def begins(index: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = LayerCall.bind(layer, args, kwargs)
        if call.cache is not cache or not LayerInfo.of(layer).attention:
            return None
        mask = torch.ones(PROBE_TOKENS, PROBE_TOKENS, dtype=torch.bool, device=call.hidden.device).tril()[None, None]
        probes[index] = _RowProbe(mask)
        call.arguments |= {call.mask_name: mask, ROWS: probes[index]}
        return (call.hidden,), call.arguments

    register_attention(name)
    decoder = decoder_of(model)
    ids = torch.zeros((1, PROBE_TOKENS), dtype=torch.long, device=input_device(model))
    try:
        with canonical(model), hooked(enumerate(layers), begins):
            decoder(input_ids=ids, **cache_argument(decoder, cache), use_cache=True)
    except FAILURES:
        return frozenset()
    return frozenset(index for index, probe in probes.items() if probe.arrived)


def hook_attention(
    modules: Iterable[nn.Module], choose: Callable[[tuple[Any, ...]], AttentionOverride | None]
) -> list[RemovableHandle]:
    """Have attention modules call what `choose` returns for the arguments of each call, until the handles are removed.

    Where it returns None, a call continues as it would without.
    """

    def begins(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
        override = None if kwargs is None else choose((*args, *kwargs.values()))
        if override is None:
            return None
        register_attention(module.config._attn_implementation)
        return args, {**kwargs, OVERRIDE: override}  # type: ignore[dict-item]

    return [module.register_forward_pre_hook(begins, with_kwargs=True) for module in modules]


class AttentionCapture:
    """Has a function called once in place of a layer's attention, in the thread that opens it."""

    def __init__(self, layer: nn.Module, take: AttentionOverride) -> None:
        self._modules, self._take = LayerInfo.of(layer).attention, take
        self._handles: list[RemovableHandle] = []

    def open(self, cache: Any = None) -> bool:
        """Wait for the next call, of a forward with this cache or with none.

        Returns:
            False if no attention module is known in the layer: then nothing is called.
        """
        thread = threading.get_ident()

        def choose(arguments: tuple[Any, ...]) -> AttentionOverride | None:
            is_other = any(isinstance(value, Cache) and value is not cache for value in arguments)
            return None if is_other or threading.get_ident() != thread else self._taken

        self.close()
        self._handles = hook_attention(self._modules, choose)
        return bool(self._handles)

    def close(self) -> None:
        """Leave all further calls as they are."""
        while self._handles:
            self._handles.pop().remove()

    def _taken(self, stock: AttentionFn, *args: Any, **kwargs: Any) -> Any:
        """Call the function for the first call of a layer, which may attend twice, and the stock one after it."""
        if not self._handles:
            return stock(*args, **kwargs)
        self.close()
        return self._take(stock, *args, **kwargs)
