# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What a token costs in a layer, counted by watching the model run: no table of architectures."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from .anatomy import decoder_layers, decoder_of, layer_configs, text_config
from .placement import input_device

_known: WeakKeyDictionary[nn.Module, list["LayerCost"]] = WeakKeyDictionary()


@dataclass(frozen=True)
class LayerCost:
    """FLOPs (two per multiply-add) that one token costs in one decoder layer.

    Attributes:
        before_kv: matrix products up to the moment when K and V reach the cache (queries included).
        after_kv: matrix products after that: output projection and MLP.
        per_key: attention, for each key that the token looks at.
    """

    before_kv: float
    after_kv: float
    per_key: float

    def of_columns(self, columns: Tensor) -> float:
        """FLOPs of the tokens at some columns, each looking at all columns up to its own (the lower triangle)."""
        tokens, keys = columns.numel(), float((columns + 1).sum())
        return tokens * (self.before_kv + self.after_kv) + keys * self.per_key


def layer_costs(model: nn.Module) -> list[LayerCost]:
    """Cost of a token in each decoder layer, found by one forward of four tokens and remembered while the model lives.

    Args:
        model: the model; left as it was.

    Returns:
        One cost per layer.
    """
    if model not in _known:
        _known[model] = _measure(model)
    return _known[model]


class _Marker(DynamicCache):
    """A cache that remembers which layers have handed it their K and V."""

    def __init__(self) -> None:
        super().__init__()
        self.reached: set[int] = set()

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Note the layer, then do as any cache does."""
        self.reached.add(layer_idx)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


@torch.no_grad()
def _measure(model: nn.Module) -> list[LayerCost]:
    layers, marker = decoder_layers(model), _Marker()
    before, after = [0.0] * len(layers), [0.0] * len(layers)

    thread = threading.get_ident()  # others may run the model meanwhile

    def count(index: int, module: nn.Module) -> None:
        if threading.get_ident() != thread:
            return
        side = after if index in marker.reached else before
        side[index] += 2.0 * module.in_features * module.out_features

    with _watched(layers, count):
        device = input_device(model)
        decoder_of(model)(input_ids=torch.zeros((1, 4), dtype=torch.long, device=device), past_key_values=marker)
    per_key = [_per_key(config) for config in layer_configs(text_config(model), len(layers))]
    return [LayerCost(*costs) for costs in zip(before, after, per_key, strict=True)]


def _per_key(config: Any) -> float:
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 4.0 * config.num_attention_heads * width


@contextmanager
def _watched(layers: list[nn.Module], count: Any) -> Iterator[None]:
    handles = []
    try:
        for index, layer in enumerate(layers):
            for module in layer.modules():
                if hasattr(module, "in_features") and hasattr(module, "out_features"):
                    hook = lambda module, args, index=index: count(index, module)  # noqa: E731
                    handles.append(module.register_forward_pre_hook(hook))
        yield
    finally:
        for handle in handles:
            handle.remove()
