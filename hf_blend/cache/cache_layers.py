# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Which kind of cache layer each decoder layer gets: asked of transformers, not of the model's name."""

from typing import Any

from torch import nn
from transformers import cache_utils

from ..errors import ConfigError
from ..model.anatomy import has_indexer, stock_layers, text_config
from ..model.fingerprint import PerStructure
from .indexed_layer import IndexedLayer
from .layers import BlendLayer
from .mixer_layer import MixerAttentionLayer, MixerLayer, MixerSlidingLayer
from .quantised_layer import QuantisedLayer
from .sliding_layer import BlendSlidingLayer


@PerStructure
def _stock_layers(model: nn.Module) -> list[Any]:
    """The layers of the cache that transformers makes for a model, empty; none where it makes none."""
    return stock_layers(text_config(model))


def cache_layers(model: nn.Module, count: int, kv_bits: int | None = None, digest: str = "") -> list[Any]:
    """The layers of a blend cache: full, sliding or of a mixer where transformers' own cache has such a layer.

    Args:
        model: of transformers.
        count: how many decoder layers the model has.
        kv_bits: 8 to keep K and V of full layers in 8 bits; layers with a window or an indexer stay as they are.
        digest: the model's `structure_digest`, where it was asked for just now.

    Returns:
        One cache layer per decoder layer; a layer that keeps no K and V of its own has transformers' place holder.

    Raises:
        ConfigError: 8 bits are asked for, and no layer is full.
    """
    stock = _stock_layers(model, digest)
    full: type[BlendLayer] = BlendLayer if kv_bits is None else QuantisedLayer
    layers: list[Any] = [_like(stock[index], full) if index < len(stock) else full() for index in range(count)]
    if kv_bits is not None and not any(isinstance(layer, QuantisedLayer) for layer in layers):
        kinds = sorted({type(layer).__name__ for layer in stock})
        raise ConfigError(
            f"kv_bits={kv_bits} came with a model whose layers are all of the kind {' or '.join(kinds)}, but only "
            f"full layers are kept in {kv_bits} bits: others hold no more than a window, or an indexer's keys too. "
            "Leave kv_bits out."
        )
    return layers


def _like(stock: Any, full: type[BlendLayer]) -> Any:
    is_sliding, is_mixer = getattr(stock, "is_sliding", False), hasattr(stock, "recurrent_states")
    if is_sliding and is_mixer:
        return MixerSlidingLayer(stock.sliding_window, stock.number_of_states)
    if is_mixer:
        kind = MixerAttentionLayer if isinstance(stock, cache_utils.CacheLayerMixin) else MixerLayer
        return kind(stock.number_of_states)
    if has_indexer(stock):
        return IndexedLayer()
    if is_sliding:
        return BlendSlidingLayer(stock.sliding_window)
    return stock if isinstance(stock, getattr(cache_utils, "DummyLayer", ())) else full()
