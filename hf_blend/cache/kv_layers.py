# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The layers of a blend cache. Their kinds follow transformers' cache for the model, whatever the model is called."""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn
from transformers import cache_utils
from transformers.cache_utils import CacheLayerMixin

from .. import plugins
from ..config import BlendConfig
from ..errors import ConfigError
from ..model.anatomy import has_indexer, stock_layers, text_config
from ..model.extras import layer_extensions
from ..model.fingerprint import per_model
from .indexed_layer import IndexedLayer, QuantisedIndexedLayer
from .layers import BlendLayer, BlendSlidingLayer
from .quantised_layer import QuantisedLayer


@per_model
def _stock_layers(model: nn.Module) -> list[Any]:
    """The layers of the cache that transformers makes for a model, empty; none where it makes none."""
    return stock_layers(text_config(model))


def cache_layers(model: nn.Module, count: int, config: BlendConfig) -> list[Any]:
    """The layers of a blend cache: full, sliding or of a mixer as in transformers' cache for the model."""
    stock, kv_bits = _stock_layers(model), config.kv_bits
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
    """The layer of a blend cache that replaces a stock one; `full` makes one that keeps all tokens."""
    for extension in layer_extensions():
        if (layer := extension.make_layer(stock)) is not None:
            return layer
    if getattr(stock, "is_sliding", False):
        return BlendSlidingLayer(stock.sliding_window)
    return stock if isinstance(stock, getattr(cache_utils, "DummyLayer", ())) else full()


class KVLayers:
    """The layers of one cache, with its K and V.

    Attributes:
        all: one of each decoder layer.
        of_tokens: those that keep tokens; a layer of transformers that keeps nothing is not among them.
        memory: where K and V are with `kv_device_map`; None: all of them are on their devices.
    """

    def __init__(self, layers: Sequence[Any], memory: Any = None, count: int | None = None) -> None:
        """Collect layers. The first `count` store K and V (None: all), the others read those of an earlier layer."""
        self.all = list(layers)
        self.memory = memory
        self.of_tokens: list[Any] = [layer for layer in layers if hasattr(layer, "prefill_kind")]
        self._with_kv: list[Any] = []
        for layer in layers[:count]:
            if layer in self.of_tokens and isinstance(layer, CacheLayerMixin):
                self._with_kv.append(layer)

    @classmethod
    def empty(cls, model: nn.Module, count: int, config: BlendConfig) -> "KVLayers":
        """Layers without tokens."""
        layers = cache_layers(model, count, config)
        memory = None
        if config.kv_device_map is not None:
            memory = plugins.extension("offload.layer").offload(layers, config)  # replaces some of the layers
        return cls(layers, memory, len(_stock_layers(model)) or None)

    @property
    def are_partial(self) -> bool:
        """Whether some layer loaded a part of its stored chunks only."""
        return any(getattr(layer, "visible", None) is not None for layer in self.all)

    @property
    def have_states(self) -> bool:
        """Whether some layer keeps a state of all tokens, which is not cropped."""
        return any(hasattr(layer, "has_only_state") for layer in self.of_tokens)

    @property
    def length(self) -> int:
        """How many tokens have gone through all layers; between two layers of a forward, those before it."""
        return self._with_kv[-1].get_seq_length() if self._with_kv else 0

    @property
    def batch_size(self) -> int:
        """How many batch entries there are; 0 in empty layers."""
        return self._with_kv[0].batch_size if self._with_kv else 0

    def rollback_partial_forward(self) -> int:
        """Remove the tokens of a forward that ended between two layers; returns how many they are.

        Raises ConfigError, and changes nothing, where a layer has forgotten the tokens before them.
        """
        length = self.length
        tokens = self._with_kv[0].get_seq_length() - length if self._with_kv else 0
        if not tokens:
            return 0
        if not length:
            for layer in self.of_tokens:
                layer.reset()
            return tokens
        longer = [layer for layer in self.of_tokens if getattr(layer, "length", length + 1) > length]
        try:
            for layer in longer:
                layer.check_crop(-tokens)
        except ConfigError as error:
            raise ConfigError(
                f"a forward of {tokens} tokens behind {length} ended between two layers, and a window or state that "
                "has moved on cannot take them back. reset() the cache and pass the whole conversation."
            ) from error
        for layer in longer:
            layer.crop(-tokens)
        return tokens

    def snapshots(self) -> list[Any]:
        """What `restore` needs."""
        return [layer.snapshot() for layer in self.of_tokens]

    def restore(self, snapshots: Sequence[Any]) -> None:
        """Forget the tokens that came since `snapshots` were made."""
        for layer, snapshot in zip(self.of_tokens, snapshots, strict=True):
            layer.restore(snapshot)

    def spare(self, snapshots: Sequence[Any]) -> list[Any]:
        """Copies of the layers as they were when `snapshots` were made."""
        copies = copy.deepcopy(self)
        copies.restore(copy.deepcopy([*snapshots]))
        return copies.all
