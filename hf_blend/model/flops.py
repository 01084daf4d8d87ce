# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What a token costs in a layer, counted by watching the model run: no table of architectures."""

import threading
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from .anatomy import LayerInfo, decoder_layers, decoder_of, full_cache, is_linear, layer_configs, text_config
from .cache_keyword import cache_argument
from .extras import extras_of
from .hooks import hooked
from .placement import input_device

CONVOLUTION_AXES = 3  # of the weight of a 1-D convolution

_known: WeakKeyDictionary[nn.Module, list["LayerCost"]] = WeakKeyDictionary()


@dataclass(frozen=True)
class LayerCost:
    """FLOPs (two per multiply-add) that one token costs in one decoder layer."""

    before_kv: float
    after_kv: float
    per_key: float
    always: float = 0.0

    def of_columns(self, columns: Tensor) -> float:
        """FLOPs of the tokens at some columns, each looking at all columns up to its own (the lower triangle)."""
        tokens, keys = columns.numel(), float((columns + 1).sum())
        return tokens * (self.before_kv + self.after_kv) + keys * self.per_key

    def of_all(self, columns: Tensor) -> float:
        """`of_columns`, and what is done for every token, for tokens all of which are computed."""
        return self.of_columns(columns) + columns.numel() * self.always


def layer_costs(model: nn.Module) -> list[LayerCost]:
    """Cost of a token in each decoder layer, found by one forward of four tokens and cached while the model lives."""
    if model not in _known:
        _known[model] = _measure(model)
    return _known[model]


@torch.no_grad()
def _measure(model: nn.Module) -> list[LayerCost]:
    layers = decoder_layers(model)
    decoder = decoder_of(model)
    cache = full_cache(model)
    extras = extras_of(model, len(layers))
    before = [0.0] * len(layers)
    after = [0.0] * len(layers)
    always = [0.0] * len(layers)
    reached: set[int] = set()  # the layers that have handed over their K and V
    keyed = {index for index, layer in enumerate(cache.layers) if hasattr(layer, "keys")}
    update = cache.update
    thread = threading.get_ident()  # others may run the model meanwhile

    def updated(keys: Tensor, values: Tensor, index: int, *args: Any, **kwargs: Any) -> Any:
        reached.add(index)
        return update(keys, values, index, *args, **kwargs)

    def count(index: int, module: Any, *_: Any) -> None:
        if threading.get_ident() != thread:
            return
        extra = extras[index]
        side = after if index in reached else before
        if extra is not None and any(module is inner for inner in extra.module.modules()):
            widths = [projection.width for projection in extra.projections if projection.module is module]
            if not widths:
                side = always
            elif widths[0]:
                side = before
            else:
                side = after
        elif extra is not None and index not in keyed:
            side = after
        side[index] += 2.0 * module.in_features * module.out_features

    # Count the products of four tokens
    cache.update = updated
    linears = []
    for index, layer in enumerate(layers):
        linears += [(index, module) for module in layer.modules() if is_linear(module)]
    ids = torch.zeros((1, 4), dtype=torch.long, device=input_device(model))
    with hooked(linears, count):
        decoder(input_ids=ids, **cache_argument(decoder, cache))
    # Add what no linear module computes
    costs = []
    for index, config in enumerate(layer_configs(text_config(model), len(layers))):
        extra = extras[index]
        if extra is not None:
            always[index] += _scan(extra.module, cache.layers[index])
        attends = index in reached or (extra is None and LayerInfo.of(layers[index]).has_attention)
        per_key = _per_key(config) if attends else 0.0
        costs.append(LayerCost(before[index], after[index], per_key, always[index]))
    return costs


def _scan(mixer: nn.Module, states: Any) -> float:
    """FLOPs of a token in convolution and recurrence: each number of the state decays, takes the token up, is read."""
    weights = sum(weight.numel() for weight in mixer.parameters() if weight.dim() == CONVOLUTION_AXES)
    state = sum(state[0].numel() for state in states.recurrent_states.values() if state is not None)
    return 2.0 * weights + 6.0 * state


def _per_key(config: Any) -> float:
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 4.0 * config.num_attention_heads * width
