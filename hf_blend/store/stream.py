# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A chunk whose layers come one by one: each is verified when it is read, and waited for when it is used.

The pipeline of a request reads layers ahead of their use, by `fetch_kv`. A layer that nobody reads ahead is read when
it is used. A layer that is damaged, missing or late does not end the request: a chunk is used layer by layer through
`load`, which after a fault computes the chunk alone once more, as it was computed for the store. These layers replace
those that have not come, and equal those that were used already.
"""

import operator
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import finalize

from torch import Tensor

from .chunk import ChunkKey, ChunkKV, Layout
from .tiers.base import EntryFault

if TYPE_CHECKING:
    from .store import OpenEntry, Store

KV = tuple[Tensor, ...]
READ_BYTES = 1 << 20  # layers that are smaller come several at a time: each read stops the thread that computes
READ_S = 4e-3  # but from a slow tier no more at a time than come in so many seconds: the model waits for the first
FAULTS = (EntryFault, OSError, MemoryError)


class LazyLayers(Sequence[KV]):
    """Layers that are read when they are used. `recompute`, which a request sets, gives the chunk after a fault."""

    recompute: Callable[[], ChunkKV] | None = None

    def load(self, index: int) -> KV:
        """Give a layer; after a fault the chunk is computed first."""
        return self[index]


class StreamedLayers(LazyLayers):
    """The states of each layer, `[kv_heads, tokens, head_dim]` each, as `ChunkKV.layers`.

    `read` reads a layer and possibly some after it, `complete` receives all layers once they were read. One layer is
    waited for `patience_s` at most.
    """

    def __init__(
        self,
        count: int,
        read: Callable[[int], Sequence[KV]],
        complete: Callable[[tuple[KV, ...]], None] = lambda _: None,
        refuse: Callable[[BaseException], object] = lambda _: None,
        patience_s: float = 10.0,
    ) -> None:
        self._read = read
        self._complete = complete
        self._refuse = refuse  # receives the first fault
        self._patience_s = patience_s
        self._layers: list[KV | None] = [None] * count
        self._fault: BaseException | None = None  # of a read; no further layer is read
        self._changed = threading.Condition()
        self._reading = threading.RLock()
        self.reader: threading.Thread | None = None  # a pipeline's, which reads ahead

    def __len__(self) -> int:
        return len(self._layers)

    def __getitem__(self, index: Any) -> Any:
        """Wait for a layer; raises the fault if it cannot be read."""
        index = range(len(self))[operator.index(index)]
        self._wait(index)
        layer = self._layers[index]
        if layer is None:
            raise self._fault or EntryFault("late", f"layer {index} is not there", corrupt=False)
        return layer

    def load(self, index: int) -> KV:
        """Give a layer; after a fault the chunk is computed first."""
        self._wait(index)
        if self._layers[index] is None and self.recompute is not None:
            computed = self.recompute()
            with self._changed:
                for number, layer in enumerate(self._layers):
                    if layer is None:
                        self._layers[number] = computed.layers[number]
        return self[index]

    def fetch_kv(self, index: int, wait_s: float = -1) -> None:
        """Read a layer, unless it is there; a fault is kept for the user of the layer."""
        if not self._reading.acquire(timeout=wait_s):
            return
        try:
            if self._layers[index] is None and self._fault is None:
                self._fetch(index)
        finally:
            self._reading.release()

    def _fetch(self, index: int) -> None:
        """Read a layer and wake those who wait for it; the last one completes the chunk."""
        try:
            layers = self._read(index)
        except FAULTS as fault:
            self._give_up(fault)
            return
        with self._changed:
            self._layers[index : index + len(layers)] = layers
            self._changed.notify_all()
        arrived = tuple(layer for layer in self._layers if layer is not None)
        if len(arrived) == len(self._layers):
            self._complete(arrived)

    def _wait(self, index: int) -> None:
        """Return when a layer is there, or cannot be read, or was waited for too long."""
        if self._layers[index] is not None:
            return
        if self.reader is None or not self.reader.is_alive():
            self.fetch_kv(index, self._patience_s)
        with self._changed:
            until_s = time.monotonic() + self._patience_s
            while self._layers[index] is None and self._fault is None and time.monotonic() < until_s:
                self._changed.wait(until_s - time.monotonic())
            is_late = self._layers[index] is None and self._fault is None
        if is_late:
            self._give_up(EntryFault("late", f"layer {index} did not come in {self._patience_s:.3g} s", corrupt=False))

    def _give_up(self, fault: BaseException) -> None:
        with self._changed:
            is_first = self._fault is None
            self._fault = self._fault or fault
            self._changed.notify_all()
        if is_first:
            self._refuse(fault)


class LayerReader:
    """Reads chunks for requests, which use one layer of all their chunks after the other."""

    uses_memory = True  # False where a chunk that is whole in memory is not what a request loads

    def stream(self, key: ChunkKey, layout: Layout | None) -> ChunkKV | None:
        """Give a chunk whose layers are read when they are used, as `Store.stream` says."""
        raise NotImplementedError


class StreamReader(LayerReader):
    """Gives chunks before their layers are read."""

    patience_s = 10.0  # for a layer that a request waits for

    def __init__(self, store: "Store") -> None:
        self._store = store

    def stream(self, key: ChunkKey, layout: Layout | None) -> ChunkKV | None:
        """Give a chunk whose layers are read when they are used; all of it where it is in memory."""
        chunk = self._store.at_hand([key], layout).get(key)
        return chunk or self._store.fetch(key, lambda entry: self._streamed(entry, layout))

    def _streamed(self, entry: "OpenEntry", layout: Layout | None) -> ChunkKV:
        """Give the chunk of an opened entry, whose file stays open until its last layer was read."""
        store, tier, source = self._store, entry.tier, entry.source
        contents = store.format.open(source, entry.key, layout)
        tables = contents.tables()
        least_bytes = 0 if tier.is_local else READ_BYTES  # each read from far away costs a round trip

        def read(index: int) -> Sequence[KV]:
            nonlocal least_bytes
            began_s = time.perf_counter()
            layers = contents.layers(index, least_bytes)
            if tier.is_local:
                nbytes = sum(tensor.nbytes for states in layers for tensor in states)
                rate = nbytes / max(time.perf_counter() - began_s, 1e-6)
                least_bytes = min(READ_BYTES, 2 * nbytes, int(rate * READ_S))
            return layers

        def complete(layers: tuple[KV, ...]) -> None:
            source.close()
            store.promote(contents.chunk(layers, tables), entry)

        def refuse(fault: BaseException) -> None:
            store.counts.count("misses", store.refuse_entry(tier, entry.key, fault))

        layers = StreamedLayers(len(contents.layer_table), read, complete, refuse, self.patience_s)
        finalize(layers, source.close).atexit = False  # also after a fault, or if a request ends early
        return contents.chunk(layers, tables)
