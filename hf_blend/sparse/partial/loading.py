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
from typing import Any

import torch
from torch import Tensor, nn

from ...cache.blend_cache import BlendCache
from ...cache.layers import BlendLayer
from ...cache.static_layer import refuse_static
from ...errors import ConfigError
from ...model.attention import Glance
from ...prefill.plan import Plan, Slot
from ...prefill.realign import Realigner
from ...prefill.rows import Rows
from ..decoding import Door, refuse_offloaded
from .itf import agreed, importance, probe_count
from .seen import PartDecoding, attend_part
from .store import PartialLayers, PartialStore

KV = tuple[Tensor, Tensor]
Watch = Callable[[int, Tensor, int], None]


@dataclass
class LoadReport:
    """What was loaded.

    Attributes:
        partial_layers: layers that were loaded in part.
        fallback_layers: layers whose probe heads did not agree, loaded whole.
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
    refuse_offloaded(cache)
    refuse_static(cache.config.max_tokens, "partial_loading")
    loading = PartialLoading(cache, share, alpha, by_question, probes, watch)
    door, before = Door(model, loading), cache.store.partial
    cache.store.partial = loading
    loading.guard(True)
    try:
        yield loading
    finally:
        cache.store.partial = before
        loading.guard(False)
        door.remove()


class PartialLoading(PartDecoding):
    """One request that loads in part.

    Args:
        cache: of the request.
        share: of the blocks.
        alpha: exponent of the threshold.
        by_question: whether the question decides.
        probes: how many heads are probed; None is as in the paper.
        watch: as in `partial_loading`.
    """

    def __init__(
        self,
        cache: BlendCache,
        share: float,
        alpha: float,
        by_question: bool = True,
        probes: int | None = None,
        watch: Watch | None = None,
    ) -> None:
        super().__init__(cache)
        self._given_probes, self._watch = probes, watch
        self._share, self._alpha, self._by_question = share, alpha, by_question
        self._store: Any = cache.store
        self._index = -1
        self._slots: list[Slot] = []
        self._fresh: Tensor | None = None
        self._counts, self._unseen = [0, 0], 0.0
        self._readers: dict[int, Any] = {}

    @property
    def report(self) -> LoadReport:
        """What was loaded so far."""
        partial, fallback = self._counts
        layers = len(self._cache.layers)
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

    def guard(self, on: bool) -> None:
        """Say to the cache's layers whether whoever attends knows what is there."""
        for layer in self._cache.layers:
            if isinstance(layer, BlendLayer):
                layer.is_guarded = on

    def begin(self, index: int, rows: Rows | None, plan: Plan) -> None:
        """A layer begins behind the last check layer: find out what of it can be loaded in part."""
        slots = [slot for slot in plan.slots if slot.start and isinstance(slot.chunk.layers, PartialLayers)]
        self._readers |= {id(slot.chunk.layers): slot.chunk.layers.reader for slot in slots}  # type: ignore[attr-defined]
        layer = self._cache.layers[index]
        can = rows is not None and plan.real.shape[0] == 1 and not getattr(layer, "is_sliding", True)
        whole = all(slot.first == 0 and slot.tokens == slot.chunk.tokens for slot in slots)
        self._index, self._slots = (index, slots) if can and whole and slots else (-1, [])
        self._fresh = None if rows is None else rows.columns  # the last layer goes on with fewer, but these are fresh

    def is_open(self, index: int) -> bool:
        """Whether a layer is being loaded in part."""
        return index == self._index

    def lay_probes(self, index: int, slots: Sequence[Slot], realigner: Realigner, opened: KV) -> list[Slot]:
        """Lay the probe heads' keys of chunks in blocks, and give back the slots of all others."""
        if not realigner.turns_keys(index):
            self._index = -1
            return list(slots)
        mine = [slot for slot in self._slots if slot in slots]
        self._slots = mine
        for slot in mine:
            for states in opened:
                states[slot.row, :, slot.columns] = 0
            if self._by_question:
                probes = range(self._probes(opened[0].shape[1]))
                keys = _layers(slot).part(index, 0, probes, range(_layers(slot).reader.blocks)).to(opened[0].device)
                places = torch.arange(slot.chunk.tokens, device=keys.device)
                opened[0][slot.row, : len(probes), slot.columns] = realigner.turned(index, slot, keys, places)
        return [slot for slot in slots if slot not in mine]

    def glance(
        self, index: int, module: nn.Module, rows: Rows | None, realigner: Realigner, past: int
    ) -> Glance | None:
        """Takes a layer's attention: chooses, loads, lays, attends. None where the layer is not loaded in part."""
        if rows is None or not self.is_open(index):
            return None
        layer, slots = self._layers[index], self._slots

        def take(attention: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **given: Any) -> Any:
            self._index = -1
            scaling = given.get("scaling") or query.shape[-1] ** -0.5
            chosen = self._choose(index, query, key, rows, slots, scaling, past)
            layer.visible = self._load(index, chosen, slots, rows, realigner, (key, value), past)
            return attend_part(attention, module, query, key, value, mask, layer.visible, given)

        return Glance(module, take)

    def _choose(
        self, index: int, query: Tensor, key: Tensor, rows: Rows, slots: Sequence[Slot], scaling: float, past: int
    ) -> list[list[int]] | None:
        """The blocks of each slot; None if the heads do not agree."""
        readers = [_layers(slot).reader for slot in slots]
        total = sum(reader.blocks for reader in readers)
        count = math.ceil(self._share * total)
        if not self._by_question:
            return [list(range(math.ceil(self._share * reader.blocks))) for reader in readers]
        columns = torch.cat([torch.arange(slot.columns.start, slot.columns.stop) for slot in slots]).to(key.device)
        asked = (rows.columns[0] > int(columns.max())).nonzero()[:, 0].to(query.device)
        probes = self._probes(key.shape[1])
        group = query.shape[1] // key.shape[1]
        scores = importance(query[0, : probes * group, asked], key[0, :probes, columns + past], scaling).cpu()
        parts, start = [], 0
        for slot, reader in zip(slots, readers, strict=True):
            own = scores[:, start : start + slot.chunk.tokens]
            self._store.note(slot.chunk.key, own.mean(dim=0))
            start += slot.chunk.tokens
            padded = nn.functional.pad(own[:, reader.order], (0, -slot.chunk.tokens % reader.block_tokens))
            parts.append(padded.unflatten(1, (reader.blocks, reader.block_tokens)).sum(dim=2))
        by_block = torch.cat(parts, dim=1)
        if self._watch is not None:
            self._watch(index, by_block, count)
        found = agreed(by_block, count, self._alpha)
        if found is None:
            return None
        starts = [sum(reader.blocks for reader in readers[:place]) for place in range(len(readers))]
        ends = [first + reader.blocks for first, reader in zip(starts, readers, strict=True)]
        return [[one - a for one in found if a <= one < b] for a, b in zip(starts, ends, strict=True)]

    def _load(
        self,
        index: int,
        chosen: list[list[int]] | None,
        slots: Sequence[Slot],
        rows: Rows,
        realigner: Realigner,
        states: KV,
        past: int,
    ) -> Tensor | None:
        """Lay the chosen blocks, and say which columns are there; None for all."""
        keys = states[0]
        self._counts[chosen is None] += 1
        visible = torch.ones(keys.shape[2], dtype=torch.bool)
        flowing = torch.zeros(keys.shape[2], dtype=torch.bool)
        flowing[(rows.columns if self._fresh is None else self._fresh)[0].cpu() + past] = True
        first = self._probes(keys.shape[1]) if self._by_question else 0
        self._expect(index, chosen, slots, first, keys.shape[1])
        for place, slot in enumerate(slots):
            layers = _layers(slot)
            blocks = list(range(layers.reader.blocks)) if chosen is None else chosen[place]
            every = len(blocks) == layers.reader.blocks
            tokens = torch.arange(slot.chunk.tokens) if every else layers.reader.tokens_of(blocks)
            columns = tokens + slot.start + past
            visible[slot.start + past : slot.start + past + slot.chunk.tokens] = False
            visible[columns] = True
            self._lay(index, slot, blocks, tokens, (columns, flowing[columns]), first, realigner, states)
        visible |= flowing
        self._unseen += float((~visible).sum()) / sum(slot.chunk.tokens for slot in slots)
        return visible.nonzero()[:, 0].to(keys.device) if not bool(visible.all()) else None

    @staticmethod
    def _expect(index: int, chosen: list[list[int]] | None, slots: Sequence[Slot], first: int, heads: int) -> None:
        """Have the disk begin with all that this layer needs, and with the probes of the next one."""
        for place, slot in enumerate(slots):
            reader = _layers(slot).reader
            every = range(reader.blocks)
            blocks = every if chosen is None else chosen[place]
            reader.expect(index, 1, range(heads), blocks)
            reader.expect(index, 0, range(first, heads), blocks)
            if index + 1 < reader.layers:
                reader.expect(index + 1, 0, range(first), every)

    def _lay(
        self,
        index: int,
        slot: Slot,
        blocks: list[int],
        tokens: Tensor,
        where: tuple[Tensor, Tensor],
        first: int,
        realigner: Realigner,
        states: KV,
    ) -> None:
        if not blocks:
            return
        keys, values = states
        heads, device = keys.shape[1], keys.device
        columns, fresh = where
        kept = (~fresh).nonzero()[:, 0]
        target = columns[kept].to(device)
        found = _layers(slot).part(index, 1, range(heads), blocks).to(device)
        values[0].index_copy_(1, target, found[:, kept])
        if first < heads:
            found = _layers(slot).part(index, 0, range(first, heads), blocks).to(device)
            turned = realigner.turned(index, slot, found, tokens.to(device))
            keys[0, first:].index_copy_(1, target, turned[:, kept])


def _layers(slot: Slot) -> PartialLayers:
    """A slot's layers, which can be loaded in part."""
    return slot.chunk.layers  # type: ignore[return-value]
