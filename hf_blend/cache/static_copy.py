# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A stock `StaticCache` that holds what a `BlendCache` holds, for decoding that is compiled once for all tokens."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import StaticCache

from ..errors import ConfigError
from ..model.anatomy import has_indexer, text_config
from ..model.cache_keyword import KEYWORD

__all__ = ["static_copy"]


def static_copy(model: nn.Module, layers: Sequence[Any], max_cache_len: int) -> StaticCache:
    """Copy K, V and the states of mixers into a new `StaticCache`, by its public methods.

    `layers` are those of a blend cache that the model filled; for the rest see `BlendCache.to_static`.
    """
    config, cached = text_config(model), max((layer.get_seq_length() for layer in layers if _tokens(layer)), default=0)
    if not cached:
        raise ConfigError(
            "a BlendCache without tokens was to be copied into a StaticCache, expected one behind a prefill. Call "
            f"generate(**inputs, {KEYWORD}=cache, max_new_tokens=1) first."
        )
    if type(max_cache_len) is not int or max_cache_len <= cached:
        raise ConfigError(
            f"max_cache_len is {max_cache_len!r}, expected a number above the {cached} tokens that the cache holds. "
            "Give the length of the prompt and of the answer together."
        )
    static = StaticCache(config=config, max_cache_len=max_cache_len)
    is_chunked = getattr(config, "attention_chunk_size", None) is not None
    stock_layers: list[Any] = static.layers
    for index, (own, stock) in enumerate(zip(layers, stock_layers, strict=True)):
        if what := _more_than_tokens(own, stock, is_chunked):
            raise ConfigError(
                f"layer {index} of {type(model).__name__} {what}, but a layer with the K and V of all tokens or of a "
                "window, or with the state of a mixer, is expected in a StaticCache. Decode with the BlendCache."
            )
        _copy_states(own, stock)
        if _tokens(own):
            stock.update(*(_from_the_first_token(states, own.get_seq_length()) for states in (own.keys, own.values)))
    return static


def _tokens(layer: Any) -> bool:
    """Whether a layer holds K and V of tokens."""
    return getattr(layer, "keys", None) is not None


def _more_than_tokens(own: Any, stock: Any, is_chunked: bool) -> str:
    """What a layer holds that the copy would lack; empty where nothing."""
    if has_indexer(stock):
        return "keeps the keys of an indexer"
    if is_chunked and getattr(stock, "is_sliding", False):
        return "keeps K and V of a chunk"
    return "holds a part of its prompt only" if getattr(own, "visible", None) is not None else ""


def _copy_states(own: Any, stock: Any) -> None:
    """Copy the inputs of a convolution and the state of a scan, where a layer keeps them."""
    for number, state in getattr(own, "conv_states", {}).items():
        if state is not None:
            stock.update_conv_state(state[..., -own.conv_kernel_size[number] :], number)
    for number, state in getattr(own, "recurrent_states", {}).items():
        if state is not None:
            stock.update_recurrent_state(state, number)
            stock.has_previous_state[number] = own.has_previous_state[number]


def _from_the_first_token(states: Tensor, tokens: int) -> Tensor:
    """K or V of all tokens, `[batch, kv_heads, tokens, head_dim]`: 0 for those that a window has forgotten."""
    forgotten = tokens - states.shape[2]
    zeros = states.new_zeros((*states.shape[:2], forgotten, states.shape[3]))
    return torch.cat((zeros, states), 2) if forgotten else states
