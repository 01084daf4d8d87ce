# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A store that keeps chunks in blocks, too, and gives them out to be loaded in part."""

from collections.abc import Callable, Sequence
from typing import Any, Self, overload
from weakref import finalize

import torch
from torch import Tensor

from ...store import ChunkStore
from ...store.bounded import BoundedTier
from ...store.chunk import ChunkKey, ChunkKV, Layout
from ...store.limits import Limits
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
        self._block_tokens, self._make_loader, self._reorders = block_tokens, make_loader, reorders
        self._tier = tier if isinstance(tier, BoundedTier) else Limits().bound(tier, None, "")
        self._tier.name, self._tier.stats = "blocks", self._stats
        self.loads_in_part = make_loader is not None
        self.reordering = WriteQueue[ChunkKey](CAP_CHUNKS, self._reorder)
        self._noted: dict[str, ChunkKey] = {}  # since they were written; the oldest are forgotten first
        tier.remove_orphans()
        return self

    @property
    def faults(self) -> dict[str, int]:
        """Entries in blocks that could not be used, by reason; what cannot become good was removed."""
        counted = self._stats.group("load_failures").items()
        return {name.removeprefix("blocks:"): count for name, count in counted if name.startswith("blocks:")}

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
        found, reason = self._blocked(key, recompute, layout)
        if found is None and (found := self.get(key, layout=layout)) is not None:
            self._write_blocks(found)
            if reason == "absent":
                return self._blocked(key, recompute, layout)[0] or found
        return found

    def _put(self, chunk: ChunkKV, wait_s: float = 0.0) -> ChunkKV:
        stored = super()._put(chunk, wait_s)
        self._write_blocks(stored)
        return stored

    def _block_tier(self) -> Tier | None:
        return self._tier

    def _blocked(self, key: ChunkKey, recompute: Recompute, layout: Layout | None) -> tuple[ChunkKV | None, str]:
        """A chunk in blocks and "", or None and why not."""
        name = self.block_name(key.digest)

        def take(tier: BoundedTier, key: ChunkKey, source: Source) -> ChunkKV:
            reader = BlockReader(source, key, self.secret, layout)

            def instead(fault: BaseException) -> ChunkKV:
                self._refuse(tier, key, source, fault, name)
                chunk = recompute()
                if isinstance(fault, EntryFault):
                    self._write_blocks(chunk, reader.order.tolist())
                return chunk

            layers = PartialLayers(reader, instead)
            finalize(layers, source.close).atexit = False
            return ChunkKV(key, layers, reader.tables, reader.layer_table)

        return self._load(self._tier, key, take, name)

    def _write_blocks(self, chunk: ChunkKV, order: list[int] | None = None) -> None:
        """Write a chunk in one step: a reader, or a process that is killed, finds the old blocks or the new ones."""
        digest = chunk.key.digest
        order = self._order(chunk) if order is None else order
        pieces = encode_blocks(chunk, order, self._block_tokens, self.secret)
        self._noted.pop(digest, None)
        try:
            self._tier.replace(self.block_name(digest), pieces)
        except OSError as error:
            self._refuse_write(self._tier, error)
            return
        if (share := self.importance.share(digest)) is not None:
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
            self.reordering.put(key.digest, key)

    def record_importance(self, key: ChunkKey, important_ratio: float) -> None:
        """As `ChunkStore.record_importance`, for the blocks too."""
        super().record_importance(key, important_ratio)
        self._use(key, important_ratio)

    def reorder(self) -> int:
        """Write every chunk that was reported since it was written in the order of its tokens' importance, now."""
        return sum(map(self._reorder, list(self._noted.values())))

    def stats(self) -> dict[str, Any]:
        """As `ChunkStore.stats`, with `blocks` among the tiers."""
        found = super().stats()
        found["bytes"]["blocks"] = self._tier.nbytes
        found["pinned_bytes"]["blocks"] = self._tier.pinned_bytes
        found["capacity_bytes"]["blocks"] = self._tier.cap_bytes
        return found

    def _reorder(self, key: ChunkKey) -> bool:
        if self.ttl_s is not None:  # a file that is written again looks young
            return False

        def lost() -> ChunkKV:
            raise EntryFault("digest", f"chunk {key.digest} is damaged", corrupt=False)

        chunk, _ = self._blocked(key, lost, None)
        if chunk is None:
            return False
        try:
            chunk = ChunkKV(chunk.key, tuple(chunk.layers), chunk.tables, chunk.layer_table)
        except FAULTS:
            return False
        self._write_blocks(chunk)
        return True

    def _use(self, key: ChunkKey, important_ratio: float) -> None:
        if self._tier.policy.reads_importance:
            self._tier.use(self.block_name(key.digest), min(1.0, max(0.0, important_ratio)))


def is_due(requests: int) -> bool:
    """Return True if a chunk should be ordered after so many reports: 4, 8, 16, …, so that it is written seldom."""
    return requests >= FIRST_REQUESTS and requests & (requests - 1) == 0
