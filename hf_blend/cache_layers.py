# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Which kind of cache layer each decoder layer gets: asked of transformers, not of the model's name."""

from typing import Any

from transformers import DynamicCache, cache_utils

from .layers import BlendLayer
from .sliding_layer import BlendSlidingLayer

UNREADABLE = (AttributeError, LookupError, TypeError, ValueError)  # a config that transformers' own cache refuses


def cache_layers(config: Any, count: int) -> list[Any]:
    """The layers of a blend cache: full or sliding where transformers' own cache has such a layer.

    Args:
        config: of the text model.
        count: how many decoder layers the model has.

    Returns:
        One cache layer per decoder layer; a layer that keeps no K and V of its own has transformers' place holder.
    """
    try:
        stock = DynamicCache(config=config).layers
    except UNREADABLE:
        stock = []
    return [_like(stock[index]) if index < len(stock) else BlendLayer() for index in range(count)]


def layer_sizes(layer: Any, past: int, tokens: int) -> tuple[int, int]:
    """Length and offset of the keys that new tokens see in a layer.

    Args:
        layer: one of `cache_layers`.
        past: tokens in the cache before them.
        tokens: how many are new.

    Returns:
        (keys, offset); a place holder has all.
    """
    return layer.sizes_behind(past, tokens) if isinstance(layer, BlendLayer) else (past + tokens, 0)


def _like(stock: Any) -> Any:
    if getattr(stock, "is_sliding", False):
        return BlendSlidingLayer(stock.sliding_window)
    return stock if isinstance(stock, getattr(cache_utils, "DummyLayer", ())) else BlendLayer()
