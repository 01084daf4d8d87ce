# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The state of one blend cache: what it knows of its model, its layers with K and V, and the ids of its tokens.

The parts of a cache share it, and it refers to none of them.
"""

import copy
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import cache_utils
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from .. import plugins
from ..config import BlendConfig
from ..errors import ConfigError
from ..model.anatomy import (
    decoder_layers,
    extras_of,
    has_indexer,
    layer_extensions,
    per_model,
    placeholders_of,
    refuse_placeholders,
    stock_layers,
    text_config,
)
from ..model.calibrate import ensure_trusted, ignores_states, quantisation_noise
from ..model.identity import Author
from ..prefill.report import BlendReport
from ..prefill.request import PendingPrompt, Request
from ..prompt.pieces import UNKNOWN
from ..rotary.base import frequency_regime
from ..selectors.base import Selector
from ..store import ChunkStore
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
    layers: list[Any] = []
    for layer in every:
        if layer is None or type(layer) is DynamicLayer:  # of which no extension has to be asked
            layers.append(full())
        else:
            layers.append(_like(layer, indexed if has_indexer(layer) else full))
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
        with_kv: of these the ones that store K and V, and do not read those of an earlier layer.
        memory: where K and V are with `kv_device_map`; None: all of them are on their devices.
    """

    def __init__(self, layers: Sequence[Any], memory: Any = None, count: int | None = None) -> None:
        """Collect layers. The first `count` store K and V (None: all), the others read those of an earlier layer."""
        self.all = list(layers)
        self.memory = memory
        self.of_tokens: list[Any] = [layer for layer in layers if hasattr(layer, "prefill_kind")]
        self.with_kv: list[Any] = []
        for layer in layers[:count]:
            if layer in self.of_tokens and isinstance(layer, CacheLayerMixin):
                self.with_kv.append(layer)

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
    def length(self) -> int:
        """How many tokens have gone through all layers; between two layers of a forward, those before it."""
        return self.with_kv[-1].get_seq_length() if self.with_kv else 0

    @property
    def batch_size(self) -> int:
        """How many batch entries there are; 0 in empty layers."""
        return self.with_kv[0].batch_size if self.with_kv else 0

    def restore(self, snapshots: Sequence[Any]) -> None:
        """Forget the tokens that came since `snapshots` were made, one by `snapshot` of each layer of tokens."""
        for layer, snapshot in zip(self.of_tokens, snapshots, strict=True):
            layer.restore(snapshot)

    @torch.no_grad()
    def renew(self) -> None:
        """Replace all K, V and states by copies, of the present mode and without a graph of autograd."""
        for layer in self.of_tokens:
            layer.batch_repeat_interleave(1)

    def spare(self, snapshots: Sequence[Any]) -> list[Any]:
        """Copies of the layers as they were when `snapshots` were made."""
        copies = copy.deepcopy(self)
        copies.restore(copy.deepcopy([*snapshots]))
        return copies.all


IDS, MASK, POSITIONS = range(3)  # the first axis of what is recorded
MOST_PARTS = 256  # when there are more, they are joined


class CachedTokens:
    """Ids, padding and positions of the tokens in a cache.

    Attributes:
        length: how many columns were recorded.
        is_extended: some tokens came inside `self_extend`, at grouped positions.
    """

    def __init__(self) -> None:
        self.length = 0
        self.is_extended = False
        self._parts: list[Tensor] = []  # `[3, batch, columns]` each

    @classmethod
    def of(cls, ids: Tensor, length: int) -> "CachedTokens":
        """The first ids of `length` tokens, `[batch, known]`, at the positions 0, 1, 2 …; the others are unknown."""
        tokens = cls()
        known = torch.ones((3, *ids.shape), dtype=torch.int64)
        known[IDS] = ids
        known[POSITIONS] = torch.arange(ids.shape[1])
        tokens._parts = [known, known.new_full((3, len(ids), length - ids.shape[1]), UNKNOWN)]
        tokens._parts[1][MASK] = 1
        tokens.length = length
        return tokens

    def append(self, request: Request) -> None:
        """Record the tokens of a forward. Those that came before it unseen, in compiled code, are unknown."""
        ids, mask = request.ids, request.mask
        past, width = request.past, request.width
        if ids is None:
            states = request.arguments.get("inputs_embeds")
            batch = 1 if states is None else states.shape[0]
            ids = torch.full((batch, width), UNKNOWN, device=None if states is None else states.device)
        new = torch.ones((3, *ids.shape), dtype=torch.int64, device=ids.device)
        new[IDS] = ids
        if isinstance(mask, Tensor) and mask.dim() == 2:
            new[MASK] = mask[:, -width:]
        elif mask is not None and width > 1 and len(ids) > 1:
            new[MASK] = UNKNOWN  # there may be padding
        positions = request.arguments.get("position_ids")
        if positions is None:
            new[POSITIONS] = torch.arange(past, past + width, device=ids.device)
        else:
            axes = positions.reshape(-1, *positions.shape[-2:])
            is_one = (axes == axes[:1]).all(dim=0)
            new[POSITIONS] = torch.where(is_one, axes[0], UNKNOWN)
        if isinstance(mask, Tensor) and mask.dim() == 2:  # tokens that do not see all before them
            new[POSITIONS].masked_fill_(mask.cumsum(dim=1)[:, -width:] <= new[POSITIONS], UNKNOWN)

        # Behind those that are known
        self.crop(past)
        unseen = past - self.length
        if unseen:
            part = new.new_full((3, new.shape[1], unseen), UNKNOWN)
            part[MASK] = 1
            self._parts.append(part)
        self._parts.append(new)
        self.length = past + width
        if len(self._parts) > MOST_PARTS:
            self._join()

    def crop(self, tokens: int) -> None:
        """Forget all but the first `tokens` columns."""
        if tokens < self.length:
            self._parts = [self._join()[:, :, :tokens]] if tokens else []
            self.length = tokens
            self.is_extended = self.is_extended and tokens > 0

    def select_rows(self, indices: Any) -> None:
        """Keep these rows of the batch, in this order: `[kept]`, numbers or booleans."""
        if self._parts:
            rows = self._join()
            indices = torch.as_tensor(indices, device=rows.device)
            self._parts = [rows[:, indices]]

    def repeat_rows(self, repeats: int) -> None:
        """Repeat every row of the batch `repeats` times in a row."""
        if self._parts:
            self._parts = [self._join().repeat_interleave(repeats, dim=1)]

    def rows(self, placeholders: Container[int] = ()) -> list[list[int]]:
        """The ids of each row without padding, up to the first token that is unknown, a placeholder or out of order.

        A token is in order at the position of its number: 0, 1, 2 … Asks the device.
        """
        if not self._parts:
            return []
        ids, mask, positions = self._join().cpu()
        is_real = mask != 0
        is_known = (ids != UNKNOWN) & (positions == is_real.cumsum(dim=1) - 1)
        rows = []
        for row, real, known in zip(ids, is_real, is_known, strict=True):
            is_ours = (known | ~real).cumprod(dim=0).bool() & real
            in_order = row[is_ours].tolist()
            rows.append(list(takewhile(lambda token: token not in placeholders, in_order)))
        return rows

    def is_padded(self) -> bool:
        """Whether there is padding among the columns, or may be. Asks the device."""
        return bool(self._parts) and bool((self._join()[MASK] != 1).any())

    def _join(self) -> Tensor:
        """All that was recorded as one tensor, `[3, batch, columns]`."""
        if len(self._parts) > 1:
            batch = self._parts[-1].shape[1]
            device = self._parts[-1].device
            self._parts = [torch.cat([_repeated(part.to(device), batch) for part in self._parts], dim=2)]
        return self._parts[0]


def _repeated(part: Tensor, batch: int) -> Tensor:
    """Rows of a smaller batch for a larger one, as a forward of several rows behind one brings it."""
    return part.expand(-1, batch, -1) if part.shape[1] == 1 else part


class ModelInfo:
    """The layers of a model, how they rotate keys, and what it cannot do.

    Attributes:
        layers: the decoder layers.
        config: the text decoder's.
        placeholders: ids of tokens that stand for something else than text.
        styles: by layer, how its keys are rotated.
        extras: by layer, what it keeps beside K and V.
        quantisation_noise: see `BlendReport`.
        ignores_states: several tokens at a time are computed as if none were cached.
    """

    def __init__(
        self,
        model: nn.Module,
        chunk_prefix_ids: Sequence[int],
        make_cache: Callable[..., Any],
        allow_unverified: bool,
        folder: Path | None = None,
    ) -> None:
        """Read a model; at its first use test that it can be blended.

        Raises:
            UnsupportedModelError: it cannot be blended exactly, and `allow_unverified` is False.
            PromptError: `chunk_prefix_ids` holds a token that stands for something else than text.
        """
        self.layers = decoder_layers(model)
        self.config = text_config(model)
        self.placeholders = placeholders_of(model)
        refuse_placeholders(model, chunk_prefix_ids, "chunk_prefix_ids", self.placeholders)
        self.styles = ensure_trusted(model, make_cache, allow_unverified, folder)
        self.extras = extras_of(model, len(self.layers))
        self.ignores_states = ignores_states(model)
        self.quantisation_noise = quantisation_noise(model)

    def refuse_tokens(self, width: int, past: int) -> None:
        """Raise ConfigError if the model would compute `width` new tokens as if no `past` ones were cached."""
        if self.ignores_states and width > 1 and past:
            raise ConfigError(
                f"{width} tokens came behind the {past} that the cache holds, but the code of "
                f"{self.config.model_type} models takes the states of tokens before into account only "
                "where one token comes at a time. reset() the cache and pass the whole conversation in one prompt, "
                "without prefill_chunk_size."
            )


ASK_AGAIN = (
    "Pass the whole conversation by inputs_from_messages or inputs_from_text: what the cache cannot keep of it is "
    "computed again. Or reset() the cache."
)


@dataclass
class BlendState:
    """The settings, the K and V, and the prompts of one cache.

    Attributes:
        read_info: reads the model again.
        selector: chooses the tokens that are recomputed.
        recipe: where the settings come from, in words.
        chunk_prefix_ids: the ids before each chunk while it is computed alone.
        question_ids: those of the question that is run behind it then, of the last tokenizer; empty for none.
        report: what the last prefill cost.
        tokens: what is known of the tokens that are cached.
        pending: the prompts that the next forwards are expected to bring.
        author: the model as it was when it computed K and V; None: nothing is computed.
        regimes: the sets of rotary frequencies of the forwards that computed K and V, see `frequency_regime`.
        inexact_from: the first column whose K and V are not those of a full prefill; None: all are.
        healing: the second cache of `heal`, while it is not done.
        link_ends: where links of a chain may be cut out of the prompt, see `chains`.
        is_recording: assisted decoding has begun, whose steps bring several tokens.
        is_inference: some K and V may be of inference mode, outside of which they cannot be changed.
        has_graph: some K and V may carry a graph of autograd, with which they cannot be copied.
        is_cut: a forward failed after it may have advanced the state of a layer, which cannot be undone.
        check_ms: time in which the model was checked, until a report says it.
        loader: loads chunks in part, where the store does.
    """

    model: nn.Module
    store: ChunkStore
    config: BlendConfig
    info: ModelInfo
    read_info: Callable[[], ModelInfo]
    selector: Selector
    recipe: str
    chunk_prefix_ids: tuple[int, ...]
    kv: KVLayers
    report: BlendReport
    question_ids: tuple[int, ...] = ()
    tokens: CachedTokens = field(default_factory=CachedTokens)
    pending: PendingPrompt = field(default_factory=PendingPrompt)
    author: Author | None = None
    regimes: set[tuple[int, ...]] = field(default_factory=set)
    inexact_from: int | None = None
    healing: Any = None
    link_ends: tuple[int, ...] = ()
    is_recording: bool = False
    is_inference: bool = False
    has_graph: bool = False
    is_cut: bool = False
    check_ms: float = 0.0
    loader: Any = None

    def has_one_regime(self, *lengths: int) -> bool:
        """Whether one set of rotary frequencies is that of all K and V and of prompts of these lengths."""
        return len(self.regimes.union(frequency_regime(self.info.config, length) for length in lengths)) == 1

    def mark_inexact(self, column: int) -> None:
        """A prompt is blended: its first token without exact K and V is at `column`."""
        self.inexact_from = column if self.inexact_from is None else min(self.inexact_from, column)

    def inexact_tokens(self) -> int:
        """How many cached tokens are not those of a full prefill."""
        return 0 if self.inexact_from is None else self.kv.length - self.inexact_from

    def crop_tokens(self, length: int) -> None:
        """The cache was cropped to its first `length` columns."""
        self.tokens.crop(length)
        self.link_ends = tuple(end for end in self.link_ends if end <= length)
        if self.inexact_from is not None and length <= self.inexact_from:
            self.inexact_from = None
        if not length:
            self.regimes = set()
        is_ahead = self.healing is not None and self.healing.reached > length
        if self.inexact_from is None or is_ahead:
            self.healing = None

    def rollback_partial_forward(self) -> None:
        """Remove the tokens of a forward that ended between two layers.

        Raises ConfigError, and changes nothing, where a window or a state has advanced behind them.
        """
        if self.is_cut:
            raise ConfigError(
                "a forward ended between two layers, and a state that has moved on cannot be taken back. reset() the "
                "cache and pass the whole conversation."
            )
        kv = self.kv
        length = kv.length
        tokens = kv.with_kv[0].get_seq_length() - length if kv.with_kv else 0
        if not tokens:
            return
        if not length:
            for layer in kv.of_tokens:
                layer.reset()
        else:
            longer = [layer for layer in kv.of_tokens if getattr(layer, "length", length + 1) > length]
            try:
                for layer in longer:
                    layer.check_crop(-tokens)
            except ConfigError as error:
                raise ConfigError(
                    f"a forward of {tokens} tokens behind {length} ended between two layers, and a window or state "
                    "that has moved on cannot take them back. reset() the cache and pass the whole conversation."
                ) from error
            for layer in longer:
                layer.crop(-tokens)
        self.crop_tokens(length)

    def forget(self) -> None:
        """The cache was emptied."""
        self.crop_tokens(0)
        self.pending = PendingPrompt()
        self.author = None
        self.is_inference = False
        self.has_graph = False
        self.is_cut = False
        self.is_recording = False
