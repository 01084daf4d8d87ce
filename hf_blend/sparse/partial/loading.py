# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Loading the important blocks of chunks only, and decoding over these (IMPRESS, FAST 2025).

    store = ChunkStore.open("kv-store", partial=0.25)
    cache = BlendCache(model, store)
    model.generate(**cache.inputs(...), past_key_values=cache, max_new_tokens=64)
    print(cache.report.partial)

In each layer behind the last check layer, the keys of a few probe heads are loaded first. When the layer's attention
begins, the question's queries choose the important blocks. These are loaded, and the layer attends to them, to
recomputed tokens, and to tokens without stored KV. The other columns are hidden, in decoding too.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ...cache.blend_cache import BlendCache
from ...errors import ConfigError, UnsupportedModelError, suggest
from ...model.anatomy import LayerInfo, decoder_layers
from ...model.attention import AttentionCapture, AttentionFn, register_attention, with_override
from ...prefill.importance import report_importance
from ...prefill.plan import PlacedChunk, Plan
from ...prefill.realign import Realigner
from ...prefill.rows import Rows
from ...store import ChunkStore
from ..config import from_settings
from .blocked import BLOCK_TOKENS
from .itf import agreed, importance, probe_count
from .layers import PartialLayers
from .reader import keep_in_blocks
from .seen import attend_part, attend_step

FALLBACKS = ("whole", "values")


@dataclass(frozen=True)
class PartialConfig:
    """The settings of `ChunkStore.open(partial=…)`, which says what they mean."""

    share: float = 0.25  # of a prompt's blocks that a layer loads, above 0 up to 1
    alpha: float = 0.6  # probe heads agree above j^alpha, j the agreement of random sets
    block_tokens: int = BLOCK_TOKENS
    reorder: bool = True  # store important tokens together
    fallback: str = "whole"  # what a layer loads whose probe heads do not agree

    def __post_init__(self) -> None:
        numbers = (self.share, self.alpha)
        are_numbers = all(isinstance(number, int | float) and not isinstance(number, bool) for number in numbers)
        if not are_numbers or not 0 < self.share <= 1 or not 0 <= self.alpha < math.inf:
            raise ConfigError(
                f"partial has share={self.share!r} and alpha={self.alpha!r}, expected a share above 0 and up to 1, "
                "and an alpha from 0 on. A quarter of the blocks is partial=0.25."
            )
        if type(self.block_tokens) is not int or self.block_tokens < 1:
            raise ConfigError(
                f"partial has block_tokens={self.block_tokens!r}, expected a whole number from 1 on. Try 16."
            )
        if not isinstance(self.reorder, bool):
            raise ConfigError(f"partial has reorder={self.reorder!r}, expected True or False.")
        if self.fallback not in FALLBACKS:
            raise ConfigError(f"partial has fallback={self.fallback!r}. {suggest(str(self.fallback), FALLBACKS)}")

    @classmethod
    def of(cls, settings: float | Mapping[str, Any]) -> "PartialConfig":
        """Read the settings, or the share alone."""
        by_name = settings if isinstance(settings, Mapping) else {"share": settings}
        return from_settings(cls, by_name, "partial")

    def apply(self, store: ChunkStore) -> None:
        """Have a store keep chunks in blocks, and requests load some of them."""
        keep_in_blocks(store, self.block_tokens, self.reorder)
        store.part_loader = partial(PartialLoading, share=self.share, alpha=self.alpha, fallback=self.fallback)


@dataclass
class LoadReport:
    """What was loaded."""

    partial_layers: int = 0  # loaded in part; those of each prompt of a batch count
    fallback_layers: int = 0  # whose probe heads did not agree, which `fallback` says how to load
    whole_layers: int = 0  # loaded whole: something is chosen there, or they cannot be loaded in part
    loaded_bytes: int = 0  # of chunks in blocks, headers included
    all_bytes: int = 0  # that they hold
    unseen_share: float = 0.0  # of the chunks' tokens that a layer did not see, mean over all layers


class PartialLoading:
    """Loads a part of the chunks of one request or batch; each prompt of a batch chooses its own blocks.

    See `ChunkStore.open(partial=…)`. If the probe heads of a layer disagree, the fallback "whole" loads all of it, as
    in IMPRESS; "values" loads the keys of all heads, and for each head the values of its most important blocks.
    """

    def __init__(self, cache: BlendCache, share: float = 0.25, alpha: float = 0.6, fallback: str = "whole") -> None:
        self._cache, self._share, self._alpha, self._fallback = cache, share, alpha, fallback
        self._store: Any = cache.store
        self._layers: list[Any] = list(cache.layers)
        self.realigner: Any = None  # of the forward that runs
        self._index = -1
        self._chunks: list[PlacedChunk] = []
        self._fresh: Tensor | None = None
        self._counts, self._unseen, self._prompts = [0, 0], 0.0, 1
        self._readers: dict[int, Any] = {}
        self._sums: dict[int, tuple[PlacedChunk, Tensor]] = {}  # by chunk: what the probe heads looked at, over layers

    @property
    def report(self) -> LoadReport:
        """What was loaded so far."""
        (in_part, fallback), layers, readers = self._counts, len(self._layers) * self._prompts, self._readers.values()
        others = layers - in_part - fallback if readers else 0
        nbytes = sum(reader.loaded_bytes for reader in readers), sum(reader.block_bytes for reader in readers)
        return LoadReport(in_part, fallback, others, *nbytes, self._unseen / layers)

    def _probes(self, kv_heads: int) -> int:
        """How many heads of a layer are probed."""
        return probe_count(kv_heads)

    def begin(self, index: int, rows: Rows | None, plan: Plan) -> None:
        """Begin a layer behind the last check layer: find its chunks that can be loaded in part."""
        # a chunk at the beginning of its row stays whole; padding may be before it
        chunks = [chunk for chunk in plan.chunks if chunk.start > plan.real.shape[1] - plan.counts[chunk.row]]
        chunks = [chunk for chunk in chunks if isinstance(chunk.chunk.layers, PartialLayers)]
        self._readers |= {id(chunk.chunk.layers): chunk.chunk.layers.reader for chunk in chunks}  # type: ignore[attr-defined]
        self._prompts = max(1, len({chunk.row for chunk in chunks}))
        for chunk in chunks:
            _layers(chunk).forget(index)
        layer = self._layers[index]
        can = rows is not None and not getattr(layer, "is_sliding", True) and self._attention(index)
        few = [chunk for chunk in chunks if chunk.is_whole and not _layers(chunk).is_whole(index)]
        self._index, self._chunks = (index, few) if can and few else (-1, [])
        self._fresh = None if rows is None else rows.columns  # the last layer has fewer rows, but these are fresh

    def mismatches(self, layer: int, chunks: Sequence[PlacedChunk], *opened: Tensor) -> list[float]:
        """See `Realigner.mismatches`; of a chunk in blocks, the keys of one head are compared.

        Shapes: *opened `[batch, kv_heads, tokens, head_dim]`.
        """
        realigner = self.realigner
        if len(opened) == 1:  # of a mixer
            return realigner.mismatches(layer, chunks, *opened)
        errors, rotates_keys = list[float](), realigner.styles[layer].slot == 0
        for chunk in chunks:
            in_blocks = isinstance(chunk.chunk.layers, PartialLayers) and chunk.is_whole and rotates_keys
            if not in_blocks or _layers(chunk).is_whole(layer):
                errors += realigner.mismatches(layer, [chunk], *opened)
                continue
            keys = _layers(chunk).read(layer, 0, [0], range(_layers(chunk).reader.blocks)).to(opened[0].device)
            moved = realigner.rotated(layer, chunk, keys, torch.arange(chunk.tokens, device=keys.device))[0].float()
            fresh = opened[0][chunk.row, 0, chunk.columns].float()
            size = fresh.square().sum(dim=1)
            share = (fresh - moved).square().sum(dim=1) / size.maximum(size.mean()).clamp_min(1e-30)
            errors.append(float(share.sqrt().nan_to_num(nan=float("inf")).max()))
        return errors

    def write(self, index: int, chunks: Sequence[PlacedChunk], *opened: Tensor) -> None:
        """Write a layer of stored chunks; of chunks that are loaded in part, only the keys of the probe heads.

        Shapes: *opened `[batch, kv_heads, tokens, head_dim]`.
        """
        realigner = self.realigner
        if chunks and index == self._index:
            rotates_keys = realigner.styles[index].slot == 0  # not what is in the place of the values
            self._chunks = [chunk for chunk in self._chunks if rotates_keys and chunk in chunks]
            self._index = index if rotates_keys else -1
            partial_layer = _LayerPart(index, realigner, opened[0], opened[1])
            for chunk in self._chunks:
                for states in opened:
                    states[chunk.row, :, chunk.columns] = 0
                partial_layer.write(chunk, 0, range(self._probes(opened[0].shape[1])), _every(chunk))
            chunks = [chunk for chunk in chunks if chunk not in self._chunks]
        realigner.write(index, chunks, *opened)

    def capture(self, index: int, module: nn.Module, rows: Rows | None, past: int) -> AttentionCapture | None:
        """Replace a layer's attention: choose blocks, load them, attend. None if the layer is not loaded in part."""
        if rows is None or index != self._index:
            return None
        layer, chunks = self._layers[index], self._chunks

        def take(
            stock: AttentionFn, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
        ) -> Any:
            if key.shape != layer.keys.shape:
                raise UnsupportedModelError(
                    f"layer {index}, a {type(module).__name__}, attends to keys of shape {tuple(key.shape)}, but "
                    f"those of its cache are expected, {tuple(layer.keys.shape)}: it cannot be loaded in part. "
                    "Open the store without partial."
                )
            self._index, partial_layer = -1, _LayerPart(index, self.realigner, key, value, past)
            question = _Question(query, rows, kwargs.get("scaling") or query.shape[-1] ** -0.5)
            there = torch.ones(key.shape[0], key.shape[1], key.shape[2], dtype=torch.bool)
            for row in sorted({chunk.row for chunk in chunks}):
                mine = [chunk for chunk in chunks if chunk.row == row]
                self._load(partial_layer, question, self._choose(partial_layer, question, mine), mine, there)
            layer.visible = _compact(there, key.device)
            return attend_part(stock, module, query, key, value, mask, layer.visible, kwargs)

        return AttentionCapture(module, take)

    def begin_layer(self, index: int) -> None:
        """Allow new K and V in a layer that was loaded in part, if its attention can be replaced."""
        modules = self._attention(index)
        for module in modules:
            register_attention(module.config._attn_implementation)
        self._layers[index].is_guarded = bool(modules)

    def taken(self, index: int, keys: Tensor) -> Tensor:
        """Mark the keys of a layer, so that its attention runs over the loaded columns only."""
        return with_override(keys, partial(attend_step, self._layers[index]))

    def _attention(self, index: int) -> Sequence[nn.Module]:
        """The attention modules of a layer that can be replaced: some models look up no function for theirs."""
        return LayerInfo.of(decoder_layers(self._cache.model)[index]).attention

    def finish(self) -> None:
        """End the forward: report to the store how much attention the question gave each token."""
        chunks = sorted((chunk for chunk, _ in self._sums.values()), key=lambda chunk: (chunk.row, chunk.start))
        for row in sorted({chunk.row for chunk in chunks}):
            mine = [chunk for chunk in chunks if chunk.row == row]
            report_importance(self._store, mine, torch.cat([self._sums[id(chunk)][1] for chunk in mine]))
        self._sums.clear()

    def _choose(
        self, layer: "_LayerPart", question: "_Question", chunks: Sequence[PlacedChunk]
    ) -> list[list[int]] | None:
        """The blocks of each chunk of one prompt; None if the heads do not agree."""
        readers = [_layers(chunk).reader for chunk in chunks]
        count = math.ceil(self._share * sum(reader.blocks for reader in readers))
        scores = question.scores(layer, chunks, self._probes(layer.keys.shape[1]))
        for chunk, own in zip(chunks, scores.mean(dim=0).split([chunk.tokens for chunk in chunks]), strict=True):
            before = self._sums.get(id(chunk))
            self._sums[id(chunk)] = chunk, own if before is None else before[1] + own
        blocks = self._agreed(layer.index, _by_block(scores, chunks), count)
        return None if blocks is None else _by_chunk(blocks, chunks)

    def _agreed(self, index: int, scores: Tensor, count: int) -> list[int] | None:
        """As `agreed`, of the probe heads of a layer."""
        return agreed(scores, count, self._alpha)

    def _load(
        self,
        layer: "_LayerPart",
        question: "_Question",
        chosen: list[list[int]] | None,
        chunks: Sequence[PlacedChunk],
        there: Tensor,
    ) -> None:
        """Write the chosen blocks of a prompt; `there`, `[batch, kv_heads, keys]`, becomes False where none is."""
        row, heads, index = chunks[0].row, layer.keys.shape[1], layer.index
        self._counts[chosen is None] += 1
        fresh = torch.zeros(layer.keys.shape[2], dtype=torch.bool)
        fresh[(question.rows.columns if self._fresh is None else self._fresh)[row].cpu() + layer.past] = True
        first = self._probes(heads)
        each: list[list[list[int]]] = [chosen or [list(_every(chunk)) for chunk in chunks]] * heads
        if chosen is None and self._fallback == "values":
            for chunk in chunks:
                layer.write(chunk, 0, range(first, heads), _every(chunk), fresh)
            blocks = _by_block(question.scores(layer, chunks, heads), chunks)
            count = math.ceil(self._share * blocks.shape[1])
            each = [_by_chunk(sorted(shares.topk(count).indices.tolist()), chunks) for shares in blocks]
            first = heads
        for number, chunk in enumerate(chunks):
            self._expect(index, chunk, [head[number] for head in each], first, self._probes(heads))
            there[row, :, chunk.start + layer.past : chunk.columns.stop + layer.past] = False
            for group, some in _alike([head[number] for head in each]):
                there[row, group.start : group.stop, layer.columns(chunk, some)] = True
                layer.write(chunk, 1, group, some, fresh)
                layer.write(chunk, 0, range(max(first, group.start), group.stop), some, fresh)
        there[row] |= fresh
        self._unseen += float((~there[row]).sum()) / heads / sum(chunk.tokens for chunk in chunks)

    @staticmethod
    def _expect(index: int, chunk: PlacedChunk, blocks: list[list[int]], first: int, probes: int) -> None:
        """Start reading all that this layer needs, and the probe heads of the next one."""
        reader = _layers(chunk).reader
        for group, some in _alike(blocks):
            reader.expect(index, 1, group, some)
            reader.expect(index, 0, range(max(first, group.start), group.stop), some)
        if index + 1 < len(reader.layer_table):
            reader.expect(index + 1, 0, range(min(first, probes)), range(reader.blocks))


@dataclass(frozen=True)
class _LayerPart:
    """K and V of a layer, `[batch, kv_heads, columns, head_dim]`, to which loaded blocks are written."""

    index: int
    realigner: Realigner
    keys: Tensor
    values: Tensor
    past: int = 0  # columns before those of the prompt

    def columns(self, chunk: PlacedChunk, blocks: Sequence[int]) -> Tensor:
        """The columns of the tokens of some blocks, in the order in which `PartialLayers.read` gives them."""
        reader = _layers(chunk).reader
        is_all = len(blocks) == reader.blocks
        return (torch.arange(chunk.tokens) if is_all else reader.tokens_of(blocks)) + chunk.start + self.past

    def write(
        self, chunk: PlacedChunk, which: int, heads: range, blocks: Sequence[int], fresh: Tensor | None = None
    ) -> None:
        """Write some blocks of K (0) or V (1) of neighbouring heads, but not over `fresh` columns."""
        if not len(heads) or not len(blocks):
            return
        states, columns = (self.values if which else self.keys), self.columns(chunk, blocks)
        stale = slice(None) if fresh is None else (~fresh[columns]).nonzero()[:, 0]
        loaded = _layers(chunk).read(self.index, which, heads, blocks).to(states.device)
        if which == 0:
            tokens = (columns - chunk.start - self.past).to(states.device)
            loaded = self.realigner.rotated(self.index, chunk, loaded, tokens)
        into = states[chunk.row, heads.start : heads.stop]
        into.index_copy_(1, columns[stale].to(states.device), loaded[:, stale])


@dataclass(frozen=True)
class _Question:
    """The queries of a layer, `[batch, heads, rows, head_dim]`, and the rows that they are of."""

    query: Tensor
    rows: Rows
    scaling: float

    def scores(self, layer: _LayerPart, chunks: Sequence[PlacedChunk], heads: int) -> Tensor:
        """The attention that the question of one prompt gives, `[heads, tokens of the chunks]`, on the CPU."""
        query, key, rows = self.query[chunks[0].row], layer.keys[chunks[0].row], self.rows
        columns = torch.cat([torch.arange(chunk.columns.start, chunk.columns.stop) for chunk in chunks]).to(key.device)
        asks = rows.columns[chunks[0].row] >= chunks[-1].columns.stop
        asks = asks if rows.filler is None else asks & ~rows.filler[chunks[0].row]
        index = asks.nonzero()[:, 0].to(query.device)
        group = query.shape[0] // key.shape[0]
        return importance(query[: heads * group, index], key[:heads, columns + layer.past], self.scaling).cpu()


def _every(chunk: PlacedChunk) -> range:
    """All blocks of a chunk."""
    return range(_layers(chunk).reader.blocks)


def _by_block(scores: Tensor, chunks: Sequence[PlacedChunk]) -> Tensor:
    """`[heads, blocks of the chunks]`: the sums of `[heads, tokens of the chunks]` over the tokens of each block."""
    parts = []
    for chunk, own in zip(chunks, scores.split([chunk.tokens for chunk in chunks], dim=1), strict=True):
        reader = _layers(chunk).reader
        padded = nn.functional.pad(own[:, reader.order], (0, -chunk.tokens % reader.block_tokens))
        parts.append(padded.unflatten(1, (reader.blocks, reader.block_tokens)).sum(dim=2))
    return torch.cat(parts, dim=1)


def _by_chunk(blocks: Sequence[int], chunks: Sequence[PlacedChunk]) -> list[list[int]]:
    """Blocks of all chunks together as blocks of each."""
    by_chunk, start = [], 0
    for chunk in chunks:
        stop = start + _layers(chunk).reader.blocks
        by_chunk.append([block - start for block in blocks if start <= block < stop])
        start = stop
    return by_chunk


def _alike(blocks: list[list[int]]) -> list[tuple[range, list[int]]]:
    """Group neighbouring heads with the same blocks."""
    cuts = [0, *(head for head in range(1, len(blocks)) if blocks[head] != blocks[head - 1]), len(blocks)]
    return [(range(start, stop), blocks[start]) for start, stop in pairwise(cuts)]


def _compact(there: Tensor, device: torch.device) -> Tensor | None:
    """Loaded columns as `BlendLayer.visible` has them: indices if all heads of one prompt agree, else a mask."""
    if bool(there.all()):
        return None
    alike = bool((there == there[:, :1]).all())
    if alike and there.shape[0] == 1:
        return there[0, 0].nonzero()[:, 0].to(device)
    return (there[:, :1] if alike else there).to(device)


def _layers(chunk: PlacedChunk) -> PartialLayers:
    """A chunk's layers, which can be loaded in part."""
    return chunk.chunk.layers  # type: ignore[return-value]
