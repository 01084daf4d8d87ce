# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Models that take no cache but one of a class in their own file: lightning attention (MiniMax).

Such a class keeps the states of linear layers beside the cache layers, in a list that beam search does not reorder and
that cannot be restored. The model takes derived classes as well. So one is made that keeps these states in the layers,
where transformers keeps those of all other linear attention.
"""

import sys
from functools import cache
from typing import Any

from torch import Tensor

TAKES, GIVES = "set_linear_cache", "get_linear_cache"  # by which these models hand over their states


def cache_class_for(kind: type, model: object) -> type:
    """A class of caches in the form that a model takes."""
    own = _own_cache(type(model))  # type: ignore[arg-type]
    return kind if own is None else _derived(kind, own)


@cache
def _own_cache(model_class: type) -> type | None:
    """The class in the file of a model that keeps the states of its linear layers; None where it has none."""
    from transformers import Cache

    files = (sys.modules.get(base.__module__) for base in model_class.__mro__)
    named = (value for file in files if file is not None for value in list(vars(file).values()))
    caches = (value for value in named if isinstance(value, type) and issubclass(value, Cache))
    return next((value for value in caches if hasattr(value, TAKES) and hasattr(value, GIVES)), None)


@cache
def _derived(kind: type, own: type) -> type:
    from transformers import Cache

    if issubclass(kind, own):
        return kind
    stock = {name: getattr(Cache, name) for name in vars(own) if hasattr(Cache, name)}
    stock = {name: member for name, member in stock.items() if callable(member) or not name.startswith("__")}
    bridge = type(own.__name__, (own,), {**stock, TAKES: _take, GIVES: _give})
    return bridge if kind is Cache else type(kind.__name__, (kind, bridge), {"__doc__": kind.__doc__})


def _take(cache: Any, layer_idx: int, linear_cache: Tensor) -> None:
    """Keep the state of a layer, `[batch, heads, head_dim, head_dim]`."""
    cache.update_recurrent_state(linear_cache, layer_idx)


def _give(cache: Any, layer_idx: int) -> Tensor | None:
    """The state of a layer behind the last token; None where there was none."""
    layer = cache.layers[layer_idx]
    state: Tensor | None = layer.recurrent_states[0] if layer.is_recurrent_states_initialized[0] else None
    return state
