# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A store in front of a store, that keeps chunks as blocks in a tier and gives them out to be loaded in part."""

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, overload
from weakref import finalize

import torch
from torch import Tensor

from ...store import ChunkStore
from ...store.chunk import ChunkKey, ChunkKV, Layout
from ...store.header import hash_namespace
from ...store.seal import keyed
from ...store.tiers.base import EntryFault, Source, Tier
from .blocked import BlockReader, encode_blocks

KV = tuple[Tensor, Tensor]
FAULTS = (EntryFault, OSError, MemoryError)
BLOCK_TOKENS = 16


class PartialLayers(Sequence[KV]):
    """The layers of a chunk in blocks: whole where a layer is asked for, in part for the partial loader.

    Args:
        reader: of the blocks.
        recompute: gives the whole chunk after a fault, which it receives.
    """

    def __init__(self, reader: BlockReader, recompute: Callable[[BaseException], ChunkKV]) -> None:
        self.reader, self._recompute = reader, recompute
        self._instead: ChunkKV | None = None
        self._last: tuple[int, KV] | None = None

    def __len__(self) -> int:
        return self.reader.layers

    @overload
    def __getitem__(self, place: int) -> KV: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[KV]: ...
    def __getitem__(self, place: int | slice) -> KV | Sequence[KV]:
        """(K, V) of a layer, `[kv_heads, tokens, head_dim]` each."""
        if isinstance(place, slice):
            return [self[one] for one in range(*place.indices(len(self)))]
        place, every = range(len(self))[place], list(range(self.reader.blocks))
        if self._last is None or self._last[0] != place:  # a layer is asked for more than once in a row
            heads = list(range(self.reader.heads))
            for near in range(place, min(place + 2, self.reader.layers)):
                for part in (0, 1):
                    self.reader.expect(near, part, heads, every)
            self._last = (place, (self.part(place, 0, heads, every), self.part(place, 1, heads, every)))
        return self._last[1]

    def part(self, layer: int, part: int, heads: Sequence[int], blocks: Sequence[int]) -> Tensor:
        """Some heads and blocks of a layer's keys (0) or values (1), in the chunk's order if all blocks are asked for.

        Args:
            layer: which layer.
            part: 0 or 1.
            heads: which KV heads.
            blocks: increasing.

        Returns:
            `[heads, tokens of the blocks, width]`, tokens as `reader.tokens_of` says; sorted where it is all blocks.
        """
        is_all = len(blocks) == self.reader.blocks
        if self._instead is None:
            try:
                found = torch.stack([self.reader.read(layer, part, head, blocks) for head in heads])
                return found[:, self.reader.order.argsort()] if is_all else found
            except FAULTS as fault:
                self._instead = self._recompute(fault)
        states = self._instead.layers[layer][part][list(heads)]
        return states if is_all else states[:, self.reader.tokens_of(blocks)]


class PartialStore:
    """Chunks as blocks in a tier; everything else is the store's behind it.

    Args:
        store: the store behind; computes and keeps what is missing.
        tier: where the blocks are; one of its own.
        block_tokens: tokens of a block.
        make_loader: makes what loads in part for a request, from its cache; the store behind then keeps each chunk
            whole. None loads in part only within `partial_loading`, and keeps chunks as blocks only.
    """

    def __init__(
        self,
        store: ChunkStore,
        tier: Tier,
        block_tokens: int = BLOCK_TOKENS,
        make_loader: Callable[[Any], Any] | None = None,
    ) -> None:
        self._make_loader = make_loader
        self._store, self._tier, self._block_tokens = store, tier, block_tokens
        self._space = keyed(store.secret, "space", hash_namespace(f"{store.namespace}\0blocks"))[:2]
        self.faults: Counter[str] = Counter()  # by reason; what cannot become good was removed
        self.importance: dict[str, Tensor] = {}  # mean importance of each chunk's tokens, for the next order
        self._keys: dict[str, ChunkKey] = {}
        self.partial: Any = None  # loads in part, while it is set

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def __enter__(self) -> "PartialStore":
        """As the store behind."""
        self._store.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        """As the store behind."""
        self._store.__exit__(*raised)

    def loader(self, cache: Any) -> Any:
        """What loads in part for one request.

        Args:
            cache: of the request.

        Returns:
            A `PartialLoading`; None where requests load in part only within `partial_loading`, or one does now.
        """
        return None if self._make_loader is None or self.partial is not None else self._make_loader(cache)

    @property
    def loads_in_part(self) -> bool:
        """Whether every request over this store loads in part."""
        return self._make_loader is not None

    def stream(self, key: ChunkKey, recompute: Callable[[], ChunkKV], layout: Layout | None = None) -> ChunkKV | None:
        """A chunk whose layers can be loaded in part; None if it is not there in blocks, or not of the layout."""
        found = self._blocks(key, recompute, layout)
        if found is None and self.loads_in_part:
            whole = self._store.get(key, layout=layout)
            if whole is not None:
                self._put_blocks(whole)
                found = self._blocks(key, recompute, layout) or whole
        return found

    def _blocks(self, key: ChunkKey, recompute: Callable[[], ChunkKV], layout: Layout | None) -> ChunkKV | None:
        source = None
        try:
            source = self._tier.open(self._name(key))
            if source is None:
                return None
            reader = BlockReader(source, key, self._store.secret, layout)
        except FAULTS as fault:
            self._count(key, source, fault)
            if source is not None:
                source.close()
            return None

        def instead(fault: BaseException) -> ChunkKV:
            self._count(key, source, fault)
            return recompute()

        layers = PartialLayers(reader, instead)
        finalize(layers, source.close).atexit = False
        self._keys[key.digest] = key
        table = tuple(reader.header["layer_table"])
        return ChunkKV(key, layers, reader.tables, table)

    def put(self, chunk: ChunkKV) -> ChunkKV:
        """Keep a chunk in blocks, its tokens in the order of their importance, as far as it is known; give it back."""
        if self.loads_in_part:
            chunk = self._store.put(chunk)
        else:
            chunk.check()
        return self._put_blocks(chunk)

    def _put_blocks(self, chunk: ChunkKV) -> ChunkKV:
        known = self.importance.get(chunk.key.digest)
        order = list(range(chunk.tokens)) if known is None else known.argsort(descending=True, stable=True).tolist()
        name = self._name(chunk.key)
        self._keys[chunk.key.digest] = chunk.key
        pieces = encode_blocks(chunk, order, self._block_tokens, self._store.secret)
        try:
            self._tier.delete(name)
            self._tier.put_if_absent(name, pieces)
        except OSError as error:
            self._count(chunk.key, None, error)
        return chunk

    def note(self, key: ChunkKey, scores: Tensor, share: float = 0.1) -> None:
        """Take in how important a chunk's tokens were this time, `[tokens]`; a moving average."""
        known = self.importance.get(key.digest)
        self.importance[key.digest] = scores.clone() if known is None else known + share * (scores - known)

    def reorder(self) -> int:
        """Write every chunk whose tokens' importance is known in its new order; to be called beside requests.

        Returns:
            How many were written.
        """
        count = 0
        for chunk in [self._known(digest) for digest in list(self.importance)]:
            if chunk is not None:
                self._put_blocks(chunk)
                count += 1
        return count

    def _known(self, digest: str) -> ChunkKV | None:
        key = self._keys.get(digest)
        chunk = None if key is None else self.stream(key, lambda: _lost(digest))
        if chunk is None:
            return None
        try:
            return ChunkKV(chunk.key, tuple(chunk.layers), chunk.tables, chunk.layer_table)
        except EntryFault:
            return None

    def _count(self, key: ChunkKey, source: Source | None, fault: BaseException) -> None:
        """Count a fault, and remove what is damaged; what is sealed otherwise too, for the name is ours alone."""
        self.faults[fault.reason if isinstance(fault, EntryFault) else type(fault).__name__] += 1
        if isinstance(fault, EntryFault) and (fault.corrupt or fault.reason == "secret"):
            with contextlib.suppress(OSError):
                self._tier.delete(self._name(key), source)

    def _name(self, key: ChunkKey) -> str:
        called = keyed(self._store.secret, "name", key.digest)
        return f"{self._space}/{called[:2]}/{called}"


def _lost(digest: str) -> ChunkKV:
    raise EntryFault("digest", f"chunk {digest} is damaged", corrupt=False)
