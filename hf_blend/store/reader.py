# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Reads chunks: finds them in memories and tiers, opens and verifies their entries, and promotes what was read.

`get` asks the memories and queues (`ready`), then one tier after the other (`fetch`). It opens an entry there (`load`)
and decodes it: whole (`read`), or layer by layer (`stream.StreamReader`). What was read is promoted to nearer tiers.

A fault costs time, never correctness: whatever is missing, damaged, foreign or unreadable is a miss with a reason.
"""

import contextlib
import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ..threads import start
from .budget import BoundedTier
from .chunk import ChunkKey, ChunkKV, Layout
from .entry import EntryReader
from .storage import Storage
from .tiers.base import EntryFault, Source
from .writer import Writer

__all__ = ["Decode", "LateLoads", "OpenEntry", "Reader", "RecordedSource"]

MOST_LATE = 4  # loads that nobody waits for any more; while there are so many, a slow tier is not asked
Loaded = TypeVar("Loaded")


class OpenEntry(NamedTuple):
    """An entry of a tier that was opened to read a chunk."""

    tier: BoundedTier
    key: ChunkKey
    source: Source
    deletions: int  # of the store before it was opened: after another one the chunk is not stored again


Decode = Callable[[OpenEntry], ChunkKV]  # makes a chunk of an entry, and closes its source once all of it was read


class Reader:
    """Reads the chunks of one store whole."""

    def __init__(self, storage: Storage, writer: Writer) -> None:
        self.storage, self._writer, self._late = storage, writer, LateLoads()

    def get(self, key: ChunkKey, budget_s: float = math.inf, layout: Layout | None = None) -> ChunkKV | None:
        """Fetch a chunk from memory, a queue or a tier, as `BaseStore.get` says."""
        return self.ready(key, layout) or self.fetch(key, partial(self.read, layout=layout), budget_s)

    def cached(self, keys: Sequence[ChunkKey], layout: Layout | None) -> dict[ChunkKey, ChunkKV]:
        """Give those of some chunks that are in memory."""
        chunks: dict[ChunkKey, ChunkKV] = {}
        for memory in self.storage.memories:
            chunks |= memory.get([key for key in keys if key not in chunks] if chunks else keys, layout)
        return chunks

    def ready(self, key: ChunkKey, layout: Layout | None) -> ChunkKV | None:
        """Give a chunk that need not be read: it is in memory, or in the queue of a tier."""
        if chunk := self.cached((key,), layout).get(key):
            return chunk
        for queue in self.storage.queues.values():
            pending = queue.get(key.digest)
            if pending and pending.chunk.key == key and pending.chunk.fits(layout) and pending.guard.is_intact():
                self.storage.stats.count("hits", "queue")
                return pending.chunk
        return None

    def fetch(self, key: ChunkKey, decode: Decode, budget_s: float) -> ChunkKV | None:
        """Ask one tier after the other for a chunk, and count the hit or the miss."""
        stats, reasons = self.storage.stats, []
        for tier in self.storage.tiers:
            if tier.is_local or math.isinf(budget_s):
                loaded = self.load(tier, key, decode)
            else:
                loaded = self._late.run(partial(self.load, tier, key, decode), budget_s) or (None, "slow")
            chunk, reason = loaded
            if chunk is not None:
                stats.count("hits", tier.name)
                return chunk
            if reason == "slow":
                stats.count("load_failures", f"{tier.name}:slow")
                stats.warn_once(f"chunks of the {tier.name} tier are computed where that is faster than loading them")
            reasons.append(reason)
        stats.count("misses", next((reason for reason in reasons if reason != "absent"), "absent"))
        return None

    def load(self, tier: BoundedTier, key: ChunkKey, decode: Decode) -> tuple[ChunkKV | None, str]:
        """Open and decode an entry of one tier; returns a chunk and "", or None and the reason."""
        storage, source = self.storage, None
        name, deletions = storage.catalog.name(key.digest), storage.deletions
        with storage.stats.timed("load_seconds", tier.name), contextlib.ExitStack() as opened:
            try:
                source = tier.open(name)
                if source is None:
                    tier.forget(name)
                    return None, "absent"
                if storage.nearer(tier):
                    with contextlib.suppress(MemoryError):
                        source = RecordedSource(source)
                opened.callback(source.close)
                if storage.is_expired(source.stat):
                    raise EntryFault("expired", f"it was stored more than {storage.ttl_s} s ago")
                chunk = decode(OpenEntry(tier, key, source, deletions))
                opened.pop_all()  # now `decode` closes the source
                return chunk, ""
            except (EntryFault, OSError, MemoryError) as fault:
                storage.refuse_entry(tier, key, source, fault)
                reason = "io" if isinstance(fault, OSError) else "memory"
                return None, fault.reason if isinstance(fault, EntryFault) else reason

    def read(self, entry: OpenEntry, layout: Layout | None) -> ChunkKV:
        """Read all of an entry; nothing of it is used, or written to a nearer tier, before all of it was verified."""
        contents = EntryReader(entry.source, entry.key, layout)
        with contextlib.ExitStack() as reserved:
            for memory in self.storage.memories[-1:]:
                reserved.enter_context(memory.reserve(contents.nbytes))
            chunk = contents.read()
        self.storage.stats.count("loaded_bytes", entry.tier.name, chunk.nbytes)
        cached = self.promote(chunk, entry)
        entry.source.close()
        return cached

    def promote(self, chunk: ChunkKV, entry: OpenEntry) -> ChunkKV:
        """Take a verified chunk into memory, and its bytes into the nearer tiers of this machine."""
        if entry.deletions != self.storage.deletions:
            return chunk
        cached = self._writer.hold(chunk)
        content = entry.source.release() if isinstance(entry.source, RecordedSource) else None
        if content is not None:
            for tier in self.storage.nearer(entry.tier):
                self._writer.send(tier, chunk, lambda: [content])
        return cached


class LateLoads:
    """Runs loads that are given up when they take too long; they end by themselves, in threads of their own."""

    def __init__(self) -> None:
        self._late: set[Future[Any]] = set()

    def run(self, load: Callable[[], Loaded], budget_s: float) -> Loaded | None:
        """Load, and wait no longer than the budget."""
        if sum(not loading.done() for loading in list(self._late)) >= MOST_LATE:  # a parent's are done in its child
            return None
        try:
            loading = start(load, "hf_blend-load")
        except RuntimeError:  # no thread can be started
            return load()
        if wait([loading], budget_s).done:
            return loading.result()
        self._late.add(loading)
        loading.add_done_callback(self._late.discard)
        return None


class RecordedSource:
    """An opened object in front of another one, read from its first byte on; no byte of it is read twice."""

    def __init__(self, source: Source) -> None:
        self.stat, self.identity = source.stat, source.identity
        self._source = source
        # takes memory only as it is filled: whether the size is a sane one turns out when the header is read
        self._content = np.empty(source.stat.nbytes, np.uint8).data
        self._filled = 0  # bytes of it that were read, from the first on

    def read_into(self, start: int, target: memoryview) -> None:
        """Fill `target` with the bytes from `start` on; raises EntryFault("truncated") if there are fewer."""
        stop = start + len(target)
        if stop > self.stat.nbytes:
            raise EntryFault("truncated", f"the bytes end {stop - self.stat.nbytes} too early")
        if stop > self._filled:
            self._source.read_into(self._filled, self._content[self._filled : stop])
            self._filled = stop
        target[:] = self._content[start:stop]

    def release(self) -> memoryview | None:
        """Hand the whole object over, or None if some of it was not read; nothing can be read from here any more."""
        content, is_whole = self._content, self._filled == self.stat.nbytes
        self._content, self._filled = memoryview(b""), 0
        return content if is_whole else None

    def close(self) -> None:
        """Close the object; its bytes stay until they are released. Closing twice is allowed."""
        self._source.close()
