# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A chunk whose layers come one by one: each is verified when it is read, and waited for when it is used.

A `StreamReader` opens an entry (`_Stream`) and returns a `ChunkKV` whose `layers` are a `StreamedLayers`. The pipeline
of a request reads layers ahead of their use, by `fetch_kv`. A layer that nobody reads ahead is read when it is used.

A layer that is damaged, missing or late is no reason to begin the request again: the chunk is computed alone once
more, as it was when it was stored. Its layers take the place of those that have not come; the layers that were used
already are the same.
"""

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload
from weakref import WeakValueDictionary, finalize

from torch import Tensor

from .chunk import ChunkKey, ChunkKV, Layout
from .entry import EntryReader
from .guard import Guard
from .reader import OpenEntry, Reader
from .tiers.base import EntryFault
from .writer import Writer

__all__ = ["ComputeTimes", "LayerReader", "Recompute", "StreamReader", "StreamedLayers"]

KV = tuple[Tensor, ...]
Recompute = Callable[[], ChunkKV]
POLL_S = 0.05
READ_BYTES = 1 << 20  # layers that are smaller come several at a time: each read stops the thread that computes
READ_S = 4e-3  # but from a slow tier no more at a time than come in so many seconds: the model waits for the first
FAULTS = (EntryFault, OSError, MemoryError)
_NEW_SHARE = 0.25  # of the newest time in the average


class LayerReader:
    """Reads chunks for requests, which use one layer of all their chunks after the other."""

    uses_memory = True  # False where a chunk that is whole in memory is not what a request loads
    reads_importance = False  # True where it depends on which tokens are important

    def stream(
        self, key: ChunkKey, recompute: Recompute, budget_s: float | None, layout: Layout | None
    ) -> ChunkKV | None:
        """Give a chunk whose layers are read when they are used, as `BaseStore.stream` says."""
        raise NotImplementedError

    def note(self, key: ChunkKey) -> None:
        """Take notice that the store knows more of which tokens of a chunk are important."""

    def close(self) -> None:
        """Finish what is under way."""


class ComputeTimes:
    """Seconds per token that chunks of each model took to compute and put, as a moving average."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._per_token_s: dict[str, float] = {}
        self._lock = threading.RLock()

    @contextlib.contextmanager
    def timed(self, *keys: ChunkKey) -> Iterator[None]:
        """Learn from a block that computes chunks of one model and puts them: by then a device has finished."""
        began_s = self._clock()
        yield
        took_s = (self._clock() - began_s) / sum(len(key.token_ids) for key in keys)
        identity = keys[0].fingerprint
        with self._lock:
            known_s = self._per_token_s.get(identity, took_s)
            self._per_token_s[identity] = known_s + _NEW_SHARE * (took_s - known_s)

    def expect_s(self, key: ChunkKey) -> float:
        """How long computing a chunk takes, in seconds; infinite as long as none of its model was computed."""
        return len(key.token_ids) * self._per_token_s.get(key.fingerprint, math.inf)


class StreamReader(LayerReader):
    """Gives chunks before their layers are read."""

    patience_s = 10.0  # for a layer that a request waits for

    def __init__(self, reader: Reader, writer: Writer, times: ComputeTimes) -> None:
        self.reader, self.writer, self.times = reader, writer, times
        self._streams: WeakValueDictionary[str, ChunkKV] = WeakValueDictionary()  # under way; two requests share one

    def stream(
        self, key: ChunkKey, recompute: Recompute, budget_s: float | None, layout: Layout | None
    ) -> ChunkKV | None:
        """Give a chunk whose layers are read when they are used; all of it where it is in memory."""
        shared = self._streams.get(key.digest)
        if shared is not None and shared.key == key and shared.fits(layout):
            return shared
        if ready := self.reader.ready(key, layout):
            return ready
        budget_s = self.times.expect_s(key) if budget_s is None else budget_s
        stop_s = time.monotonic() + budget_s
        chunk = self.reader.fetch(key, lambda entry: _Stream(self, entry, recompute, layout).chunk(stop_s), budget_s)
        if chunk is not None and type(chunk.layers) is StreamedLayers:
            self._streams[key.digest] = chunk
        return chunk


class _Stream:
    """An entry that is read layer by layer while a request computes; its file stays open until the last."""

    def __init__(self, opener: StreamReader, entry: OpenEntry, recompute: Recompute, layout: Layout | None) -> None:
        self._opener, self._entry, self._recompute = opener, entry, recompute
        self._storage = opener.reader.storage
        self._contents = EntryReader(entry.source, entry.key, layout)
        self._tables = self._contents.tables()
        self._guards = [Guard(tensor for pair in self._tables for tensor in pair)]  # used before all of it is stored
        self._least_bytes = 0 if entry.tier.is_local else READ_BYTES  # each read from far away costs a round trip

    def chunk(self, stop_s: float) -> ChunkKV:
        """Give the chunk, whose layers are read when they are needed, and waited for until some time at most."""
        budget_s = math.inf if self._entry.tier.is_local else max(0.0, stop_s - time.monotonic())
        count, patience_s = len(self._contents.layer_table), self._opener.patience_s
        layers = StreamedLayers(count, self._read, self._replace, self._complete, patience_s, budget_s)
        finalize(layers, self._entry.source.close).atexit = False  # also after a fault, or if a request ends early
        return self._contents.chunk(layers, self._tables)

    def _read(self, index: int) -> Sequence[KV]:
        """Read a layer, and as many behind it as make a read worth its while."""
        began_s, tier, stats = time.perf_counter(), self._entry.tier, self._storage.stats
        with stats.timed("load_seconds", tier.name):
            layers = self._contents.layers(index, self._least_bytes)
        nbytes = sum(tensor.nbytes for states in layers for tensor in states)
        stats.count("loaded_bytes", tier.name, nbytes)
        if tier.is_local:
            rate = nbytes / max(time.perf_counter() - began_s, 1e-6)
            self._least_bytes = min(READ_BYTES, 2 * nbytes, int(rate * READ_S))
        self._guards.append(Guard(tensor for states in layers for tensor in states))
        return layers

    def _complete(self, layers: tuple[KV, ...]) -> None:
        """Promote the chunk as one that was read at once, unless something was written to it since."""
        self._entry.source.close()
        if all(guard.is_intact() for guard in self._guards):
            self._opener.reader.promote(self._contents.chunk(layers, self._tables), self._entry)

    def _replace(self, fault: BaseException) -> ChunkKV:
        """Compute and store the chunk again after a fault."""
        tier, key, source, _ = self._entry
        self._storage.stats.count("misses", self._storage.refuse_entry(tier, key, source, fault))
        with self._opener.times.timed(key):
            return self._opener.writer.put(self._recompute())


class StreamedLayers(Sequence[KV]):
    """The states of each layer, `[kv_heads, tokens, head_dim]` each, as `ChunkKV.layers`.

    `read` reads a layer and possibly some after it, `recompute` gives the chunk after a fault, `complete` receives
    all layers once they were read. One layer is waited for `patience_s` at most, all together for `budget_s`.
    """

    def __init__(
        self,
        count: int,
        read: Callable[[int], Sequence[KV]],
        recompute: Callable[[BaseException], ChunkKV],
        complete: Callable[[tuple[KV, ...]], None],
        patience_s: float,
        budget_s: float = math.inf,
    ) -> None:
        self._read, self._recompute, self._complete, self._patience_s = read, recompute, complete, patience_s
        self._budget_s = budget_s
        self._layers: list[KV | None] = [None] * count
        self._fault: BaseException | None = None  # of a read; no further layer is read
        self._instead: ChunkKV | None = None  # the chunk computed again
        self._changed, self._reading = threading.Condition(), threading.RLock()
        self.drivers: list[Any] = []  # pipelines that read ahead; told how far use has come

    def __len__(self) -> int:
        return len(self._layers)

    @overload
    def __getitem__(self, index: int) -> KV: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[KV]: ...
    def __getitem__(self, index: int | slice) -> KV | Sequence[KV]:
        """Wait for a layer, or for several."""
        if isinstance(index, slice):
            return [self[layer] for layer in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        for driver in self.drivers:
            driver.synchronize(index)
        layer = self._layers[index]
        return self._awaited(index) if layer is None else layer

    def peek(self, index: int) -> KV | None:
        """Wait for a layer that another thread reads; None if nobody does, or it was not read in time."""
        with self._changed:
            until_s = time.monotonic() + min(self._patience_s, self._budget_s)
            while self._layers[index] is None and self._is_coming and time.monotonic() < until_s:
                self._changed.wait(POLL_S)  # a driver that ends says nothing
            return self._layers[index]

    @property
    def _is_coming(self) -> bool:
        is_sound = self._fault is None and self._instead is None
        return is_sound and any(driver.is_running for driver in self.drivers)

    def fetch_kv(self, index: int, wait_s: float = -1) -> None:
        """Read a layer, unless it is there; a fault is kept for whoever needs the layer."""
        if not self._reading.acquire(timeout=wait_s):
            return
        try:
            if self._layers[index] is None and self._fault is None and self._instead is None:
                self._take(index)
        finally:
            self._reading.release()

    def _take(self, index: int) -> None:
        """Read a layer and wake those who wait for it; the last one completes the chunk."""
        layers: Sequence[KV] = ()
        try:
            layers, fault = self._read(index), None
        except FAULTS as error:
            fault = error
        with self._changed:
            self._layers[index : index + len(layers)], self._fault = layers, fault
            self._changed.notify_all()
        arrived = [layer for layer in self._layers if layer is not None]
        if len(arrived) == len(self._layers):
            self._complete(tuple(arrived))

    def _awaited(self, index: int) -> KV:
        """Wait for a layer; after a fault, or too long, compute the chunk again and take its layer."""
        patience_s, reason = min((self._patience_s, "late"), (max(0.0, self._budget_s), "slow"))
        if not any(driver.is_running for driver in self.drivers):
            self._fetch_here(index)
        began_s = time.monotonic()
        with self._changed:
            while self._layers[index] is None and self._fault is None and self._instead is None:
                left_s = began_s + patience_s - time.monotonic()
                if left_s <= 0 or not self._changed.wait(left_s):
                    detail = f"layer {index} did not come in {patience_s:.3g} s"
                    self._fault = EntryFault(reason, detail, corrupt=False)
            self._budget_s -= time.monotonic() - began_s
            layer = self._layers[index]
            if layer is not None:
                return layer
            if self._instead is None and self._fault is not None:
                self._instead = self._recompute(self._fault)
            if self._instead is None:
                raise EntryFault("late", f"layer {index} is not there", corrupt=False)
            self._layers[index] = self._instead.layers[index]
            return self._instead.layers[index]

    def _fetch_here(self, index: int) -> None:
        """Read a layer where nobody reads ahead: in a thread that can be left if there is a budget."""
        if math.isinf(self._budget_s):
            self.fetch_kv(index, self._patience_s)
        else:
            threading.Thread(target=self.fetch_kv, args=(index,), name="hf_blend-load", daemon=True).start()
