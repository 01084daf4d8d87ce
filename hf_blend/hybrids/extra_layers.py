# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What this room adds to the core: the layers that transformers keeps a mixer's state in."""

from typing import Any

from transformers.cache_utils import CacheLayerMixin

from ..model.extras import LayerRoom, register
from .layers import MixerAttentionLayer, MixerLayer, MixerSlidingLayer, MixerStaticLayer
from .mixer_probe import mixers_of

STATES = ("LinearAttention", "LinearAttentionAndFullAttention", "LinearAttentionAndSlidingWindowAttention")


def make_layer(stock: Any, max_tokens: int | None) -> Any:
    """The layer of a blend cache for one of transformers that holds a mixer's state; None for any other."""
    if not hasattr(stock, "recurrent_states"):
        return None
    states, window = stock.number_of_states, getattr(stock, "sliding_window", None)
    if not isinstance(stock, CacheLayerMixin):
        return MixerLayer(states)
    if max_tokens is not None:
        return MixerStaticLayer(max_tokens, states, window)
    return MixerAttentionLayer(states) if window is None else MixerSlidingLayer(window, states)


register(LayerRoom(STATES, mixers_of, make_layer))
