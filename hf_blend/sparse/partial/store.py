# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A store that keeps chunks in blocks, too, and gives them out to be loaded in part."""

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, overload
from weakref import finalize

import torch
from torch import Tensor

from ...store import ChunkStore
from ...store.bounded import BoundedTier
from ...store.chunk import ChunkKey, ChunkKV, Layout
from ...store.guard import Guard
from ...store.slow import WriteQueue
from ...store.store import Recompute
from ...store.tiers.base import EntryFault, Source, Tier
from .blocked import BlockReader, encode_blocks

KV = tuple[Tensor, Tensor]
FAULTS = (EntryFault, OSError, MemoryError)
BLOCK_TOKENS = 16
NOTED_CHUNKS = 4096  # that `reorder` knows of
CAP_CHUNKS = 1024  # that wait to be written in another order; what comes on top is due again later
FIRST_REQUESTS = 4  # after which a chunk is ordered first; then after twice as many each time


@dataclass(frozen=True)
class DueOrder:
    """A chunk that waits to be written in another order."""

    key: ChunkKey
    nbytes: int = 1
    guard: Guard = field(default_factory=lambda: Guard(()))

    @property
    def digest(self) -> str:
        """The name of the chunk."""
        return self.key.digest


class PartialLayers(Sequence[KV]):
    """The layers of a chunk in blocks: whole where a layer is asked for, in part for the partial loader.

    What was read stays until `forget`, so that no byte of it is read twice in a request.
    """

    def __init__(self, reader: BlockReader, recompute: Callable[[BaseException], ChunkKV]) -> None:
        self.reader, self._recompute = reader, recompute
        self._instead: ChunkKV | None = None
        self._back = reader.order.argsort()
        self._held: dict[tuple[int, int], Tensor] = {}  # by layer and part
        self._known: dict[tuple[int, int], list[set[int]]] = {}  # likewise: blocks given out, by head

    def __len__(self) -> int:
        return self.reader.layers

    @overload
    def __getitem__(self, index: int) -> KV: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[KV]: ...
    def __getitem__(self, index: int | slice) -> KV | Sequence[KV]:
        """(K, V) of a layer, `[kv_heads, tokens, head_dim]` each."""
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        index, every, heads = range(len(self))[index], range(self.reader.blocks), range(self.reader.heads)
        if not self.is_whole(index):
            for part in (0, 1):
                self.reader.expect(index, part, heads, every)
        return self.part(index, 0, heads, every), self.part(index, 1, heads, every)

    def is_whole(self, layer: int) -> bool:
        """Return True if all of a layer was read, from the blocks or behind a fault, and is in memory."""
        known, blocks = [self._known.get((layer, part), [set()]) for part in (0, 1)], self.reader.blocks
        return all(len(one) == blocks for heads in known for one in heads)

    def forget(self, before: int) -> None:
        """Let go of what was read of the layers before one."""
        for index in [index for index in self._known if index[0] < before]:
            del self._known[index]
            self._held.pop(index, None)

    def part(self, layer: int, part: int, heads: Sequence[int], blocks: Sequence[int]) -> Tensor:
        """Some heads and blocks of a layer's keys (0) or values (1), `[heads, tokens of the blocks, width]`.

        Tokens are as `reader.tokens_of` says, but in the chunk's order if all blocks are asked for.
        """
        is_all = len(blocks) == self.reader.blocks
        known = self._known.setdefault((layer, part), [set() for _ in range(self.reader.heads)])
        if self._instead is None:
            try:
                positions = self._back if is_all else self.reader.positions_of(blocks)
                return _heads(self._read(layer, part, heads, blocks), heads).index_select(1, positions)
            except FAULTS as fault:
                self._instead = self._recompute(fault)
        for head in heads:
            known[head].update(blocks)
        states = _heads(self._instead.layers[layer][part], heads)
        return states if is_all else states[:, self.reader.tokens_of(blocks)]

    def _read(self, layer: int, part: int, heads: Sequence[int], blocks: Sequence[int]) -> Tensor:
        """`[kv_heads, tokens, width]`, in the order of the blocks; what is asked for is there."""
        if (layer, part) not in self._held:
            self._held[layer, part] = self.reader.empty(part)
        held, known = self._held[layer, part], self._known[layer, part]
        missing: dict[tuple[int, ...], list[int]] = {}
        for head in heads:
            if lacking := tuple(block for block in blocks if block not in known[head]):
                missing.setdefault(lacking, []).append(head)
        for lacking, those in missing.items():
            found, positions = self.reader.read(layer, part, those, lacking), self.reader.positions_of(lacking)
            if those == list(range(those[0], those[-1] + 1)):
                held[those[0] : those[-1] + 1].index_copy_(1, positions, found)
            else:
                held[torch.tensor(those)[:, None], positions] = found
            for head in those:
                known[head].update(lacking)
        return held


def _heads(states: Tensor, heads: Sequence[int]) -> Tensor:
    """Some heads of `[kv_heads, tokens, width]`; a view where they are neighbours."""
    return states[heads.start : heads.stop] if isinstance(heads, range) else states[list(heads)]


class PartialStore(ChunkStore):
    """A store that keeps each chunk in blocks, too, and has requests load only those that matter to them.

    An entry in blocks is of another kind than a chunk, in a tier of its own; whatever is wrong with it, the chunk
    itself is there. `keep_blocks` comes before everything else.
    """

    reads_importance = True
    _make_loader: Callable[[Any], Any] | None = None
    partial: Any = None  # loads in part, while it is set

    def keep_blocks(
        self,
        tier: Tier,
        block_tokens: int = BLOCK_TOKENS,
        make_loader: Callable[[Any], Any] | None = None,
        reorders: bool = False,
    ) -> Self:
        """Say where blocks are, and how they are written and loaded; gives the store."""
        self._tier, self._block_tokens, self._make_loader, self._reorders = tier, block_tokens, make_loader, reorders
        self.loads_in_part = make_loader is not None
        self.reordering = WriteQueue[DueOrder](CAP_CHUNKS, lambda due: self._reorder(due.key))
        self.faults: Counter[str] = Counter()  # by reason; what cannot become good was removed
        self._noted: dict[str, ChunkKey] = {}  # since they were written; the oldest are forgotten first
        tier.remove_orphans()
        return self

    def close(self) -> None:
        """As `ChunkStore.close`; the chunk that is being written in a new order is finished."""
        self.reordering.clear("closed")
        self.reordering.flush(60.0)
        super().close()
        self._tier.close()

    def loader(self, cache: Any) -> Any:
        """What loads in part for the request of a cache; within `partial_loading` what that has made."""
        if self.partial is not None:
            return self.partial if self.partial.is_of(cache) else None
        return None if self._make_loader is None else self._make_loader(cache)

    def at_hand(self, keys: Sequence[ChunkKey], layout: Layout | None = None) -> dict[ChunkKey, ChunkKV]:
        """Nothing: `stream` gives a chunk in blocks where there is one."""
        return {}

    def stream(
        self, key: ChunkKey, recompute: Recompute, budget_s: float | None = None, layout: Layout | None = None
    ) -> ChunkKV | None:
        """A chunk whose layers can be loaded in part; all of it where its blocks cannot be used."""
        are_refused = True
        with contextlib.suppress(*FAULTS):
            found = self._blocked(key, recompute, layout)
            if found is not None:
                return found
            are_refused = False
        found = self.get(key, layout=layout)
        if found is not None:
            self._write_blocks(found)
            with contextlib.suppress(*FAULTS):
                return found if are_refused else self._blocked(key, recompute, layout) or found
        return found

    def _put(self, chunk: ChunkKV, wait_s: float = 0.0) -> ChunkKV:
        stored = super()._put(chunk, wait_s)
        self._write_blocks(stored)
        return stored

    def _block_tier(self) -> Tier | None:
        return self._tier

    def _blocked(self, key: ChunkKey, recompute: Recompute, layout: Layout | None) -> ChunkKV | None:
        """A chunk in blocks, or None if there are none; raises one of `FAULTS`, counted, if they cannot be used."""
        source = None
        try:
            source = self._tier.open(self.block_name(key.digest))
            if source is None:
                return None
            if self._is_old(source.stat):
                raise EntryFault("expired", f"it was stored more than {self.ttl_s} s ago")
            reader = BlockReader(source, key, self.secret, layout)
        except FAULTS as fault:
            self._refuse_blocks(key, source, fault)
            if source is not None:
                source.close()
            raise

        def instead(fault: BaseException) -> ChunkKV:
            is_removed, chunk = self._refuse_blocks(key, source, fault), recompute()
            if is_removed:
                self._write_blocks(chunk, order)
            return chunk

        order = reader.order.tolist()
        layers = PartialLayers(reader, instead)
        finalize(layers, source.close).atexit = False
        return ChunkKV(key, layers, reader.tables, reader.layer_table)

    def _write_blocks(self, chunk: ChunkKV, order: list[int] | None = None) -> None:
        """Write a chunk in one step: a reader, or a process that is killed, finds the old blocks or the new ones."""
        digest = chunk.key.digest
        order = self._order(chunk) if order is None else order
        pieces = encode_blocks(chunk, order, self._block_tokens, self.secret)
        self._noted.pop(digest, None)
        try:
            self._tier.replace(self.block_name(digest), pieces)
        except OSError as error:
            self._refuse_blocks(chunk.key, None, error)
            return
        share = self.importance.share(digest)
        if share is not None:
            self._use(chunk.key, share)

    def _order(self, chunk: ChunkKV) -> list[int]:
        """The tokens of a chunk, the most important first, as far as that is known."""
        known = self.importance.scores(chunk.key.digest)
        if known is None or len(known) != chunk.tokens:
            return list(range(chunk.tokens))
        order: list[int] = known.argsort(descending=True, stable=True).tolist()
        return order

    def note(self, key: ChunkKey, scores: Tensor, important_ratio: float) -> None:
        """As `ChunkStore.note`; a chunk that was reported often enough is written in its new order soon."""
        super().note(key, scores, important_ratio)
        self._noted[key.digest] = key
        if len(self._noted) > NOTED_CHUNKS:
            del self._noted[next(iter(self._noted))]
        if self._reorders and is_due(self.importance.requests(key.digest)):
            self.reordering.put(DueOrder(key))

    def record_importance(self, key: ChunkKey, important_ratio: float) -> None:
        """As `ChunkStore.record_importance`, for the blocks too."""
        super().record_importance(key, important_ratio)
        self._use(key, important_ratio)

    def reorder(self) -> int:
        """Write every chunk that was reported since it was written in the order of its tokens' importance, now."""
        return sum(map(self._reorder, list(self._noted.values())))

    def stats(self) -> dict[str, Any]:
        """As `ChunkStore.stats`, with `blocks` among the tiers where they have a cap."""
        found = super().stats()
        if isinstance(self._tier, BoundedTier):
            found["bytes"]["blocks"] = self._tier.nbytes
            found["pinned_bytes"]["blocks"] = self._tier.pinned_bytes
            found["capacity_bytes"]["blocks"] = self._tier.cap_bytes
        return found

    def _reorder(self, key: ChunkKey) -> bool:
        if self.ttl_s is not None:  # a file that is written again looks young
            return False
        try:
            chunk = self._blocked(key, lambda: _lost(key.digest), None)
            if chunk is None:
                return False
            chunk = ChunkKV(chunk.key, tuple(chunk.layers), chunk.tables, chunk.layer_table)
        except FAULTS:
            return False
        self._write_blocks(chunk)
        return True

    def _use(self, key: ChunkKey, important_ratio: float) -> None:
        if isinstance(self._tier, BoundedTier) and self._tier.reads_importance:
            self._tier.use(self.block_name(key.digest), min(1.0, max(0.0, important_ratio)))

    def _refuse_blocks(self, key: ChunkKey, source: Source | None, fault: BaseException) -> bool:
        """Count a fault, and remove what can never become good, as `BaseStore._refuse` does."""
        self.faults[fault.reason if isinstance(fault, EntryFault) else type(fault).__name__] += 1
        is_damaged = isinstance(fault, EntryFault) and (fault.corrupt or fault.reason == "secret")
        if is_damaged:
            with contextlib.suppress(OSError):
                self._tier.delete(self.block_name(key.digest), source)
        return is_damaged


def is_due(requests: int) -> bool:
    """Return True if a chunk should be ordered after so many reports: 4, 8, 16, …, so that it is written seldom."""
    return requests >= FIRST_REQUESTS and requests & (requests - 1) == 0


def _lost(digest: str) -> ChunkKV:
    raise EntryFault("digest", f"chunk {digest} is damaged", corrupt=False)
