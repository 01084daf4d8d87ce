# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Loading the important blocks of chunks only, and decoding over these (IMPRESS, FAST 2025).

    store = ChunkStore.open("kv-store", partial=0.25)
    cache = BlendCache(model, store)
    model.generate(**cache.inputs_from_messages(...), **cache.keyword, max_new_tokens=64)
    print(cache.report.partial)

In each layer behind the check layer, the keys of a few probe heads are loaded first. When the layer's attention
begins, the question's queries choose the important blocks. These are loaded, and the layer attends to them, to
recomputed tokens, and to tokens without stored KV. The other columns are hidden, in decoding too. If the probe heads
of a layer disagree, all of it is loaded.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...cache.state import BlendState
from ...errors import ConfigError, UnsupportedModelError
from ...model.anatomy import LayerInfo, decoder_layers
from ...model.attention import AttentionCapture, AttentionFn, register_attention, with_override
from ...prefill.plan import PlacedChunk, Plan
from ...prefill.realign import Realigner
from ...prefill.rows import Rows
from ...store import ChunkStore
from ..config import from_settings
from .blocked import BLOCK_TOKENS, BlockReader
from .itf import agreed, importance, probe_count
from .layers import PartialLayers
from .reader import keep_in_blocks
from .seen import attend_part, attend_step


@dataclass(frozen=True)
class PartialConfig:
    """The settings of `ChunkStore.open(partial=…)`, which says what they mean."""

    share: float = 0.25  # of a prompt's blocks that a layer loads, above 0 up to 1
    alpha: float = 0.6  # probe heads agree above j^alpha, j the agreement of random sets
    block_tokens: int = BLOCK_TOKENS

    def __post_init__(self) -> None:
        are_numbers = all(type(number) in (int, float) for number in (self.share, self.alpha))
        if not are_numbers or not 0 < self.share <= 1 or not 0 <= self.alpha < math.inf:
            raise ConfigError(
                f"partial has share={self.share!r} and alpha={self.alpha!r}, expected a share above 0 and up to 1, "
                "and an alpha from 0 on. A quarter of the blocks is partial=0.25."
            )
        if type(self.block_tokens) is not int or self.block_tokens < 1:
            raise ConfigError(
                f"partial has block_tokens={self.block_tokens!r}, expected a whole number from 1 on. Try 16."
            )

    @classmethod
    def of(cls, settings: float | Mapping[str, Any]) -> "PartialConfig":
        """Read the settings, or the share alone."""
        by_name = settings if isinstance(settings, Mapping) else {"share": settings}
        return from_settings(cls, by_name, "partial")

    def apply(self, store: ChunkStore) -> None:
        """Have a store keep chunks in blocks, and requests load some of them."""
        keep_in_blocks(store, self.block_tokens)
        store.part_loader = partial(PartialLoading, share=self.share, alpha=self.alpha)


class PartialLoading:
    """Loads a part of the chunks of one request; of a batch all is loaded."""

    def __init__(self, cache: BlendState, share: float = 0.25, alpha: float = 0.6) -> None:
        self._cache = cache
        self._share = share
        self._alpha = alpha
        self._store: Any = cache.store
        self._layers: list[Any] = list(cache.kv.all)
        self.realigner: Any = None  # of the forward that runs
        # Of the layer that runs, if it can be loaded in part
        self._index = -1
        self._chunks: list[PlacedChunk] = []
        self._fresh: Tensor | None = None  # columns that are computed, `[batch, rows]`
        self._prompt_tokens = 0  # columns of the prompt; an assistant's draft may be behind them
        # Of all layers
        self._partial_layers = 0
        self._fallback_layers = 0
        self._unseen = 0.0
        self._readers: set[BlockReader] = set()

    @property
    def report(self) -> dict[str, float]:
        """What was loaded so far.

        Layers loaded in part; whole because their probe heads did not agree; and whole because something is chosen
        there, or they cannot be loaded in part. Bytes of chunks in blocks, headers included, and all that they hold.
        Share of the chunks' tokens that a layer did not see, the mean over all layers.
        """
        layers = len(self._layers)
        return {
            "partial_layers": self._partial_layers,
            "fallback_layers": self._fallback_layers,
            "whole_layers": layers - self._partial_layers - self._fallback_layers if self._readers else 0,
            "loaded_bytes": sum(reader.loaded_bytes for reader in self._readers),
            "all_bytes": sum(reader.block_bytes for reader in self._readers),
            "unseen_share": self._unseen / layers,
        }

    def _probes(self, kv_heads: int) -> int:
        """How many heads of a layer are probed."""
        return probe_count(kv_heads)

    def begin(self, index: int, rows: Rows | None, plan: Plan) -> None:
        """Begin a layer behind the check layer: find its chunks that can be loaded in part."""
        in_blocks = []
        for placed in plan.chunks:
            first_column = plan.real.shape[1] - plan.counts[placed.row]  # padding may be before it
            # What a prompt begins with stays whole
            if placed.start > first_column and isinstance(placed.chunk.layers, PartialLayers):
                in_blocks.append(placed)
                self._readers.add(placed.chunk.layers.reader)
                placed.chunk.layers.forget(index)
        self._index = -1
        self._chunks = []
        self._prompt_tokens = plan.real.shape[1] - max(plan.drafted, default=0)
        self._fresh = None if rows is None else rows.columns  # the last layer has fewer rows, but these are fresh
        is_cut = rows is not None and len(plan.counts) == 1 and not getattr(self._layers[index], "is_sliding", True)
        if is_cut and self._attention(index):
            self._chunks = [placed for placed in in_blocks if placed.is_whole and not _layers(placed).is_whole(index)]
        if self._chunks:
            self._index = index

    def mismatches(self, layer: int, chunks: Sequence[PlacedChunk], *opened: Tensor) -> list[float]:
        """See `Realigner.mismatches`; of a chunk in blocks, the keys of one head are compared.

        Shapes: *opened `[batch, kv_heads, tokens, head_dim]`.
        """
        rotates_keys = len(opened) > 1 and self.realigner.styles[layer].slot == 0  # one: of a mixer
        errors: list[float] = []
        for placed in chunks:
            in_blocks = isinstance(placed.chunk.layers, PartialLayers) and placed.is_whole and rotates_keys
            if in_blocks and not _layers(placed).is_whole(layer):
                errors.append(self._mismatch(layer, placed, opened[0]))
            else:
                errors += self.realigner.mismatches(layer, [placed], *opened)
        return errors

    def _mismatch(self, layer: int, placed: PlacedChunk, keys: Tensor) -> float:
        """How far the stored keys of the first head are from the computed ones, as a share of their size."""
        stored = _layers(placed).read(layer, 0, [0], _every(placed)).to(keys.device)
        tokens = torch.arange(placed.tokens, device=keys.device)
        moved = self.realigner.rotated(layer, placed, stored, tokens)[0].float()
        fresh = keys[placed.row, 0, placed.columns].float()
        size = fresh.square().sum(dim=1)
        share = (fresh - moved).square().sum(dim=1) / size.maximum(size.mean()).clamp_min(1e-30)
        return float(share.sqrt().nan_to_num(nan=float("inf")).max())

    def write(self, index: int, chunks: Sequence[PlacedChunk], *opened: Tensor) -> None:
        """Write a layer of stored chunks; of chunks that are loaded in part, only the keys of the probe heads.

        Shapes: *opened `[batch, kv_heads, tokens, head_dim]`.
        """
        if chunks and index == self._index:
            if self.realigner.styles[index].slot != 0:  # what is moved stands in the values
                self._index = -1
                self._chunks = []
            self._chunks = [placed for placed in self._chunks if placed in chunks]
            chunks = [placed for placed in chunks if placed not in self._chunks]
            states = _LayerStates(index, self.realigner, opened[0], opened[1])
            probes = range(self._probes(opened[0].shape[1]))
            for placed in self._chunks:
                for tensor in opened:
                    tensor[placed.row, :, placed.columns] = 0
                states.write(placed, 0, probes, _every(placed))
        self.realigner.write(index, chunks, *opened)

    def capture(self, index: int, module: nn.Module, rows: Rows | None, past: int) -> AttentionCapture | None:
        """Replace a layer's attention: choose blocks, load them, attend. None if the layer is not loaded in part."""
        if rows is None or index != self._index:
            return None
        layer = self._layers[index]
        chunks = self._chunks

        def take(
            stock: AttentionFn, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
        ) -> Any:
            if key.shape != layer.keys.shape:
                raise UnsupportedModelError(
                    f"layer {index}, a {type(module).__name__}, attends to keys of shape {tuple(key.shape)}, but "
                    f"those of its cache are expected, {tuple(layer.keys.shape)}: it cannot be loaded in part. "
                    "Open the store without partial."
                )
            self._index = -1
            states = _LayerStates(index, self.realigner, key, value, past)
            scaling = kwargs.get("scaling") or query.shape[-1] ** -0.5
            question = _Question(query, rows, self._prompt_tokens, scaling)
            loaded = torch.ones(key.shape[2], dtype=torch.bool)
            self._load(states, question, chunks, loaded)
            if not loaded.all():
                layer.visible = loaded.nonzero()[:, 0].to(key.device)
                layer.visible_tokens = len(loaded)
            return attend_part(stock, module, query, key, value, mask, layer.visible, kwargs)

        return AttentionCapture(module, take)

    def begin_layer(self, index: int) -> None:
        """Allow new K and V in a layer that was loaded in part, if its attention can be replaced."""
        modules = self._attention(index)
        for module in modules:
            register_attention(module.config._attn_implementation)
        self._layers[index].is_guarded = bool(modules)

    def mark_keys(self, index: int, keys: Tensor) -> Tensor:
        """Mark the keys of a layer, so that its attention runs over the loaded columns only."""
        return with_override(keys, partial(attend_step, self._layers[index]))

    def _attention(self, index: int) -> Sequence[nn.Module]:
        """The attention modules of a layer that can be replaced: some models look up no function for theirs."""
        return LayerInfo.of(decoder_layers(self._cache.model)[index]).attention

    def _choose(
        self, states: "_LayerStates", question: "_Question", chunks: Sequence[PlacedChunk]
    ) -> list[list[int]] | None:
        """The blocks of each chunk; None if the heads do not agree."""
        scores = question.scores(states, chunks, self._probes(states.keys.shape[1]))
        count = math.ceil(self._share * sum(len(_every(placed)) for placed in chunks))
        blocks = self._agreed(states.index, _by_block(scores, chunks), count)
        return None if blocks is None else _by_chunk(blocks, chunks)

    def _agreed(self, index: int, scores: Tensor, count: int) -> list[int] | None:
        """As `agreed`, of the probe heads of a layer."""
        return agreed(scores, count, self._alpha)

    def _load(
        self, states: "_LayerStates", question: "_Question", chunks: Sequence[PlacedChunk], loaded: Tensor
    ) -> None:
        """Load the chosen blocks; `loaded`, `[keys]`, becomes False where nothing was."""
        chosen = self._choose(states, question, chunks)
        if chosen is None:
            self._fallback_layers += 1
            chosen = [list(_every(placed)) for placed in chunks]
        else:
            self._partial_layers += 1
        fresh = torch.zeros_like(loaded)
        if self._fresh is not None:
            fresh[self._fresh[0].cpu() + states.past] = True
        heads = states.keys.shape[1]
        for placed, blocks in zip(chunks, chosen, strict=True):
            loaded[placed.columns.start + states.past : placed.columns.stop + states.past] = False
            loaded[states.columns(placed, blocks)] = True
            states.write(placed, 1, range(heads), blocks, fresh)
            states.write(placed, 0, range(self._probes(heads), heads), blocks, fresh)
        loaded |= fresh
        self._unseen += float((~loaded).sum()) / sum(placed.tokens for placed in chunks)


@dataclass(frozen=True)
class _LayerStates:
    """K and V of a layer, `[1, kv_heads, columns, head_dim]`, to which loaded blocks are written."""

    index: int
    realigner: Realigner
    keys: Tensor
    values: Tensor
    past: int = 0  # columns before those of the prompt

    def columns(self, placed: PlacedChunk, blocks: Sequence[int]) -> Tensor:
        """The columns of the tokens of some blocks, in the order in which `PartialLayers.read` gives them."""
        return _tokens(placed, blocks) + placed.start + self.past

    def write(
        self, placed: PlacedChunk, which: int, heads: range, blocks: Sequence[int], fresh: Tensor | None = None
    ) -> None:
        """Write some blocks of K (0) or V (1) of neighbouring heads, but not over `fresh` columns."""
        if not len(heads) or not len(blocks):
            return
        states = self.values if which else self.keys
        loaded = _layers(placed).read(self.index, which, heads, blocks).to(states.device)
        if which == 0:
            tokens = _tokens(placed, blocks).to(states.device)
            loaded = self.realigner.rotated(self.index, placed, loaded, tokens)
        columns = self.columns(placed, blocks)
        if fresh is not None:
            stale = (~fresh[columns]).nonzero()[:, 0]
            columns = columns[stale]
            loaded = loaded[:, stale.to(loaded.device)]
        of_heads = states[0, heads.start : heads.stop]
        of_heads.index_copy_(1, columns.to(states.device), loaded)


@dataclass(frozen=True)
class _Question:
    """The queries of a layer, `[1, heads, rows, head_dim]`, and the rows that they are of."""

    query: Tensor
    rows: Rows
    prompt_tokens: int  # columns of the prompt, without a draft behind it
    scaling: float

    def scores(self, states: _LayerStates, chunks: Sequence[PlacedChunk], heads: int) -> Tensor:
        """The attention that the question gives, `[heads, tokens of the chunks]`, on the CPU."""
        query = self.query[0]
        keys = states.keys[0]
        # Rows behind the last chunk ask, but those of a draft
        rows = self.rows.columns[0]
        is_asking = (rows >= chunks[-1].columns.stop) & (rows < self.prompt_tokens)
        asking = is_asking.nonzero()[:, 0].to(query.device)
        columns = torch.cat([torch.arange(placed.columns.start, placed.columns.stop) for placed in chunks])
        columns = columns.to(keys.device) + states.past
        group = query.shape[0] // keys.shape[0]
        return importance(query[: heads * group, asking], keys[:heads, columns], self.scaling).cpu()


def _layers(placed: PlacedChunk) -> PartialLayers:
    """A chunk's layers, which can be loaded in part."""
    return placed.chunk.layers  # type: ignore[return-value]


def _every(placed: PlacedChunk) -> range:
    """All blocks of a chunk."""
    return range(_layers(placed).reader.blocks)


def _tokens(placed: PlacedChunk, blocks: Sequence[int]) -> Tensor:
    """The tokens of some blocks of a chunk, in the order in which `PartialLayers.read` gives them."""
    if len(blocks) == len(_every(placed)):
        return torch.arange(placed.tokens)
    return _layers(placed).reader.tokens_of(blocks)


def _by_block(scores: Tensor, chunks: Sequence[PlacedChunk]) -> Tensor:
    """`[heads, blocks of the chunks]`: the sums of `[heads, tokens of the chunks]` over the tokens of each block."""
    parts = []
    for placed, of_chunk in zip(chunks, scores.split([placed.tokens for placed in chunks], dim=1), strict=True):
        reader = _layers(placed).reader
        padded = nn.functional.pad(of_chunk[:, reader.order], (0, -placed.tokens % reader.block_tokens))
        parts.append(padded.unflatten(1, (reader.blocks, reader.block_tokens)).sum(dim=2))
    return torch.cat(parts, dim=1)


def _by_chunk(blocks: Sequence[int], chunks: Sequence[PlacedChunk]) -> list[list[int]]:
    """Blocks of all chunks together as blocks of each."""
    by_chunk = []
    start = 0
    for placed in chunks:
        stop = start + len(_every(placed))
        by_chunk.append([block - start for block in blocks if start <= block < stop])
        start = stop
    return by_chunk
