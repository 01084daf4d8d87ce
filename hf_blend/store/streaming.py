# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A stack of tiers that can also open a chunk and hand out its layers as they come."""

from collections.abc import Callable, Sequence
from weakref import WeakValueDictionary, finalize

from torch import Tensor

from ..loading.stream import FAULTS, StreamedLayers
from .bounded import BoundedTier
from .chunk import ChunkKey, ChunkKV
from .entry import EntryReader
from .stack import TierStack
from .tiers.base import EntryFault, Source

__all__ = ["StreamingStack"]

Recompute = Callable[[], ChunkKV]
READ_BYTES = 1 << 20  # layers that are smaller come several at a time: each read stops the thread that computes


class StreamingStack(TierStack):
    """`stream` beside `get`: the header is checked at once, every layer when it is read; held when all are there."""

    patience_s = 10.0

    def stream(self, key: ChunkKey, recompute: Recompute) -> ChunkKV | None:
        """Fetch a chunk whose layers may come later.

        Args:
            key: which chunk.
            recompute: computes the chunk anew, if a layer turns out to be damaged or does not come.

        Returns:
            The chunk; its `layers` wait for what is not there yet. None for a miss.
        """
        digest = key.digest
        flying = self._flying.get(digest)
        if flying is not None and flying.key == key:
            return flying
        if any(place.contains(digest) for place in self.held):
            return self.get(key)
        for distance, tier in enumerate(self.tiers):
            chunk = self._opened(tier, key, recompute, self.tiers[:distance])
            if chunk is not None:
                self._tally.count("hits", tier.name)
                self._flying[digest] = chunk
                return chunk
        return self.get(key)  # counts the miss, and reads a chunk whose header alone could not be read

    @property
    def _flying(self) -> "WeakValueDictionary[str, ChunkKV]":
        """Chunks that are being read: two requests share them."""
        return self.__dict__.setdefault("_in_flight", WeakValueDictionary())

    def _opened(
        self, tier: BoundedTier, key: ChunkKey, recompute: Recompute, nearer: tuple[BoundedTier, ...]
    ) -> ChunkKV | None:
        source = None
        try:
            source = tier.open(self._catalog.name(key.digest))
            if source is None or self._is_old(source.stat):
                return None
            reader = EntryReader(source, key, self._secret)
            return self._streamed(reader, source, tier, key, recompute, nearer)
        except FAULTS:
            if source is not None:
                source.close()
            return None

    def _streamed(
        self,
        reader: EntryReader,
        source: Source,
        tier: BoundedTier,
        key: ChunkKey,
        recompute: Recompute,
        nearer: tuple[BoundedTier, ...],
    ) -> ChunkKV:
        tables, layer_table = reader.tables(), reader.header.layer_table

        def read(place: int) -> Sequence[tuple[Tensor, Tensor]]:
            with self._tally.timed("load_seconds", tier.name):
                return reader.layers(place, READ_BYTES)

        def complete(layers: tuple[tuple[Tensor, Tensor], ...]) -> None:
            for other in nearer:
                if other.is_local:
                    self._copy(source, key, other)
            source.close()
            self._hold(ChunkKV(key, layers, tables, layer_table))

        def instead(fault: BaseException) -> ChunkKV:
            self._warn(key, tier, fault)
            self.miss(fault.reason if isinstance(fault, EntryFault) else type(fault).__name__)
            if isinstance(fault, EntryFault) and fault.corrupt:
                self._remove(tier, key.digest, source, "corrupt")
            return self.put(recompute())

        layers = StreamedLayers(len(layer_table), read, instead, complete, self.patience_s)
        finalize(layers, source.close).atexit = False  # also after a fault, or where a request ended early
        return ChunkKV(key, layers, tables, layer_table)  # type: ignore[arg-type]
