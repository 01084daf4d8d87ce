# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Reads chunks in part: the nearest tier keeps them in blocks, and a request loads the blocks that matter to it."""

from collections.abc import Sequence
from functools import partial
from weakref import finalize

from ...store import ChunkStore
from ...store.chunk import ChunkKey, ChunkKV, Layout
from ...store.reader import OpenEntry, Reader
from ...store.stream import LayerReader, Recompute
from ...store.tiers.base import EntryFault
from ...store.write_queue import WriteQueue
from ...store.writer import Writer
from .blocked import BLOCK_TOKENS, BlockEncoder, BlockReader, has_blocks
from .layers import PartialLayers

NOTED_CHUNKS = 4096  # that `reorder` knows of
CAP_CHUNKS = 1024  # that wait to be written in another order; what comes on top is due again later
FIRST_REQUESTS = 4  # after which a chunk is ordered first; then after twice as many each time


def keep_in_blocks(store: ChunkStore, block_tokens: int = BLOCK_TOKENS, reorders: bool = False) -> "PartialReader":
    """Have a store write chunks in blocks, and give them to requests as `PartialLayers`."""
    encoder = BlockEncoder(store.writer.codec, store.storage.importance, block_tokens)
    store.writer.encode = encoder.encode
    store.layer_reader = reader = PartialReader(store.reader, store.writer, encoder, reorders)
    return reader


class PartialReader(LayerReader):
    """Gives chunks whose blocks are read when a request has chosen them.

    A chunk of a farther tier, or of a kind that cannot be in blocks, is read whole. With `reorders` a chunk that
    requests have reported often enough is written again beside them, its important tokens in the same blocks.
    """

    uses_memory = False
    reads_importance = True

    def __init__(self, reader: Reader, writer: Writer, encoder: BlockEncoder, reorders: bool = False) -> None:
        self._reader, self._writer, self._encoder, self._reorders = reader, writer, encoder, reorders
        self._storage, self._near = reader.storage, reader.storage.tiers[0]
        self.reordering = WriteQueue[ChunkKey](CAP_CHUNKS, self._reorder)
        self._noted: dict[str, ChunkKey] = {}  # since they were written; the oldest are forgotten first

    def stream(
        self, key: ChunkKey, recompute: Recompute, budget_s: float | None, layout: Layout | None
    ) -> ChunkKV | None:
        """Give a chunk whose layers are `PartialLayers`; all of it where the nearest tier has no blocks of it."""
        open_blocks = partial(self._open_blocks, recompute=recompute, layout=layout)
        chunk, reason = self._reader.load(self._near, key, open_blocks)
        if chunk is not None:
            self._storage.stats.count("hits", self._near.name)
            return chunk
        chunk = self._reader.get(key, layout=layout)
        if chunk is not None and reason == "absent":
            self.write_blocks(chunk)
        return chunk

    def _open_blocks(self, entry: OpenEntry, *, recompute: Recompute, layout: Layout | None) -> ChunkKV:
        contents = BlockReader(entry.source, entry.key, layout)
        if not contents.in_blocks:
            chunk = self._reader.read(entry, layout)
            if has_blocks(chunk):
                self.write_blocks(chunk)
            return chunk

        def replace(fault: BaseException) -> ChunkKV:
            self._storage.refuse_entry(entry.tier, entry.key, entry.source, fault)
            computed = recompute()
            if isinstance(fault, EntryFault):
                self.write_blocks(computed, contents.order.tolist())
            return computed

        layers = PartialLayers(contents, replace)
        finalize(layers, entry.source.close).atexit = False
        return contents.chunk(layers, contents.tables())

    def write_blocks(self, chunk: ChunkKV, order: Sequence[int] | None = None) -> None:
        """Write a chunk in blocks, its tokens in an order; None is by importance."""
        self._noted.pop(chunk.key.digest, None)
        self._writer.replace(self._near, chunk, self._encoder.encode(chunk, order))

    def note(self, key: ChunkKey) -> None:
        """Remember that a chunk was reported, and write it in a new order soon if that was often enough."""
        self._noted[key.digest] = key
        if len(self._noted) > NOTED_CHUNKS:
            del self._noted[next(iter(self._noted))]
        record = self._storage.importance.get(key.digest)
        if self._reorders and record is not None and is_due(record.requests):
            self.reordering.put(key.digest, key)

    def reorder(self) -> int:
        """Write every chunk that was reported since it was written in the order of its tokens' importance, now."""
        return sum(map(self._reorder, list(self._noted.values())))

    def _reorder(self, key: ChunkKey) -> bool:
        if self._storage.ttl_s is not None or not self._near.contains(self._storage.catalog.name(key.digest)):
            return False  # a file that is written again looks young
        chunk = self._reader.get(key)
        if chunk is None or not has_blocks(chunk):
            return False
        self.write_blocks(chunk)
        return True

    def close(self) -> None:
        """Finish the chunk that is being written in a new order, and drop those that wait."""
        self.reordering.clear("closed")
        self.reordering.flush(60.0)


def is_due(requests: int) -> bool:
    """Return True if a chunk should be ordered after so many reports: 4, 8, 16, …, so that it is written seldom."""
    return requests >= FIRST_REQUESTS and requests & (requests - 1) == 0
