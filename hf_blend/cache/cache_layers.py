# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Which kind of cache layer each decoder layer gets: asked of transformers, not of the model's name."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from transformers import cache_utils

from ..config import BlendConfig
from ..errors import ConfigError
from ..model.anatomy import has_indexer, stock_layers, text_config
from ..model.extras import rooms
from ..model.fingerprint import PerStructure
from .indexed_layer import IndexedLayer, QuantisedIndexedLayer
from .layers import BlendLayer, BlendSlidingLayer
from .quantised_layer import QuantisedLayer


@PerStructure
def _stock_layers(model: nn.Module) -> list[Any]:
    """The layers of the cache that transformers makes for a model, empty; none where it makes none."""
    return stock_layers(text_config(model))


def cache_layers(model: nn.Module, count: int, config: BlendConfig, digest: str = "") -> list[Any]:
    """The layers of a blend cache: full, sliding or of a mixer where transformers' own cache has such a layer."""
    stock, kv_bits = _stock_layers(model, digest), config.kv_bits
    full: Callable[[], BlendLayer] = BlendLayer if kv_bits is None else partial(QuantisedLayer, kv_bits)
    indexed = IndexedLayer if kv_bits is None else partial(QuantisedIndexedLayer, kv_bits)
    every = [*stock, *[None] * count][:count]
    layers: list[Any] = [_like(layer, indexed if has_indexer(layer) else full) for layer in every]
    if kv_bits is not None and not any(hasattr(layer, "packed_tokens") for layer in layers):
        kinds = sorted({type(layer).__name__ for layer in stock})
        raise ConfigError(
            f"kv_bits={kv_bits} came with a model whose layers are all of the kind {' or '.join(kinds)}, but only "
            f"full layers are kept in {kv_bits} bits: others hold no more than a window or state. Leave kv_bits out."
        )
    return layers


def _like(stock: Any, full: Callable[[], BlendLayer]) -> Any:
    added = next((made for room in rooms() if (made := room.make_layer(stock)) is not None), None)
    if added is not None:
        return added
    if getattr(stock, "is_sliding", False):
        return BlendSlidingLayer(stock.sliding_window)
    return stock if isinstance(stock, getattr(cache_utils, "DummyLayer", ())) else full()
