# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Which kind of cache layer each decoder layer gets: asked of transformers, not of the model's name."""

from typing import Any

from transformers import DynamicCache, cache_utils

from ..errors import ConfigError
from .layers import BlendLayer
from .quantised_layer import QuantisedLayer
from .sliding_layer import BlendSlidingLayer

UNREADABLE = (AttributeError, LookupError, TypeError, ValueError)  # a config that transformers' own cache refuses


def cache_layers(config: Any, count: int, kv_bits: int | None = None) -> list[Any]:
    """The layers of a blend cache: full or sliding where transformers' own cache has such a layer.

    Args:
        config: of the text model.
        count: how many decoder layers the model has.
        kv_bits: 8 to keep K and V of full layers in 8 bits; a layer with a window holds no more than that window.

    Returns:
        One cache layer per decoder layer; a layer that keeps no K and V of its own has transformers' place holder.

    Raises:
        ConfigError: 8 bits are asked for, and no layer is full.
    """
    try:
        stock = DynamicCache(config=config).layers
    except UNREADABLE:
        stock = []
    full: type[BlendLayer] = BlendLayer if kv_bits is None else QuantisedLayer
    layers: list[Any] = [_like(stock[index], full) if index < len(stock) else full() for index in range(count)]
    if kv_bits is not None and not any(isinstance(layer, QuantisedLayer) for layer in layers):
        raise ConfigError(
            f"kv_bits={kv_bits} came with a model in which every layer has a window, of "
            f"{layers[0].sliding_window} tokens, but only full layers are kept in {kv_bits} bits: the others hold no "
            "more than their windows. Leave kv_bits out."
        )
    return layers


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


def _like(stock: Any, full: type[BlendLayer]) -> Any:
    if getattr(stock, "is_sliding", False):
        return BlendSlidingLayer(stock.sliding_window)
    return stock if isinstance(stock, getattr(cache_utils, "DummyLayer", ())) else full()
