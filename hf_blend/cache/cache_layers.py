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
from .quantised_layer import QuantisedLayer, QuantisedStaticLayer
from .static_layer import StaticLayer, StaticSlidingLayer

MASKED = ("sdpa", "eager")  # attention that hides what a step's mask hides; flash kernels go by lengths


@PerStructure
def _stock_layers(model: nn.Module) -> list[Any]:
    """The layers of the cache that transformers makes for a model, empty; none where it makes none."""
    return stock_layers(text_config(model))


def cache_layers(model: nn.Module, count: int, config: BlendConfig, digest: str = "") -> list[Any]:
    """The layers of a blend cache: full, sliding or of a mixer where transformers' own cache has such a layer."""
    stock, kv_bits = _stock_layers(model, digest), config.kv_bits
    full: Callable[[], BlendLayer] = BlendLayer if kv_bits is None else partial(QuantisedLayer, kv_bits)
    indexed = IndexedLayer if kv_bits is None else partial(QuantisedIndexedLayer, kv_bits)
    sliding: Callable[[int], BlendLayer] = BlendSlidingLayer
    if (most := config.max_tokens) is not None:
        is_chunked = getattr(text_config(model), "attention_chunk_size", None) is not None
        for index, one in enumerate(stock):
            if what := _kept(one, is_chunked):
                raise ConfigError(
                    f"max_tokens={most} came with {type(model).__name__}, whose layer {index} keeps {what}, but "
                    "layers that keep K and V of all tokens or of a window are expected: only these have static "
                    "buffers. Leave max_tokens out."
                )
        full = partial(StaticLayer, most) if kv_bits is None else partial(QuantisedStaticLayer, most, kv_bits)
        sliding = partial(StaticSlidingLayer, most)
    every = [*stock, *[None] * count][:count]
    layers: list[Any] = [_like(one, indexed if has_indexer(one) else full, sliding, most) for one in every]
    for layer in layers:
        if most is not None and getattr(layer, "has_only_state", False):
            layer.is_compileable = True  # a state is as large behind any number of tokens
    if kv_bits is not None and not any(hasattr(layer, "packed_tokens") for layer in layers):
        kinds = sorted({type(layer).__name__ for layer in stock})
        raise ConfigError(
            f"kv_bits={kv_bits} came with a model whose layers are all of the kind {' or '.join(kinds)}, but only "
            f"full layers are kept in {kv_bits} bits: others hold no more than a window or state. Leave kv_bits out."
        )
    return layers


def _kept(stock: Any, is_chunked: bool) -> str:
    """What a layer keeps other than K and V of all tokens, or of a window; empty where nothing."""
    if is_chunked and getattr(stock, "is_sliding", False):
        return "K and V of a chunk, for whose mask transformers 5.17 fails"
    return "the keys of an indexer" if has_indexer(stock) else ""


def check_masked(model: nn.Module, max_tokens: int) -> None:
    """Refuse attention that would look at the columns of static buffers that hold nothing yet."""
    name = getattr(text_config(model), "_attn_implementation", None)
    if name not in MASKED:
        raise ConfigError(
            f"max_tokens={max_tokens} came with attn_implementation={name!r}, but one of {MASKED} is expected: a "
            "compiled step sees the whole buffer through a mask. Call model.set_attn_implementation('sdpa'), or leave "
            "max_tokens out."
        )


def _like(stock: Any, full: Callable[[], BlendLayer], sliding: Callable[[int], BlendLayer], most: int | None) -> Any:
    added = next((made for room in rooms() if (made := room.make_layer(stock, most)) is not None), None)
    if added is not None:
        return added
    if getattr(stock, "is_sliding", False):
        return sliding(stock.sliding_window)
    return stock if isinstance(stock, getattr(cache_utils, "DummyLayer", ())) else full()
