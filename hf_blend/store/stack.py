# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The tiers of a store one behind the other: the nearest is asked first, and every byte is verified."""

import contextlib
import errno
import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from weakref import WeakValueDictionary, finalize

from torch import Tensor

from .bounded import BoundedTier
from .catalog import Catalog
from .chunk import ChunkKey, ChunkKV, Layout
from .entry import EntryReader, encode_entry, read_key, stored_as
from .guard import Guard
from .index import Index
from .locks import new_lock
from .memory import MemoryCache
from .slow import ComputeTimes, LateLoads, PendingWrite, RecordedSource, WriteQueue
from .stats import StoreStats
from .stream import StreamedLayers
from .tiers.base import EntryFault, ObjectStat, Source

__all__ = ["CheckResult", "TierStack"]

Encoded = Callable[[], Sequence[memoryview]]  # the bytes of an entry, made when they are needed
Take = Callable[[BoundedTier, ChunkKey, Source], ChunkKV]  # makes a chunk of an opened entry, and closes it
Recompute = Callable[[], ChunkKV]
READ_BYTES = 1 << 20  # layers that are smaller come several at a time: each read stops the thread that computes
READ_S = 4e-3  # but from a slow tier no more at a time than come in so many seconds: the model waits for the first
_UNLOCKED = contextlib.nullcontext()
DELETE_S = 60.0  # how long a delete waits for a write of the same chunk that is under way


@dataclass(frozen=True)
class CheckResult:
    """What a check of one entry found."""

    digest: str
    tier: str
    nbytes: int
    reason: str = ""
    removed: bool = False


class TierStack:
    """Chunks ready to use in memory, and behind them tiers that keep bytes, the nearest first.

    A fault never leaves here: it is a miss, counted, and warned of once. A chunk that comes from a farther tier is
    taken into memory, and the bytes that were verified are written to the nearer ones. A chunk that is put goes to
    every tier: when `put` returns, it is in those on this machine, and in the queue of the others. What is in a queue
    is found there.

    With a `home` each chunk is in one tier: it is put there, or, where that refuses it, in the nearest before it. What
    leaves it for want of room moves to the next tier behind it, and what is read from behind it moves back. A chunk is
    written before it leaves: a process that is killed in between leaves it twice, and the next one that reads it
    removes the copy.
    """

    patience_s = 10.0  # for a layer that a request waits for

    def __init__(
        self,
        memories: Sequence[MemoryCache],
        tiers: Sequence[BoundedTier],
        catalog: Catalog,
        stats: StoreStats,
        queued: Index,
        *,
        secret: bytes | None = None,
        ttl_s: float | None = None,
        codec: str = "raw",
        queue_bytes: int = 1 << 30,
        known_share: Callable[[str], float | None] = lambda _: None,
        home: str | None = None,
    ) -> None:
        self.memories, self.tiers = tuple(memories), tuple(tiers)
        self.home = next((tier for tier in tiers if tier.name == home), None)
        self._moving = new_lock()  # taken before any tier's own; no chunk is moved by two threads at once
        for near, far in pairwise(tiers) if self.home else ():
            near.before_eviction = partial(self._demote, near, far)
            far.makes_room = far is not self.home
        self.queues = {tier.name: self._new_queue(tier, queue_bytes) for tier in tiers} if queue_bytes else {}
        self.stats, self.secret = stats, secret
        self._queued_index = queued  # of what waits in the queues
        self.compute_times = ComputeTimes()
        self.deleted = 0  # deletes so far: what was read before one is not stored after it
        self._known_share, self._catalog, self._ttl_s, self._codec = known_share, catalog, ttl_s, codec
        self._late = LateLoads()
        self._flying: WeakValueDictionary[str, ChunkKV] = WeakValueDictionary()  # being read; two requests share it

    def load(self, key: ChunkKey, budget_s: float = math.inf, layout: Layout | None = None) -> ChunkKV | None:
        """Read a chunk that is not in memory, and take it there."""
        return self._queued(key, layout) or self._fetch(key, partial(self._read, layout=layout), budget_s)

    def stream(
        self, key: ChunkKey, recompute: Recompute, budget_s: float | None = None, layout: Layout | None = None
    ) -> ChunkKV | None:
        """Fetch a chunk whose layers may come later."""
        flying = self._flying.get(key.digest)
        if flying is not None and flying.key == key and flying.fits(layout):
            return flying
        found = next((one for one in (memory.get(key, layout) for memory in self.memories) if one), None)
        if found or (found := self._queued(key, layout)):
            return found
        budget_s = self.compute_times.expect_s(key) if budget_s is None else budget_s
        take = partial(self._streamed, recompute=recompute, stop_s=time.monotonic() + budget_s, layout=layout)
        chunk = self._fetch(key, take, budget_s)
        if chunk is not None and type(chunk.layers) is StreamedLayers:
            self._flying[key.digest] = chunk
        return chunk

    def put(self, chunk: ChunkKV, wait_s: float = 0.0) -> ChunkKV:
        """Take a chunk into memory, write it to every tier or into its queue, and tell the catalog."""
        digest = chunk.key.digest
        here = (memory.peek(digest) for memory in self.memories if memory.device is None)
        mine = next((one for one in here if one and one.key == chunk.key), None) or chunk.own_copy()
        stored = stored_as(mine, self._codec)
        self._hold(stored)
        encoded = functools.cache(partial(encode_entry, mine, self.secret, self._codec))
        stats: dict[str, ObjectStat | None] = {}
        for tier in self.tiers[self.tiers.index(self.home) :] if self.home else self.tiers:
            write = self._write if tier.is_local else partial(self._send, wait_s=wait_s)
            stats[tier.name] = write(tier, stored, encoded)
            if self.home and (stats[tier.name] or not tier.is_local):
                break
        for name, stat in stats.items():
            if stat is not None:
                self._catalog.add(chunk.key, stat, name)
        return chunk if stored is mine else stored

    def contains(self, digest: str) -> bool:
        """Return True if a tier has a chunk, without reading it."""
        return self.tier_of(digest) is not None

    def tier_of(self, digest: str) -> str | None:
        """Name the nearest tier that has a chunk; None if none has it, or says so now."""
        for name, held in self.at_hand():
            if held.contains(digest):
                return name
        for tier in self.tiers:
            with contextlib.suppress(OSError):
                if tier.contains(self._catalog.name(digest)):
                    return tier.name
        return None

    def is_held(self, digest: str) -> bool:
        """Return True if a chunk is ready to use."""
        return any(tier.contains(digest) for _, tier in self.at_hand())

    def at_hand(self) -> list[tuple[str, MemoryCache | WriteQueue[PendingWrite]]]:
        """Give what a chunk is found in without reading, by name, the nearest first."""
        memories: list[tuple[str, MemoryCache | WriteQueue[PendingWrite]]] = [
            (memory.name, memory) for memory in self.memories
        ]
        return [*memories, *(("queue", queue) for queue in self.queues.values())]

    def delete(self, digest: str) -> bool:
        """Remove a chunk from every queue and tier; raises OSError if one refuses, or takes too long to write it."""
        self.deleted += 1
        removed = [queue.cancel(digest, DELETE_S) for queue in self.queues.values()]  # may itself wait for `_moving`
        self._queued_index.remove(digest)
        with self._moving:
            removed += [tier.delete(self._catalog.name(digest)) for tier in self.tiers]
        removed += [memory.delete(digest) for memory in self.memories]
        self._catalog.forget(digest)
        return any(removed)

    def set_pin(self, digest: str, pinned: bool) -> None:
        """Keep a chunk from being evicted from any tier, or let it; raises OSError if a tier cannot note it."""
        for memory in self.memories:
            memory.set_pin(digest, pinned)
        for tier in self.tiers:
            tier.set_pin(self._catalog.name(digest), pinned)

    def protect(self, digests: Sequence[str]) -> None:
        """Keep the chunks of a running request in memory: those that are there, and those that will be."""
        for memory in self.memories:
            memory.protect(digests)

    def release(self, digests: Sequence[str]) -> None:
        """Take one `protect` back."""
        for memory in self.memories:
            memory.release(digests)

    def pins(self) -> frozenset[str]:
        """Names of the entries that some tier must not evict."""
        return frozenset(name for tier in self.tiers for name in tier.pins())

    def verify(self, tier: BoundedTier, name: str, repair: bool) -> CheckResult:
        """Read and verify one entry."""
        source, digest = None, self._catalog.digest(name)
        with contextlib.ExitStack() as opened:
            try:
                source = tier.tier.open(name)
                if source is None:
                    return CheckResult(digest, tier.name, 0, "absent")
                opened.callback(source.close)
                return CheckResult(self._verified(name, source).digest, tier.name, source.stat.nbytes)
            except EntryFault as fault:
                removed = repair and fault.corrupt and self._remove(tier, name, source, "corrupt")
                return CheckResult(digest, tier.name, source.stat.nbytes if source else 0, fault.reason, removed)
            except (OSError, MemoryError) as error:
                return CheckResult(digest, tier.name, 0, type(error).__name__)

    def expire(self, tier: BoundedTier) -> int:
        """Remove the entries of this namespace that are too old from a tier, and count them."""
        self._catalog.refresh(thorough=True)
        names = list(tier.index.owned(self._catalog.owner))
        return sum(self._remove(tier, name, None, "expired") for name in names if self.is_old(_stat(tier, name)))

    def record_importance(self, digest: str, important_ratio: float) -> None:
        """Tell every tier which share of a chunk's tokens turned out to be important."""
        for memory in self.memories:
            memory.use(digest, important_ratio)
        for tier in self.tiers:
            tier.use(self._catalog.name(digest), important_ratio)

    def move(self, digest: str, target: str) -> bool:
        """Keep a chunk in one of the tiers that keep bytes: it is written there before it leaves the others."""
        name, there = self._catalog.name(digest), next(tier for tier in self.tiers if tier.name == target)
        others = [tier for tier in self.tiers if tier is not there]
        with self._moving:
            is_there = self._has_good(there, name) or any(self._copy(tier, there, name) for tier in others)
        for other in others if is_there else ():
            if other.name in self.queues:
                self.queues[other.name].cancel(digest, DELETE_S)  # what is being written may wait for `_moving`
            with self._moving:
                is_there = there.contains(name)
                if is_there:
                    other.delete(name)
                    self._catalog.forget(digest, other.name)
        return is_there

    def shrink(self, tier: BoundedTier, most_bytes: int) -> int:
        """Evict from a tier until no more than so many bytes are left; gives the bytes that left."""
        with self._moving:
            return tier.shrink(most_bytes)

    def flush(self, wait_s: float) -> bool:
        """Wait until every queue is empty, so many seconds at most; False if something still waits."""
        stop_s = time.monotonic() + wait_s
        return all(queue.flush(max(0.0, stop_s - time.monotonic())) for queue in self.queues.values())

    def close(self, wait_s: float) -> None:
        """Flush, drop and count what is in the queues after so many seconds, and close all."""
        if not self.flush(wait_s):
            for queue in self.queues.values():
                queue.clear("closed")
        for tier in self.tiers:
            tier.close()
        for memory in self.memories:
            memory.clear()

    def is_old(self, stat: ObjectStat | None) -> bool:
        """Return True for an entry that is too old; one from the future is as old as it is far off: clocks differ."""
        return self._ttl_s is not None and stat is not None and abs(time.time() - stat.created) > self._ttl_s

    def store_read(self, chunk: ChunkKV, tier: BoundedTier, source: Source, deleted: int) -> ChunkKV:
        """Take a chunk that was read into memory, and write the verified bytes to the nearer tiers of this machine."""
        if deleted != self.deleted:
            return chunk
        held = self._hold(chunk)
        content = source.release() if isinstance(source, RecordedSource) else None
        if content is not None:
            for other in self._nearer(tier):
                stat = self._send(other, chunk, lambda: [content])
                if stat is not None:
                    self._catalog.add(chunk.key, stat, other.name)
        else:
            self._leave_others(chunk.key.digest, tier)
        return held

    def refuse(self, tier: BoundedTier, key: ChunkKey, source: Source | None, fault: BaseException) -> str:
        """Count what was wrong with an entry, warn of it once, and remove what can never become good.

        What is not sealed as this store seals (reason secret) goes too: it is under a name that only a holder of the
        store's secret can compute, or, without a secret, that no signed entry has.
        """
        reason = fault.reason if isinstance(fault, EntryFault) else type(fault).__name__
        self.stats.count("load_failures", f"{tier.name}:{reason}")
        self.stats.warn_once(f"stored chunk {key.digest} is not used and will be computed again: {fault}")
        if isinstance(fault, EntryFault) and (fault.corrupt or reason == "secret"):
            name = self._catalog.name(key.digest)
            self._remove(tier, name, source, "expired" if reason == "expired" else "corrupt")
        return reason

    def _queued(self, key: ChunkKey, layout: Layout | None) -> ChunkKV | None:
        """Find a chunk on its way to a tier."""
        for queue in self.queues.values():
            pending = queue.get(key.digest)
            if pending is not None and pending.chunk.key == key and pending.chunk.fits(layout):
                self.stats.count("hits", "queue")
                return pending.chunk
        return None

    def _fetch(self, key: ChunkKey, take: Take, budget_s: float) -> ChunkKV | None:
        """Ask the tiers that keep bytes, and count the hit or the miss."""
        reasons = []
        for tier in self.tiers:
            chunk, reason = self._load_within(tier, key, take, budget_s)
            if chunk is not None:
                self.stats.count("hits", tier.name)
                return chunk
            reasons.append(reason)
        self.stats.count("misses", next((reason for reason in reasons if reason != "absent"), "absent"))
        return None

    def _hold(self, chunk: ChunkKV) -> ChunkKV:
        """Take a chunk into memory where there is room for it; gives it as the nearest memory has it."""
        digest = chunk.key.digest
        for memory in self.memories:
            try:
                self._count_evicted(memory, memory.put(chunk))
                if memory.reads_importance and (share := self._known_share(digest)) is not None:
                    memory.use(digest, share)
            except (RuntimeError, MemoryError) as error:  # of a device that is full
                self.stats.count("store_failures", type(error).__name__)
                self.stats.warn_once(f"chunks cannot be held in the {memory.name} tier ({error})")
        return next((one for one in (memory.peek(digest) for memory in self.memories) if one), chunk)

    def _count_evicted(self, memory: MemoryCache, gone: Sequence[str]) -> None:
        self.stats.count("evicted", memory.name, len(gone))

    def _new_queue(self, tier: BoundedTier, queue_bytes: int) -> WriteQueue[PendingWrite]:
        def write(pending: PendingWrite) -> None:
            if not pending.guard.is_intact():
                return drop("changed")
            self._write_behind(tier, pending.chunk, lambda: pending.parts)

        def drop(reason: str) -> None:
            self.stats.count("dropped_writes", f"{tier.name}:{reason}")
            self.stats.warn_once(f"chunks are not written to the {tier.name} tier ({reason}); see dropped_writes")

        return WriteQueue(queue_bytes, write, self._left_queue, drop)

    def _left_queue(self, digest: str) -> None:
        if not any(queue.contains(digest) for queue in self.queues.values()):
            self._queued_index.remove(digest)

    def _send(self, tier: BoundedTier, chunk: ChunkKV, encoded: Encoded, wait_s: float = 0.0) -> ObjectStat | None:
        """Queue an entry for a tier, or write it now if there are no queues.

        Its digests are computed now: what is written to the tensors while they wait is noticed when they are read.
        """
        if not self.queues:
            return self._write_behind(tier, chunk, encoded)
        try:
            pending = PendingWrite(chunk, encoded())
            if self.queues[tier.name].put(pending, wait_s):
                self._queued_index.enter(pending.digest, pending.nbytes, time.time(), 0.0, "", "")
                self._queued_index.describe(pending.digest, chunk.key, "")
                self._left_queue(pending.digest)  # it may have been written already
        except (OSError, MemoryError) as error:
            self._refuse_write(tier, error)
        return None

    def _write_behind(self, tier: BoundedTier, chunk: ChunkKV, encoded: Encoded) -> ObjectStat | None:
        """Write an entry to a tier; what the home of all chunks refuses goes to the nearest tier before it."""
        nearer = reversed(self.tiers[: self.tiers.index(tier)]) if tier is self.home else ()
        for one in (tier, *nearer):
            stat = self._write(one, chunk, encoded)
            if stat is not None:
                self._catalog.add(chunk.key, stat, one.name)
                return stat if one is tier else None
        return None

    def _write(self, tier: BoundedTier, chunk: ChunkKV, encoded: Encoded) -> ObjectStat | None:
        name = self._catalog.name(chunk.key.digest)
        try:
            if not tier.contains(name):
                with self.stats.timed("store_seconds", tier.name), self._moving if self.home else _UNLOCKED:
                    stored = tier.put_if_absent(name, encoded())
                    if stored:
                        self._leave_others(chunk.key.digest, tier)
                self.stats.count("stored", tier.name, int(stored))
                if tier.reads_importance and (share := self._known_share(chunk.key.digest)) is not None:
                    tier.use(name, share)
            return tier.stat(name)
        except (OSError, MemoryError, EntryFault) as error:
            self._refuse_write(tier, error)
            return None

    def _refuse_write(self, tier: BoundedTier, error: Exception) -> None:
        reason = errno.errorcode.get(getattr(error, "errno", None) or 0, type(error).__name__)
        self.stats.count("store_failures", reason)
        self.stats.warn_once(f"chunks cannot be stored in the {tier.name} tier ({error}); other tiers may have them")

    def _nearer(self, tier: BoundedTier) -> list[BoundedTier]:
        """The tiers that will have what was read from one."""
        nearer = [other for other in self.tiers[: self.tiers.index(tier)] if other.is_local]
        return nearer if self.home is None else [other for other in nearer if other is self.home]

    def _load_within(
        self, tier: BoundedTier, key: ChunkKey, take: Take, budget_s: float
    ) -> tuple[ChunkKV | None, str]:
        """The chunk and "", or None and why not."""
        if tier.is_local or math.isinf(budget_s):
            return self._load(tier, key, take)
        loaded = self._late.run(lambda: self._load(tier, key, take), budget_s)
        if loaded is not None:
            return loaded
        self.stats.count("load_failures", f"{tier.name}:slow")
        self.stats.warn_once(f"chunks of the {tier.name} tier are computed where that is faster than loading them")
        return None, "slow"

    def _load(self, tier: BoundedTier, key: ChunkKey, take: Take) -> tuple[ChunkKV | None, str]:
        with self.stats.timed("load_seconds", tier.name), contextlib.ExitStack() as opened:
            source = None
            try:
                source = self._open(tier, key)
                if source is None:
                    self._catalog.forget(key.digest, tier.name)
                    return None, "absent"
                opened.callback(source.close)
                if self.is_old(source.stat):
                    raise EntryFault("expired", f"it was stored more than {self._ttl_s} s ago")
                chunk = take(tier, key, source)
                opened.pop_all()
                return chunk, ""
            except EntryFault as fault:
                return None, self.refuse(tier, key, source, fault)
            except (OSError, MemoryError) as error:
                self.refuse(tier, key, source, error)
                return None, "io" if isinstance(error, OSError) else "memory"

    def _open(self, tier: BoundedTier, key: ChunkKey) -> Source | None:
        """Open an entry, whose bytes are recorded if nearer tiers will have them too."""
        source = tier.open(self._catalog.name(key.digest))
        if source is not None and self._nearer(tier):
            with contextlib.suppress(MemoryError):
                return RecordedSource(source)
        return source

    def _read(self, tier: BoundedTier, key: ChunkKey, source: Source, *, layout: Layout | None) -> ChunkKV:
        """Nothing that is read is used, or written to a nearer tier, before all of it was checked."""
        deleted, reader = self.deleted, EntryReader(source, key, self.secret, layout)
        with contextlib.ExitStack() as reserved:
            for memory in self.memories[-1:]:
                self._count_evicted(memory, reserved.enter_context(memory.reserve(reader.nbytes)))
            chunk = reader.read()
        self.stats.count("loaded_bytes", tier.name, chunk.nbytes)
        stored = self.store_read(chunk, tier, source, deleted)
        source.close()
        return stored

    def _streamed(
        self,
        tier: BoundedTier,
        key: ChunkKey,
        source: Source,
        *,
        recompute: Recompute,
        stop_s: float,
        layout: Layout | None,
    ) -> ChunkKV:
        deleted, reader = self.deleted, EntryReader(source, key, self.secret, layout)
        streaming = StreamingRead(self, tier, source, reader, recompute, deleted)
        left_s = math.inf if tier.is_local else max(0.0, stop_s - time.monotonic())
        return streaming.start(self.patience_s, left_s)

    def _verified(self, name: str, source: Source) -> ChunkKey:
        """Read all of an entry that should have a name; gives its key, or raises what is wrong."""
        key = read_key(source, self._catalog.namespace, self.secret)
        if self._catalog.name(key.digest) != name:
            raise EntryFault("key", f"it is {key.digest}")
        EntryReader(source, key, self.secret).read()
        return key

    def _has_good(self, tier: BoundedTier, name: str) -> bool:
        """Return True if a tier has an entry that is good; what can never become good is removed."""
        return self.verify(tier, name, repair=True).reason == ""

    def _copy(self, tier: BoundedTier, target: BoundedTier, name: str) -> bool:
        """Write the bytes of one tier's entry to another tier, once all of them were verified."""
        source = tier.open(name)
        if source is None:
            return False
        recorded = RecordedSource(source)
        try:
            key = self._verified(name, recorded)
            content = recorded.release()
        except EntryFault as fault:
            self.stats.count("load_failures", f"{tier.name}:{fault.reason}")
            return False
        finally:
            recorded.close()
        if content is None:
            return False
        if not target.put_if_absent(name, [content]) and not self._has_good(target, name):
            return False  # what has its name there is damaged, or cannot be read now
        stat = target.stat(name)
        if stat is not None:
            self._catalog.add(key, stat, target.name)
        return stat is not None

    def _demote(self, near: BoundedTier, far: BoundedTier, name: str) -> None:
        """Write what a full tier evicts to the next one; what that refuses is evicted all the same."""
        try:
            source = near.tier.open(name)
            if source is None:
                return
            with contextlib.closing(source):
                content = memoryview(bytearray(source.stat.nbytes))
                source.read_into(0, content)
            far.put_if_absent(name, [content])
        except (OSError, MemoryError, EntryFault) as error:
            self._refuse_write(far, error)
            return
        self._catalog.copied(name, near, far)
        self.stats.count("moved", far.name)

    def _leave_others(self, digest: str, there: BoundedTier) -> None:
        """Where each chunk is in one tier, remove it from the others once one has it."""
        name = self._catalog.name(digest)
        for other in self.tiers if self.home else ():
            with contextlib.suppress(OSError):
                # of one on another machine, as of its last listing
                if other is there or not (other.contains(name) if other.is_local else name in other.index):
                    continue
                with self._moving:
                    removed = there.contains(name) and other.delete(name)
                self.stats.count("moved", there.name, int(removed))
                self._catalog.forget(digest, other.name)

    def _remove(self, tier: BoundedTier, name: str, source: Source | None, cause: str) -> bool:
        """Make room for a good entry, unless another process already put one there."""
        removed = False
        with contextlib.suppress(OSError):
            removed = tier.delete(name, source)
            self.stats.count("removed", cause, int(removed))
        return removed


class StreamingRead:
    """An entry that is read layer by layer while a request computes; its file stays open until the last."""

    def __init__(
        self,
        stack: TierStack,
        tier: BoundedTier,
        source: Source,
        reader: EntryReader,
        recompute: Recompute,
        deleted: int,
    ) -> None:
        self._stack, self._tier, self._source, self._reader = stack, tier, source, reader
        self._recompute, self._deleted = recompute, deleted
        self._tables = reader.tables()
        self._guards = [Guard(part for pair in self._tables for part in pair)]  # used before all of it is stored
        self._least_bytes = 0 if tier.is_local else READ_BYTES  # what is far away costs a round trip for each read

    def start(self, patience_s: float, budget_s: float) -> ChunkKV:
        """Give the chunk, whose layers are read when they are needed."""
        layers = StreamedLayers(
            len(self._reader.layer_table), self._read, self._replace, self._complete, patience_s, budget_s
        )
        finalize(layers, self._source.close).atexit = False  # also after a fault, or where a request ended early
        return self._reader.chunk(layers, self._tables)

    def _read(self, index: int) -> Sequence[tuple[Tensor, ...]]:
        """Read a layer, and as many behind it as make a read worth its while."""
        began_s, stats = time.perf_counter(), self._stack.stats
        with stats.timed("load_seconds", self._tier.name):
            found = self._reader.layers(index, self._least_bytes)
        nbytes = sum(one.nbytes for states in found for one in states)
        stats.count("loaded_bytes", self._tier.name, nbytes)
        if self._tier.is_local:
            rate = nbytes / max(time.perf_counter() - began_s, 1e-6)
            self._least_bytes = min(READ_BYTES, 2 * nbytes, int(rate * READ_S))
        self._guards.append(Guard(one for states in found for one in states))
        return found

    def _complete(self, layers: tuple[tuple[Tensor, ...], ...]) -> None:
        """Store the chunk as one that was read at once, unless something was written to it since."""
        self._source.close()
        if all(guard.is_intact() for guard in self._guards):
            chunk = self._reader.chunk(layers, self._tables)
            self._stack.store_read(chunk, self._tier, self._source, self._deleted)

    def _replace(self, fault: BaseException) -> ChunkKV:
        """Compute and store the chunk again after a fault."""
        stack, key = self._stack, self._reader.key
        stack.stats.count("misses", stack.refuse(self._tier, key, self._source, fault))
        with stack.compute_times.timed(key):
            return stack.put(self._recompute())


def _stat(tier: BoundedTier, name: str) -> ObjectStat | None:
    with contextlib.suppress(OSError):
        return tier.tier.stat(name)
    return None
