# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A store that keeps chunks in blocks, and gives them out to be loaded in part."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Self, overload
from weakref import finalize

import torch
from torch import Tensor

from ...store import ChunkStore
from ...store.budget import BoundedTier
from ...store.chunk import ChunkKey, ChunkKV, Layout
from ...store.entry import encode_entry, stored_as
from ...store.slow import WriteQueue
from ...store.store import Recompute
from ...store.stream import FAULTS
from ...store.tiers.base import EntryFault, Source
from .blocked import BlockReader

KV = tuple[Tensor, Tensor]
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
        return len(self.reader.layer_table)

    @overload
    def __getitem__(self, index: int) -> KV: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[KV]: ...
    def __getitem__(self, index: int | slice) -> KV | Sequence[KV]:
        """(K, V) of a layer, `[kv_heads, tokens, head_dim]` each."""
        if isinstance(index, slice):
            return [self[layer] for layer in range(*index.indices(len(self)))]
        index, every, heads = range(len(self))[index], range(self.reader.blocks), range(self.reader.heads)
        if not self.is_whole(index):
            for which in (0, 1):
                self.reader.expect(index, which, heads, every)
        return self.read(index, 0, heads, every), self.read(index, 1, heads, every)

    def is_whole(self, layer: int) -> bool:
        """Return True if all of a layer was read, from the blocks or behind a fault, and is in memory."""
        read_blocks, blocks = [self._known.get((layer, which), [set()]) for which in (0, 1)], self.reader.blocks
        return all(len(head_blocks) == blocks for heads in read_blocks for head_blocks in heads)

    def forget(self, before: int) -> None:
        """Let go of what was read of the layers before one."""
        for index in [index for index in self._known if index[0] < before]:
            del self._known[index]
            self._held.pop(index, None)

    def read(self, layer: int, which: int, heads: Sequence[int], blocks: Sequence[int]) -> Tensor:
        """Some heads and blocks of a layer's keys (0) or values (1), `[heads, tokens of the blocks, width]`.

        Tokens are as `reader.tokens_of` says, but in the chunk's order if all blocks are requested.
        """
        is_all = len(blocks) == self.reader.blocks
        read_blocks = self._known.setdefault((layer, which), [set() for _ in range(self.reader.heads)])
        if self._instead is None:
            try:
                positions = self._back if is_all else self.reader.positions_of(blocks)
                return _heads(self._read(layer, which, heads, blocks), heads).index_select(1, positions)
            except FAULTS as fault:
                self._instead = self._recompute(fault)
        for head in heads:
            read_blocks[head].update(blocks)
        states = _heads(self._instead.layers[layer][which], heads)
        return states if is_all else states[:, self.reader.tokens_of(blocks)]

    def _read(self, layer: int, which: int, heads: Sequence[int], blocks: Sequence[int]) -> Tensor:
        """`[kv_heads, tokens, width]` in the order of the blocks; at least the requested heads and blocks are read."""
        if (layer, which) not in self._held:
            self._held[layer, which] = self.reader.empty(which)
        states, read_blocks = self._held[layer, which], self._known[layer, which]
        missing: dict[tuple[int, ...], list[int]] = {}
        for head in heads:
            if lacking := tuple(block for block in blocks if block not in read_blocks[head]):
                missing.setdefault(lacking, []).append(head)
        for lacking, those in missing.items():
            new, positions = self.reader.read_blocks(layer, which, those, lacking), self.reader.positions_of(lacking)
            if those == list(range(those[0], those[-1] + 1)):  # copying to neighbours takes less
                states[those[0] : those[-1] + 1].index_copy_(1, positions, new)
            else:
                states[torch.tensor(those)[:, None], positions] = new
            for head in those:
                read_blocks[head].update(lacking)
        return states


def _heads(states: Tensor, heads: Sequence[int]) -> Tensor:
    """Some heads of `[kv_heads, tokens, width]`; a view where they are neighbours."""
    return states[heads.start : heads.stop] if isinstance(heads, range) else states[list(heads)]


class PartialStore(ChunkStore):
    """A store whose entries are in blocks on this machine, so that requests load only those that matter to them.

    A chunk of another tier, or of a kind that cannot be in blocks, is loaded whole.
    """

    reads_importance = True
    _block_tokens = BLOCK_TOKENS
    _make_loader: Callable[[Any], Any] | None = None
    _reorders = False

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.reordering = WriteQueue[ChunkKey](CAP_CHUNKS, self._reorder)
        self._noted: dict[str, ChunkKey] = {}  # since they were written; the oldest are forgotten first

    def load_in_part(
        self,
        block_tokens: int = BLOCK_TOKENS,
        make_loader: Callable[[Any], Any] | None = None,
        reorders: bool = False,
    ) -> Self:
        """Say how blocks are written and loaded; gives the store."""
        self._block_tokens, self._make_loader, self._reorders = block_tokens, make_loader, reorders
        self.loads_in_part = make_loader is not None
        return self

    @property
    def faults(self) -> dict[str, int]:
        """Entries in blocks that could not be used, by reason; what cannot become good was removed."""
        near, counted = f"{self._tiers[0].name}:", self._stats.group("load_failures")
        return {name.removeprefix(near): count for name, count in counted.items() if name.startswith(near)}

    def close(self) -> None:
        """As `ChunkStore.close`; the chunk that is being written in a new order is finished."""
        self.reordering.clear("closed")
        self.reordering.flush(60.0)
        super().close()

    def loader(self, cache: Any) -> Any:
        """What loads in part for the request of a cache."""
        return None if self._make_loader is None else self._make_loader(cache)

    def at_hand(self, keys: Sequence[ChunkKey], layout: Layout | None = None) -> dict[ChunkKey, ChunkKV]:
        """Nothing: `stream` gives a chunk in blocks where there is one."""
        return {}

    def stream(
        self, key: ChunkKey, recompute: Recompute, budget_s: float | None = None, layout: Layout | None = None
    ) -> ChunkKV | None:
        """A chunk whose layers can be loaded in part; all of it where the nearest tier does not have it in blocks."""
        near = self._tiers[0]
        chunk, reason = self._load(near, key, partial(self._open_blocks, recompute=recompute, layout=layout))
        if chunk is not None:
            self._stats.count("hits", near.name)
            return chunk
        chunk = self.get(key, layout=layout)
        if chunk is not None and reason == "absent":
            self._write_blocks(chunk)
        return chunk

    def _open_blocks(
        self, tier: BoundedTier, key: ChunkKey, source: Source, *, recompute: Recompute, layout: Layout | None
    ) -> ChunkKV:
        reader = BlockReader(source, key, self.secret, layout)
        if not reader.in_blocks:
            chunk = self._read(tier, key, source, layout=layout)
            self._write_blocks(chunk)
            return chunk

        def instead(fault: BaseException) -> ChunkKV:
            self._refuse(tier, key, source, fault)
            computed = recompute()
            if isinstance(fault, EntryFault):
                self._write_blocks(computed, reader.order.tolist())
            return computed

        layers = PartialLayers(reader, instead)
        finalize(layers, source.close).atexit = False
        return reader.chunk(layers, reader.tables())

    def _encode(self, chunk: ChunkKV, order: Sequence[int] | None = None) -> Sequence[memoryview]:
        forms = {*chunk.layout.layers}
        form = forms.pop() if forms else ()
        if forms or len(form) != 2 or form[0][::2] != form[1][::2]:  # more than K and V, or layers that differ
            return super()._encode(chunk)
        order = self._order(chunk) if order is None else order
        return encode_entry(stored_as(chunk, self._codec), self.secret, "raw", order, self._block_tokens)

    def _write_blocks(self, chunk: ChunkKV, order: Sequence[int] | None = None) -> None:
        """Write a chunk in one step: a reader, or a process that is killed, finds the old blocks or the new ones."""
        digest, near = chunk.key.digest, self._tiers[0]
        self._noted.pop(digest, None)
        try:
            near.replace(self._catalog.name(digest), self._encode(chunk, order))
            self._catalog.add(near, chunk.key)
        except OSError as error:
            self._refuse_write(near, error)
            return
        if near.policy.reads_importance and (share := self.importance.share(digest)) is not None:
            near.use(self._catalog.name(digest), share)

    def _order(self, chunk: ChunkKV) -> list[int]:
        """The tokens of a chunk, the most important first; in order if their importance is unknown."""
        scores = self.importance.scores(chunk.key.digest)
        if scores is None or len(scores) != chunk.tokens:
            return list(range(chunk.tokens))
        order: list[int] = scores.argsort(descending=True, stable=True).tolist()
        return order

    def note(self, key: ChunkKey, scores: Tensor, important_ratio: float) -> None:
        """As `ChunkStore.note`; a chunk that was reported often enough is written in its new order soon."""
        super().note(key, scores, important_ratio)
        self._noted[key.digest] = key
        if len(self._noted) > NOTED_CHUNKS:
            del self._noted[next(iter(self._noted))]
        if self._reorders and is_due(self.importance.requests(key.digest)):
            self.reordering.put(key.digest, key)

    def reorder(self) -> int:
        """Write every chunk that was reported since it was written in the order of its tokens' importance, now."""
        return sum(map(self._reorder, list(self._noted.values())))

    def _reorder(self, key: ChunkKey) -> bool:
        if self.ttl_s is not None or not self._tiers[0].contains(self._catalog.name(key.digest)):
            return False  # a file that is written again looks young
        chunk = self.get(key)
        if chunk is not None:
            self._write_blocks(chunk)
        return chunk is not None


def is_due(requests: int) -> bool:
    """Return True if a chunk should be ordered after so many reports: 4, 8, 16, …, so that it is written seldom."""
    return requests >= FIRST_REQUESTS and requests & (requests - 1) == 0
