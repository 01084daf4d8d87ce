# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The attention function that is registered in place of a stock one.

transformers looks up the function of a layer's attention by the name in the model's config. Under each name that a
blended model uses, `register_attention` registers a function that calls the stock one, once per process and for good.
It does something else in two cases. Both travel with the call, so no other call is affected:

* The mask is a `RowMask`: scattered rows are attended by blocks. Stock sdpa would copy K and V once per query head,
  and flash attention has no such mask.
* The call carries an override, a function that is called in place of the stock one. It is the keyword `OVERRIDE`,
  which `hook_attention` adds by forward pre-hooks on the attention modules, since these pass all keywords on. Or it is
  an attribute of the keys, where a cache has just returned them (`with_override`).

No attribute of a config or module is written.
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
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..errors import UnsupportedModelError
from .anatomy import LayerInfo
from .row_masks import PackedLines, RowMask, attend

STOCK, OVERRIDE = "sdpa", "hf_blend_override"
AttentionFn = Callable[..., tuple[Tensor, Tensor | None]]  # what an attention function of transformers is
AttentionOverride = Callable[..., Any]  # the same, with the stock function before all other arguments


class StopForward(Exception):
    """A layer has come as far as it should."""


def is_flash(implementation: str) -> bool:
    """Return True for an implementation of flash attention, which transformers knows by its name too."""
    return "flash" in implementation


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
    """The eager attention of a class of modules: the function in its file that its forward falls back on."""
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
    """Attend with a `RowMask`; packed chunks each alone; with any other mask, by the stock function or an override.

    Shapes: query `[batch, heads, rows, head_dim]`, key `[batch, kv_heads, keys, head_dim]`, value `[batch, kv_heads,
    keys, value_dim]` → `[batch, rows, heads, value_dim]`.
    """
    stock = stock or eager_function(type(module))  # type: ignore[arg-type]
    override = kwargs.pop(OVERRIDE, None)
    override = getattr(key, OVERRIDE, None) if override is None else override
    if override:  # what it passes on is not overridden again
        again = partial(_attend, stock, **{OVERRIDE: False})
        return override(again, module, query, key, value, attention_mask, **kwargs)
    if not isinstance(attention_mask, RowMask):
        return stock(module, query, key, value, attention_mask, **kwargs)
    lines = attention_mask.lines
    if isinstance(lines, PackedLines) and kwargs.get("position_bias") is None:
        outputs = [
            stock(
                module, query[:, :, block.rows], lines.seen_of(key, block), lines.seen_of(value, block), own, **kwargs
            )[0]
            for block, own in zip(lines.blocks, lines.masks, strict=True)
        ]
        return torch.cat(outputs, dim=1), None
    special = [name for name in ("position_bias", "softcap", "s_aux", "indices") if kwargs.get(name) is not None]
    name = module.config._attn_implementation
    if special and is_flash(name):
        raise UnsupportedModelError(
            f"attention is {name} with {' and '.join(special)}, but scattered rows go through sdpa, which has none. "
            "Load the model with attn_implementation='eager'."
        )
    if special:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    dropout, scaling = kwargs.get("dropout", 0.0), kwargs.get("scaling")
    return attend(query, key, value, lines, dropout, scaling).transpose(1, 2).contiguous(), None


def with_override(keys: Tensor, override: AttentionOverride) -> Tensor:
    """Keys that a cache returns to a layer's attention, with the function that is called in its place."""
    keys = keys.view_as(keys)  # the cache's own tensor is left as it is
    setattr(keys, OVERRIDE, override)
    return keys


def hook_attention(
    modules: Iterable[nn.Module], choose: Callable[[tuple[Any, ...]], AttentionOverride | None]
) -> list[RemovableHandle]:
    """Let `choose` name the override of each call, by the attention module's arguments; None: the stock function."""

    def begins(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
        override = None if kwargs is None else choose((*args, *kwargs.values()))
        if override is None:
            return None
        register_attention(module.config._attn_implementation)
        return args, {**kwargs, OVERRIDE: override}  # type: ignore[dict-item]

    return [module.register_forward_pre_hook(begins, with_kwargs=True) for module in modules]


class AttentionCapture:
    """Gives the next attention call of a layer to a function, in this thread and with one cache."""

    def __init__(self, layer: nn.Module, take: AttentionOverride) -> None:
        self._modules, self._take = LayerInfo.of(layer).attention, take
        self._handles: list[RemovableHandle] = []

    def open(self, cache: Any = None) -> bool:
        """AttentionOverride the next call; False for a layer whose attention is not found, which goes its own way."""
        thread = threading.get_ident()

        def choose(arguments: tuple[Any, ...]) -> AttentionOverride | None:
            is_other = any(isinstance(value, Cache) and value is not cache for value in arguments)
            return None if is_other or threading.get_ident() != thread else self._taken

        self.close()
        self._handles = hook_attention(self._modules, choose)
        return bool(self._handles)

    def close(self) -> None:
        """AttentionOverride no call any more."""
        while self._handles:
            self._handles.pop().remove()

    def _taken(self, stock: AttentionFn, *args: Any, **kwargs: Any) -> Any:
        """Pass the first call of a layer on; a layer that asks twice is taken once."""
        if not self._handles:
            return stock(*args, **kwargs)
        self.close()
        return self._take(stock, *args, **kwargs)
