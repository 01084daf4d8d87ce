# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Loading chunks in part while they are blended, and decoding over what was loaded.

    store = ChunkStore.open("kv-store", partial=0.25)
    cache = BlendCache(model, store)
    model.generate(**cache.inputs(...), past_key_values=cache, max_new_tokens=64)
    print(cache.report.partial)

`partial_loading` does the same for one cache over a `PartialStore`, with other settings, while its block runs.

In each layer behind the last check layer the keys of the probe heads come first; when the layer's attention begins,
the question's queries say which blocks are important; those are loaded and laid, and attention runs over them, over
what is recomputed, and over all that has no stored KV. The other columns are seen by nobody, in decoding either.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ...cache.blend_cache import BlendCache
from ...cache.static_layer import refuse_static
from ...errors import ConfigError
from ...model.attention import AttentionCapture, AttentionFn
from ...prefill.observing import report_importance
from ...prefill.plan import PlacedChunk, Plan
from ...prefill.realign import Realigner
from ...prefill.rows import Rows
from .itf import agreed, importance, probe_count
from .seen import PartDecoding, attend_part
from .store import PartialLayers, PartialStore

KV = tuple[Tensor, Tensor]
Watch = Callable[[int, Tensor, int], None]
FALLBACKS = ("whole", "values")


@dataclass
class LoadReport:
    """What was loaded.

    Attributes:
        partial_layers: layers that were loaded in part; those of each prompt of a batch count.
        fallback_layers: layers whose probe heads did not agree, which `fallback` says how to load.
        whole_layers: layers loaded whole because something is chosen there, or they cannot be loaded in part.
        loaded_bytes: of chunks in blocks, headers included.
        all_bytes: what they hold.
        unseen_share: share of the chunks' tokens that a layer did not see, mean over all layers.
    """

    partial_layers: int = 0
    fallback_layers: int = 0
    whole_layers: int = 0
    loaded_bytes: int = 0
    all_bytes: int = 0
    unseen_share: float = 0.0


@contextmanager
def partial_loading(
    model: nn.Module,
    cache: BlendCache,
    *,
    share: float = 0.25,
    alpha: float = 0.6,
    by_question: bool = True,
    fallback: str = "whole",
    probes: int | None = None,
    watch: Watch | None = None,
) -> Iterator["PartialLoading"]:
    """Load only the important blocks of stored chunks while the block runs.

    Args:
        model: the model that the cache is for.
        cache: of one request, over a `PartialStore`, empty.
        share: of the blocks that is loaded.
        alpha: exponent of the threshold above which probe heads agree; larger accepts more, 0 nothing.
        by_question: False loads the blocks that stand first in the store's order, whatever is asked: the static way.
        fallback: see `PartialLoading`.
        probes: how many KV heads of a layer say which blocks are important; None is three of thirty-two, two at least.
        watch: is given each layer's number, the scores of its probe heads, `[probes, blocks]`, and how many blocks
            are to be loaded.

    Yields:
        The loading, with its `report`.

    Raises:
        ConfigError: the cache is not over a `PartialStore`, or a number is out of range.
    """
    if not isinstance(cache.store, PartialStore):
        raise ConfigError(
            f"the cache is over a {type(cache.store).__name__}, expected a PartialStore, which alone loads chunks in "
            "part. Make the cache with one."
        )
    if not 0 < share <= 1 or alpha < 0:
        raise ConfigError(f"share is {share} and alpha {alpha}, wanted above 0 and up to 1, and 0 or more.")
    if probes is not None and (type(probes) is not int or probes < 1):
        raise ConfigError(f"probes is {probes!r}, expected a whole number from 1 on. Try 2.")
    refuse_static(cache.config.max_tokens, "partial_loading")
    loading = PartialLoading(cache, share, alpha, by_question, fallback, probes, watch)
    before, cache.store.partial = cache.store.partial, loading
    try:
        yield loading
    finally:
        cache.store.partial = before
        loading.close()


class PartialLoading(PartDecoding):
    """One request, or one batch, that loads in part. Each prompt of a batch chooses for itself.

    Args:
        cache: of the request.
        share: of the blocks.
        alpha: exponent of the threshold.
        by_question: whether the question decides.
        fallback: what is loaded of a layer whose probe heads disagree: "whole", all of it as in IMPRESS; or "values",
            the keys of all heads, and for each head the values of the blocks that it looks at itself.
        probes: how many heads are probed; None is as in the paper.
        watch: as in `partial_loading`.
    """

    listens = True  # see `WholeChunks`

    def __init__(
        self,
        cache: BlendCache,
        share: float,
        alpha: float,
        by_question: bool = True,
        fallback: str = "whole",
        probes: int | None = None,
        watch: Watch | None = None,
    ) -> None:
        super().__init__(cache)
        self._given_probes, self._watch = probes, watch
        self._share, self._alpha, self._by_question, self._fallback = share, alpha, by_question, fallback
        self._store: Any = cache.store
        self._index = -1
        self._slots: list[PlacedChunk] = []
        self._fresh: Tensor | None = None
        self._counts, self._unseen, self._prompts = [0, 0], 0.0, 1
        self._readers: dict[int, Any] = {}
        self._sums: dict[int, tuple[PlacedChunk, Tensor]] = {}  # by slot: what the probe heads looked at, over layers

    @property
    def report(self) -> LoadReport:
        """What was loaded so far."""
        partial, fallback = self._counts
        layers = len(self._cache.layers) * self._prompts
        return LoadReport(
            partial,
            fallback,
            layers - partial - fallback if self._readers else 0,
            sum(one.loaded_bytes for one in self._readers.values()),
            sum(one.nbytes for one in self._readers.values()),
            self._unseen / layers,
        )

    def _probes(self, kv_heads: int) -> int:
        """How many heads of a layer are probed."""
        return probe_count(kv_heads) if self._given_probes is None else min(self._given_probes, kv_heads)

    def begin(self, index: int, rows: Rows | None, plan: Plan) -> None:
        """A layer begins behind the last check layer: find out what of it can be loaded in part."""
        slots = [slot for slot in plan.chunks if slot.start and isinstance(slot.chunk.layers, PartialLayers)]
        self._readers |= {id(slot.chunk.layers): slot.chunk.layers.reader for slot in slots}  # type: ignore[attr-defined]
        self._prompts = max(1, len({slot.row for slot in slots}))
        for slot in slots:
            _layers(slot).forget(index)
        layer = self._cache.layers[index]
        can = rows is not None and not getattr(layer, "is_sliding", True)
        few = [one for one in slots if one.is_whole and not _layers(one).is_whole(index)]
        self._index, self._slots = (index, few) if can and few else (-1, [])
        self._fresh = None if rows is None else rows.columns  # the last layer has fewer rows, but these are fresh

    def mismatches(self, slots: Sequence[PlacedChunk], realigner: Realigner, opened: Sequence[Tensor]) -> list[float]:
        """As `Realigner.mismatches` of layer 0, by one head's keys where a chunk is in blocks: they tell tokens apart.

        Shapes: opened `[batch, kv_heads, tokens, head_dim]`.
        """
        if len(opened) == 1:  # of a mixer
            return realigner.mismatches(0, slots, *opened)
        found = []
        for slot in slots:
            in_blocks = isinstance(slot.chunk.layers, PartialLayers) and slot.is_whole and realigner.rotates_keys(0)
            if not in_blocks or _layers(slot).is_whole(0):
                found += realigner.mismatches(0, [slot], *opened)
                continue
            keys = _layers(slot).part(0, 0, [0], range(_layers(slot).reader.blocks)).to(opened[0].device)
            turned = realigner.rotated(0, slot, keys, torch.arange(slot.tokens, device=keys.device))[0].float()
            fresh = opened[0][slot.row, 0, slot.columns].float()
            size = fresh.square().sum(dim=1)
            share = (fresh - turned).square().sum(dim=1) / size.maximum(size.mean()).clamp_min(1e-30)
            found.append(float(share.sqrt().nan_to_num(nan=float("inf")).max()))
        return found

    def write(self, index: int, chunks: Sequence[PlacedChunk], realigner: Realigner, opened: KV) -> None:
        """Write a layer of stored chunks; where it is loaded in part, probe heads of those in blocks only."""
        if chunks and index == self._index:
            self._slots = [slot for slot in self._slots if slot in chunks] if realigner.rotates_keys(index) else []
            self._index = index if realigner.rotates_keys(index) else -1
            for slot in self._slots:
                for states in opened:
                    states[slot.row, :, slot.columns] = 0
                if self._by_question:
                    self._lay_keys(index, slot, range(self._probes(opened[0].shape[1])), realigner, opened[0])
            chunks = [one for one in chunks if one not in self._slots]
        realigner.write(index, chunks, *opened)

    def capture(
        self, index: int, module: nn.Module, rows: Rows | None, realigner: Realigner, past: int
    ) -> AttentionCapture | None:
        """Takes a layer's attention: chooses, loads, lays, attends. None where the layer is not loaded in part."""
        if rows is None or index != self._index:
            return None
        layer, slots = self._layers[index], self._slots

        def take(
            stock: AttentionFn, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **given: Any
        ) -> Any:
            self._index = -1
            scaling = given.get("scaling") or query.shape[-1] ** -0.5
            there = torch.ones(key.shape[0], key.shape[1], key.shape[2], dtype=torch.bool)
            for row in sorted({slot.row for slot in slots}):
                mine = [slot for slot in slots if slot.row == row]
                chosen = self._choose(index, query[row], key[row], rows, mine, scaling, past)
                self._load(index, chosen, mine, rows, realigner, (query, key, value), past, scaling, there)
            layer.visible = _compact(there, key.device)
            return attend_part(stock, module, query, key, value, mask, layer.visible, given)

        return AttentionCapture(module, take)

    def finish(self) -> None:
        """The forward is over: report to the store what the question looked at."""
        slots = sorted((slot for slot, _ in self._sums.values()), key=lambda slot: (slot.row, slot.start))
        for row in sorted({slot.row for slot in slots}):
            mine = [slot for slot in slots if slot.row == row]
            report_importance(self._store, mine, torch.cat([self._sums[id(slot)][1] for slot in mine]))
        self._sums.clear()

    def _choose(
        self,
        index: int,
        query: Tensor,
        key: Tensor,
        rows: Rows,
        slots: Sequence[PlacedChunk],
        scaling: float,
        past: int,
    ) -> list[list[int]] | None:
        """The blocks of each slot of one prompt; None if the heads do not agree."""
        readers = [_layers(slot).reader for slot in slots]
        count = math.ceil(self._share * sum(reader.blocks for reader in readers))
        if not self._by_question:
            return [list(range(math.ceil(self._share * reader.blocks))) for reader in readers]
        scores = self._scores(query, key, rows, slots, scaling, past, self._probes(key.shape[0]))
        for slot, own in zip(slots, scores.mean(dim=0).split([slot.tokens for slot in slots]), strict=True):
            before = self._sums.get(id(slot))
            self._sums[id(slot)] = slot, own if before is None else before[1] + own
        by_block = _by_block(scores, slots)
        if self._watch is not None:
            self._watch(index, by_block, count)
        found = agreed(by_block, count, self._alpha)
        return None if found is None else _by_slot(found, slots)

    def _scores(
        self,
        query: Tensor,
        key: Tensor,
        rows: Rows,
        slots: Sequence[PlacedChunk],
        scaling: float,
        past: int,
        heads: int,
    ) -> Tensor:
        """`[heads, tokens of the slots]`: what the question of one prompt looks at, on the CPU."""
        columns = torch.cat([torch.arange(slot.columns.start, slot.columns.stop) for slot in slots]).to(key.device)
        asks = rows.columns[slots[0].row] >= slots[-1].columns.stop
        asks = asks if rows.filler is None else asks & ~rows.filler[slots[0].row]
        asked = asks.nonzero()[:, 0].to(query.device)
        group = query.shape[0] // key.shape[0]
        return importance(query[: heads * group, asked], key[:heads, columns + past], scaling).cpu()

    def _load(
        self,
        index: int,
        chosen: list[list[int]] | None,
        slots: Sequence[PlacedChunk],
        rows: Rows,
        realigner: Realigner,
        states: tuple[Tensor, Tensor, Tensor],
        past: int,
        scaling: float,
        there: Tensor,
    ) -> None:
        """Lay the chosen blocks of one prompt, and clear what is not loaded in `there`, `[batch, kv_heads, keys]`."""
        query, keys, values = states
        row, heads = slots[0].row, keys.shape[1]
        self._counts[chosen is None] += 1
        fresh = torch.zeros(keys.shape[2], dtype=torch.bool)
        fresh[(rows.columns if self._fresh is None else self._fresh)[row].cpu() + past] = True
        first = self._probes(heads) if self._by_question else 0
        each: list[list[list[int]]] = [chosen or [list(range(_layers(slot).reader.blocks)) for slot in slots]] * heads
        if chosen is None and self._fallback == "values":
            for slot in slots:
                self._lay_keys(index, slot, range(first, heads), realigner, keys, fresh, past)
            scores = self._scores(query[row], keys[row], rows, slots, scaling, past, heads)
            blocks = _by_block(scores, slots)
            count = math.ceil(self._share * blocks.shape[1])
            each = [_by_slot(sorted(one.topk(count).indices.tolist()), slots) for one in blocks]
            first = heads
        for place, slot in enumerate(slots):
            self._expect(index, slot, [one[place] for one in each], first, self._probes(heads))
            there[row, :, slot.start + past : slot.columns.stop + past] = False
            for group, blocks_of in _alike([one[place] for one in each]):
                self._lay(index, slot, blocks_of, group, first, realigner, (keys, values), fresh, past, there)
        there[row] |= fresh
        self._unseen += float((~there[row]).sum()) / heads / sum(slot.tokens for slot in slots)

    @staticmethod
    def _expect(index: int, slot: PlacedChunk, blocks: list[list[int]], first: int, probes: int) -> None:
        """Have the disk begin with all that this layer needs, and with the probes of the next one."""
        reader = _layers(slot).reader
        for group, some in _alike(blocks):
            reader.expect(index, 1, group, some)
            reader.expect(index, 0, range(max(first, group.start), group.stop), some)
        if index + 1 < reader.layers:
            reader.expect(index + 1, 0, range(min(first, probes)), range(reader.blocks))

    def _lay_keys(
        self,
        index: int,
        slot: PlacedChunk,
        heads: range,
        realigner: Realigner,
        keys: Tensor,
        fresh: Tensor | None = None,
        past: int = 0,
    ) -> None:
        """Lay all keys of some heads, but not over `fresh` ones; the prompt begins behind `past` columns."""
        if not len(heads):
            return
        every = range(_layers(slot).reader.blocks)
        states = _layers(slot).part(index, 0, heads, every).to(keys.device)
        turned = realigner.rotated(index, slot, states, torch.arange(slot.tokens, device=keys.device))
        columns = torch.arange(slot.start + past, slot.columns.stop + past)
        kept = slice(None) if fresh is None else (~fresh[columns]).nonzero()[:, 0]
        keys[slot.row, heads.start : heads.stop].index_copy_(1, columns[kept].to(keys.device), turned[:, kept])

    @staticmethod
    def _lay(
        index: int,
        slot: PlacedChunk,
        blocks: list[int],
        heads: range,
        first: int,
        realigner: Realigner,
        states: KV,
        fresh: Tensor,
        past: int,
        there: Tensor,
    ) -> None:
        """Lay some blocks of neighbouring heads; keys only of those from `first` on."""
        if not blocks:
            return
        keys, values = states
        device, layers = keys.device, _layers(slot)
        every = len(blocks) == layers.reader.blocks
        tokens = torch.arange(slot.tokens) if every else layers.reader.tokens_of(blocks)
        columns = tokens + slot.start + past
        there[slot.row, heads.start : heads.stop, columns] = True
        kept = (~fresh[columns]).nonzero()[:, 0]
        target = columns[kept].to(device)
        found = layers.part(index, 1, heads, blocks).to(device)
        values[slot.row, heads.start : heads.stop].index_copy_(1, target, found[:, kept])
        others = range(max(first, heads.start), heads.stop)
        if len(others):
            found = layers.part(index, 0, others, blocks).to(device)
            turned = realigner.rotated(index, slot, found, tokens.to(device))
            keys[slot.row, others.start : others.stop].index_copy_(1, target, turned[:, kept])


def _by_block(scores: Tensor, slots: Sequence[PlacedChunk]) -> Tensor:
    """`[heads, blocks of the slots]`: the sums of `[heads, tokens of the slots]` over the tokens of each block."""
    parts = []
    for slot, own in zip(slots, scores.split([slot.tokens for slot in slots], dim=1), strict=True):
        reader = _layers(slot).reader
        padded = nn.functional.pad(own[:, reader.order], (0, -slot.tokens % reader.block_tokens))
        parts.append(padded.unflatten(1, (reader.blocks, reader.block_tokens)).sum(dim=2))
    return torch.cat(parts, dim=1)


def _by_slot(blocks: Sequence[int], slots: Sequence[PlacedChunk]) -> list[list[int]]:
    """Blocks of all slots together as blocks of each."""
    found, start = [], 0
    for slot in slots:
        stop = start + _layers(slot).reader.blocks
        found.append([one - start for one in blocks if start <= one < stop])
        start = stop
    return found


def _alike(blocks: list[list[int]]) -> list[tuple[range, list[int]]]:
    """Neighbouring heads with the same blocks, together."""
    cuts = [0, *(head for head in range(1, len(blocks)) if blocks[head] != blocks[head - 1]), len(blocks)]
    return [(range(start, stop), blocks[start]) for start, stop in pairwise(cuts)]


def _compact(there: Tensor, device: torch.device) -> Tensor | None:
    """What is there as `BlendLayer.visible`: columns where one prompt's heads all see the same, otherwise a mask."""
    if bool(there.all()):
        return None
    alike = bool((there == there[:, :1]).all())
    if alike and there.shape[0] == 1:
        return there[0, 0].nonzero()[:, 0].to(device)
    return (there[:, :1] if alike else there).to(device)


def _layers(slot: PlacedChunk) -> PartialLayers:
    """A slot's layers, which can be loaded in part."""
    return slot.chunk.layers  # type: ignore[return-value]
