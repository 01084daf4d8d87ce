# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""How many bytes a cache takes, from a model's config alone: nothing is loaded.

Which layers there are, and how many tokens each keeps, is asked of transformers' own `DynamicCache`; how wide a token
is follows from the config. What other ways of keeping it would take is stated beside it: every head of its own (no
grouping), every layer in full (no windows), int8.
"""

from dataclasses import dataclass
from typing import Any

import torch

from hf_blend.errors import ConfigError, UnsupportedModelError
from hf_blend.model.anatomy import layer_configs

INT8_SCALE_BYTES = 4  # a float32 scale for each token's V, and for each channel's K in a block
INT8_BLOCK_TOKENS = 64


@dataclass(frozen=True)
class LayerSize:
    """One decoder layer's part of a cache."""

    kv_heads: int
    query_heads: int
    key_width: int
    value_width: int
    window_tokens: int | None

    def tokens(self, context: int) -> int:
        """How many of `context` tokens are kept."""
        return context if self.window_tokens is None else min(context, self.window_tokens)

    def width(self, heads: int) -> int:
        """Numbers that one token takes with so many heads of keys and values."""
        return heads * (self.key_width + self.value_width)


@dataclass(frozen=True)
class CacheSize:
    """A cache's size for some context and batch, and what it would be if it were kept otherwise."""

    num_layers: int
    dtype: torch.dtype
    bytes_per_token: int  # while no window is full
    nbytes: int
    without_windows_nbytes: int
    without_groups_nbytes: int
    int8_nbytes: int


def cache_size(config: Any, *, context_tokens: int, batch: int = 1, dtype: torch.dtype | None = None) -> CacheSize:
    """Compute the size of a cache."""
    if context_tokens < 1 or batch < 1:
        raise ConfigError(f"context is {context_tokens} and batch {batch}, expected numbers from 1 on.")
    text = config.get_text_config(decoder=True)
    dtype = dtype or getattr(text, "dtype", None) or torch.float32
    kept = [(layer, layer.tokens(context_tokens)) for layer in _layers(text)]
    width, each = sum(layer.width(layer.kv_heads) for layer, _ in kept), batch * dtype.itemsize
    return CacheSize(
        num_layers=len(kept),
        dtype=dtype,
        bytes_per_token=dtype.itemsize * width,
        nbytes=each * sum(layer.width(layer.kv_heads) * tokens for layer, tokens in kept),
        without_windows_nbytes=each * width * context_tokens,
        without_groups_nbytes=each * sum(layer.width(layer.query_heads) * tokens for layer, tokens in kept),
        int8_nbytes=batch * sum(_int8_bytes(layer, tokens) for layer, tokens in kept),
    )


def _layers(config: Any) -> list[LayerSize]:
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    kept: list[Any] = DynamicCache(config=config).layers
    sizes = []
    for index, layer in enumerate(kept):
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            if getattr(layer, "is_dummy", False):
                continue
            raise UnsupportedModelError(
                f"layer {index} of a {config.model_type} model keeps a {type(layer).__name__.removesuffix('Layer')} "
                "state, not K and V of tokens, so its size does not follow from the context. Measure it instead."
            )
        window = layer.sliding_window - 1 if layer.is_sliding else None
        sizes.append(LayerSize(*_widths(config, index, len(kept)), window))
    return sizes


def _widths(config: Any, index: int, layers: int) -> tuple[int, int, int, int]:
    """KV heads, query heads, width of K and of V in a layer."""
    config = layer_configs(config, layers)[index]
    query_heads = _first(config, "num_attention_heads")
    latent, rotary = (getattr(config, name, None) for name in ("kv_lora_rank", "qk_rope_head_dim"))
    if latent and rotary:  # latent attention: one latent for all heads, and one rotated key
        return 1, query_heads, latent, rotary
    kind = (getattr(config, "layer_types", None) or [""] * layers)[index]
    is_global = kind == "full_attention" and getattr(config, "global_head_dim", None)
    width = config.global_head_dim if is_global else getattr(config, "head_dim", None)
    width = width or _first(config, "hidden_size") // query_heads
    return _kv_heads(config, query_heads, bool(is_global)), query_heads, width, width


def _kv_heads(config: Any, query_heads: int, is_global: bool) -> int:
    if is_global and getattr(config, "num_global_key_value_heads", None):
        return int(config.num_global_key_value_heads)
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        return 1
    for name in ("num_key_value_heads", "num_kv_heads"):
        if getattr(config, name, None):
            return int(getattr(config, name))
    return query_heads


def _first(config: Any, name: str) -> int:
    value = getattr(config, name, None)
    if not value:
        raise ConfigError(f"the config of a {config.model_type} model has no {name}, so its cache cannot be sized.")
    return int(value)


def _int8_bytes(layer: LayerSize, tokens: int) -> int:
    """Bytes in int8, with scales per channel of K in blocks and per token of V."""
    blocks = -(-tokens // INT8_BLOCK_TOKENS)
    scales = layer.key_width * blocks + tokens
    return layer.kv_heads * (tokens * (layer.key_width + layer.value_width) + INT8_SCALE_BYTES * scales)
