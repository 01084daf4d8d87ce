# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Reads chunks in part: the nearest tier keeps them in blocks, and a request loads the blocks that matter to it."""

from collections.abc import Sequence
from weakref import finalize

from ...store import ChunkStore
from ...store.chunk import ChunkKey, ChunkKV, Layout
from ...store.store import OpenEntry
from ...store.stream import LayerReader
from ...store.tiers.base import EntryFault
from .blocked import BLOCK_TOKENS, BlockFormat, has_blocks
from .layers import PartialLayers, Recompute


def keep_in_blocks(store: ChunkStore, block_tokens: int = BLOCK_TOKENS) -> "PartialReader":
    """Have a store write chunks in blocks, and give them to requests as `PartialLayers`."""
    store.format = blocks = BlockFormat(store.format.codec, block_tokens)
    store.layer_reader = reader = PartialReader(store, blocks)
    return reader


class PartialReader(LayerReader):
    """Gives chunks whose blocks are read when a request has chosen them.

    A chunk of a farther tier, or of a kind that cannot be in blocks, is read whole.
    """

    uses_memory = False

    def __init__(self, store: ChunkStore, blocks: BlockFormat) -> None:
        self._store = store
        self._format = blocks
        self._near = store.tiers[0]

    def stream(self, key: ChunkKey, layout: Layout | None) -> ChunkKV | None:
        """Give a chunk whose layers are `PartialLayers`; all of it where the nearest tier has no blocks of it."""
        chunk, reason = self._store.load(self._near, key, lambda entry: self._open_blocks(entry, layout))
        if chunk is not None:
            self._store.counts.count("hits", self._near.name)
            return chunk
        chunk = self._store.get(key, layout)
        if chunk is not None and reason == "absent":
            self.write_blocks(chunk)
        return chunk

    def _open_blocks(self, entry: OpenEntry, layout: Layout | None) -> ChunkKV:
        contents = self._format.open(entry.source, entry.key, layout)
        if not contents.in_blocks:
            chunk = self._store.read(entry, layout)
            if has_blocks(chunk):
                self.write_blocks(chunk)
            return chunk

        def replace(fault: BaseException, recompute: Recompute | None) -> ChunkKV:
            self._store.refuse_entry(entry.tier, entry.key, fault)
            if recompute is None:
                raise fault
            computed = recompute()
            if isinstance(fault, EntryFault):
                self.write_blocks(computed, contents.order.tolist())
            return computed

        layers = PartialLayers(contents, replace)
        finalize(layers, entry.source.close).atexit = False
        return contents.chunk(layers, contents.tables())

    def write_blocks(self, chunk: ChunkKV, order: Sequence[int] | None = None) -> None:
        """Write a chunk in blocks, its tokens in an order; None is by importance."""
        self._store.replace(self._near, self._format.pack(chunk, order))
