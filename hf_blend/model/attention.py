# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""How blending gets into the attention of a layer without changing the model.

A layer of transformers calls its attention by a name in the config, such as "sdpa". `register_attention` puts a
function under that name, once per process. It calls the function that was there before (the stock one), except:

* The mask is a `RowMask`: only some rows of a prompt are computed. They attend in blocks, since stock sdpa would copy
  K and V once per query head, and flash attention has no such mask.
* The call comes with an override, a function to call instead. Either a hook of `hook_attention` has added it to the
  layer's keywords, or it is an attribute of the keys that a cache has just returned (`with_override`).

Mask and override belong to one call, so calls of others are not affected. No config and no module is written to.
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
    """What is called in place of a stock function: an override, blocks of a `RowMask`, or the stock function itself.

    Chunks that are packed into one row see only themselves.

    Args:
        stock: the function that was under the name before; None where "eager" has none.
        module: the attention module that calls.
        query: `[batch, heads, rows, head_dim]`.
        key: `[batch, kv_heads, keys, head_dim]`.
        value: `[batch, kv_heads, keys, value_dim]`.
        attention_mask: a `RowMask`, or whatever the stock function takes.
        **kwargs: further arguments of the stock function, and `OVERRIDE`.

    Returns:
        The output `[batch, rows, heads, value_dim]`, and the attention weights if the function gives any.
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
    """A view of the keys that a cache returns, which makes the layer's attention call a function instead."""
    keys = keys.view_as(keys)  # the cache's own tensor is left as it is
    setattr(keys, OVERRIDE, override)
    return keys


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
