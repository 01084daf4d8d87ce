# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What this room adds to the core: the layers that transformers keeps a mixer's state in."""

from typing import Any

from transformers.cache_utils import CacheLayerMixin

from ..model.extras import LayerRoom, register
from .layers import MixerAttentionLayer, MixerLayer, MixerSlidingLayer
from .mixer_probe import mixers_of

STATES = ("LinearAttention", "LinearAttentionAndFullAttention", "LinearAttentionAndSlidingWindowAttention")


def make_layer(stock: Any) -> Any:
    """The layer of a blend cache for one of transformers that holds a mixer's state; None for any other."""
    if not hasattr(stock, "recurrent_states"):
        return None
    if getattr(stock, "is_sliding", False):
        return MixerSlidingLayer(stock.sliding_window, stock.number_of_states)
    kind = MixerAttentionLayer if isinstance(stock, CacheLayerMixin) else MixerLayer
    return kind(stock.number_of_states)


register(LayerRoom(STATES, mixers_of, make_layer))
