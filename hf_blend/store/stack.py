# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The tiers of a store one behind the other: ask the nearest first, and believe none."""

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

from .behind import PendingWrite, WriteQueue
from .bounded import BoundedTier
from .catalog import Catalog
from .chunk import ChunkKey, ChunkKV, Layout
from .entry import EntryReader, encode_entry, read_key
from .guard import Guard
from .held import HeldChunks
from .locks import new_lock
from .packing import kept_as
from .patience import ComputeTimes, LateLoads
from .recorded import RecordedSource
from .stream import StreamedLayers
from .tally import StoreStats
from .tiers.base import EntryFault, ObjectStat, Source

__all__ = ["CheckResult", "TierStack"]

Encoded = Callable[[], Sequence[memoryview]]  # the bytes of an entry, made when they are needed
Take = Callable[[BoundedTier, ChunkKey, Source, contextlib.ExitStack], ChunkKV]  # makes a chunk of an opened entry
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
    """Chunks held ready to use, and behind them tiers that keep bytes, the nearest first.

    A fault never leaves here: it is a miss, counted, and warned of once. A chunk that comes from a farther tier is
    held, and the bytes that were verified are written to the nearer ones. A chunk that is put goes to every tier: when
    `put` returns, it is in those on this machine, and in the queue of the others. What is in a queue is found there.

    With a `home` each chunk is in one tier: it is put there, or, where that refuses it, in the nearest before it. What
    leaves it for want of room moves to the next tier behind it, and what is read from behind it moves back. A chunk is
    written before it leaves: a process that is killed in between leaves it twice, and the next one that reads it
    removes the copy.
    """

    patience_s = 10.0  # for a layer that a request waits for

    def __init__(
        self,
        held: Sequence[HeldChunks],
        tiers: Sequence[BoundedTier],
        catalog: Catalog,
        tally: StoreStats,
        *,
        secret: bytes | None = None,
        ttl_s: float | None = None,
        codec: str = "raw",
        queue_bytes: int = 1 << 30,
        known_share: Callable[[str], float | None] = lambda _: None,
        home: str | None = None,
    ) -> None:
        self.held = tuple(held)
        self.home = next((tier for tier in tiers if tier.name == home), None)
        self._moving = new_lock()  # taken before any tier's own; no chunk is moved by two threads at once
        for near, far in pairwise(tiers) if self.home else ():
            near.before_eviction = partial(self._demote, near, far)
            far.makes_room = far is not self.home
        self._known_share = known_share
        self.tiers = tuple(tiers)
        self.queues = {tier.name: self._new_queue(tier, queue_bytes) for tier in tiers} if queue_bytes else {}
        self._catalog = catalog
        self._tally = tally
        self._secret = secret
        self._ttl_s = ttl_s
        self._codec = codec
        self._late = LateLoads()
        self.compute_times = ComputeTimes()
        self._flying: WeakValueDictionary[str, ChunkKV] = WeakValueDictionary()  # being read; two requests share it
        self._deleted = 0  # deletes so far: what was read before one is not kept after it

    def get(self, key: ChunkKey, budget_s: float = math.inf, layout: Layout | None = None) -> ChunkKV | None:
        """Fetch a chunk, and hold it from then on."""
        return self._fetch(key, partial(self._read, layout=layout), budget_s, layout)

    def stream(
        self, key: ChunkKey, recompute: Recompute, budget_s: float = math.inf, layout: Layout | None = None
    ) -> ChunkKV | None:
        """Fetch a chunk whose layers may come later."""
        flying = self._flying.get(key.digest)
        if flying is not None and flying.key == key and flying.fits(layout):
            return flying
        take = partial(self._streamed, recompute=recompute, stop_s=time.monotonic() + budget_s, layout=layout)
        chunk = self._fetch(key, take, budget_s, layout)
        if chunk is not None and type(chunk.layers) is StreamedLayers:
            self._flying[key.digest] = chunk
        return chunk

    def put(self, chunk: ChunkKV, wait_s: float = 0.0) -> ChunkKV:
        """Hold a chunk, write it to every tier or into its queue, and tell the catalog."""
        digest = chunk.key.digest
        here = (place.get(digest) for place in self.held if place.device is None)
        mine = next((one for one in here if one and one.key == chunk.key), None)
        if mine is None:
            mine = chunk.own_copy()
        kept = kept_as(mine, self._codec)
        self._hold(kept)
        encoded = functools.cache(partial(encode_entry, mine, self._secret, self._codec))
        stats: dict[str, ObjectStat | None] = {}
        for tier in self.tiers[self.tiers.index(self.home) :] if self.home else self.tiers:
            is_near = tier.is_local
            stats[tier.name] = self._write(tier, kept, encoded) if is_near else self._send(tier, kept, encoded, wait_s)
            if self.home and (stats[tier.name] or not is_near):
                break
        known = next((stat for stat in stats.values() if stat), None)
        if known or self.is_held(digest):
            where = [name for name, stat in stats.items() if stat]
            self._catalog.add(chunk.key, known or ObjectStat(mine.nbytes, time.time()), where)
        return chunk if kept is mine else kept

    def contains(self, digest: str) -> bool:
        """Say whether a tier has a chunk, without reading it."""
        if self.is_held(digest):
            return True
        for tier in self.tiers:
            with contextlib.suppress(OSError):
                if tier.contains(self._catalog.name(digest)):
                    return True
        return False

    def is_held(self, digest: str) -> bool:
        """Say whether a chunk is ready to use."""
        return any(place.contains(digest) for _, place in self.at_hand())

    def at_hand(self) -> list[tuple[str, HeldChunks | WriteQueue]]:
        """The places from which a chunk needs no reading, by name, the nearest first."""
        held: list[tuple[str, HeldChunks | WriteQueue]] = [(place.name, place) for place in self.held]
        return [*held, *(("queue", queue) for queue in self.queues.values())]

    def delete(self, digest: str) -> bool:
        """Remove a chunk from every queue and tier; raises OSError if one refuses, or takes too long to write it."""
        self._deleted += 1
        removed = [queue.cancel(digest, DELETE_S) for queue in self.queues.values()]  # may itself wait for `_moving`
        with self._moving:
            removed += [tier.delete(self._catalog.name(digest)) for tier in self.tiers]
        removed += [place.delete(digest) for place in self.held]
        self._catalog.forget(digest)
        return any(removed)

    def set_pin(self, digest: str, pinned: bool) -> None:
        """Keep a chunk from being evicted from any tier, or let it; raises OSError if a tier cannot note it."""
        for place in self.held:
            place.set_pin(digest, pinned)
        for tier in self.tiers:
            tier.set_pin(self._catalog.name(digest), pinned)

    def protect(self, digests: Sequence[str]) -> None:
        """Keep the chunks of a request that runs in memory: those that are held, and those that will be."""
        for place in self.held:
            place.protect(digests)

    def release(self, digests: Sequence[str]) -> None:
        """Take one `protect` back."""
        for place in self.held:
            place.release(digests)

    def pins(self) -> frozenset[str]:
        """Names of the entries that some tier must not evict."""
        return frozenset(name for tier in self.tiers for name in tier.pins())

    def examine(self, tier: BoundedTier, name: str, repair: bool) -> CheckResult:
        """Read and verify one entry."""
        source, digest = None, self._catalog.digest(name)
        try:
            source = tier.tier.open(name)
            if source is None:
                return CheckResult(digest, tier.name, 0, "absent")
            key = read_key(source, self._catalog.namespace, self._secret)
            if self._catalog.name(key.digest) != name:
                raise EntryFault("key", f"it is {key.digest}")
            EntryReader(source, key, self._secret).read()
            return CheckResult(key.digest, tier.name, source.stat.nbytes)
        except EntryFault as fault:
            removed = repair and fault.corrupt and self._remove(tier, name, source, "corrupt")
            return CheckResult(digest, tier.name, source.stat.nbytes if source else 0, fault.reason, removed)
        except (OSError, MemoryError) as error:
            return CheckResult(digest, tier.name, 0, type(error).__name__)
        finally:
            if source is not None:
                source.close()

    def expire(self, tier: BoundedTier) -> int:
        """Remove the entries of this namespace that are too old from a tier, and say how many there were."""
        names = [name for name in self._catalog.names(tier.name) if self._catalog.owns(name)]
        return sum(self._remove(tier, name, None, "expired") for name in names if self._is_old(_stat(tier, name)))

    def record_importance(self, digest: str, important_ratio: float) -> None:
        """Tell every tier which share of a chunk's tokens turned out to be important."""
        for place in self.held:
            place.record_importance(digest, important_ratio)
        for tier in self.tiers:
            tier.use(self._catalog.name(digest), important_ratio)

    def move(self, digest: str, target: str) -> bool:
        """Keep a chunk in one of the tiers that keep bytes: it is written there before it leaves the others."""
        name, there = self._catalog.name(digest), next(tier for tier in self.tiers if tier.name == target)
        others = [tier for tier in self.tiers if tier is not there]
        with self._moving:
            is_there = self._holds(there, digest) or any(self._copy(tier, there, digest) for tier in others)
        for other in others if is_there else ():
            if other.name in self.queues:
                self.queues[other.name].cancel(digest, DELETE_S)  # what is being written may wait for `_moving`
            with self._moving:
                is_there = there.contains(name)
                if is_there:
                    other.delete(name)
                    self._catalog.forget(digest, other.name)
        return is_there

    def _holds(self, tier: BoundedTier, digest: str) -> bool:
        """Whether a tier has an entry that is whole; what can never become good is removed."""
        return self.examine(tier, self._catalog.name(digest), repair=True).reason == ""

    def _copy(self, tier: BoundedTier, target: BoundedTier, digest: str) -> bool:
        """Write the bytes of one tier's entry to another tier, once all of them were verified."""
        name = self._catalog.name(digest)
        source = tier.open(name)
        if source is None:
            return False
        recorded = RecordedSource(source)
        try:
            key = read_key(recorded, self._catalog.namespace, self._secret)
            if key.digest != digest:
                raise EntryFault("key", f"it is {key.digest}")
            EntryReader(recorded, key, self._secret).read()
            content = recorded.release()
        except EntryFault as fault:
            self._tally.count("load_failures", f"{tier.name}:{fault.reason}")
            return False
        finally:
            recorded.close()
        if content is None:
            return False
        if not target.put_if_absent(name, [content]) and not self._holds(target, digest):
            return False  # what has its name there is not whole, or cannot be read now
        stat = target.stat(name)
        if stat is not None:
            self._catalog.add(key, stat, [target.name])
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
        self._catalog.take_up(name, far.name)
        self._tally.count("moved", far.name)

    def _settle(self, digest: str, kept: BoundedTier) -> None:
        """A tier has a chunk whole: where each chunk is in one tier, the others no longer keep it."""
        name = self._catalog.name(digest)
        for other in self.tiers if self.home else ():
            with contextlib.suppress(OSError):
                if other is not kept and _has(other, name):
                    with self._moving:
                        removed = kept.contains(name) and other.delete(name)
                    self._tally.count("moved", kept.name, int(removed))
                    self._catalog.forget(digest, other.name)

    def shrink(self, tier: BoundedTier, most_bytes: int) -> int:
        """Evict from a tier until no more than so many bytes are left, and say how many left it."""
        with self._moving:
            return tier.shrink(most_bytes)

    def miss(self, reason: str) -> None:
        """Count a miss."""
        self._tally.count("misses", reason)

    def flush(self, wait_s: float) -> bool:
        """Wait until every queue is empty, so many seconds at most, and say whether they are."""
        stop_s = time.monotonic() + wait_s
        return all(queue.flush(max(0.0, stop_s - time.monotonic())) for queue in self.queues.values())

    def close(self, wait_s: float) -> None:
        """Flush, drop and count what is in the queues after so many seconds, and close all."""
        if not self.flush(wait_s):
            for queue in self.queues.values():
                queue.clear("closed")
        for tier in self.tiers:
            tier.close()
        for place in self.held:
            place.clear()

    def _fetch(self, key: ChunkKey, take: Take, budget_s: float, layout: Layout | None) -> ChunkKV | None:
        chunk, reasons = self._at_hand(key, layout), []
        if chunk is not None:
            return chunk
        for tier in self.tiers:
            chunk, reason = self._load_within(tier, key, take, budget_s)
            if chunk is not None:
                self._tally.count("hits", tier.name)
                return chunk
            reasons.append(reason)
        self.miss(next((reason for reason in reasons if reason != "absent"), "absent"))
        return None

    def _at_hand(self, key: ChunkKey, layout: Layout | None) -> ChunkKV | None:
        for place in self.held:
            chunk = self._held_by(place, key, layout)
            if chunk is not None:
                self._tally.count("hits", place.name)
                return chunk
        for queue in self.queues.values():
            chunk = queue.get(key)
            if chunk is not None and chunk.fits(layout):
                self._tally.count("hits", "queue")
                return chunk
        return None

    def _held_by(self, place: HeldChunks, key: ChunkKey, layout: Layout | None) -> ChunkKV | None:
        """The chunk, if a place has it unchanged, and it is of the model's layout."""
        before, chunk = place.changed, place.get(key.digest)
        if place.changed > before:
            self._tally.count("load_failures", f"{place.name}:changed")
            self._tally.warn_once(f"chunk {key.digest} was written to after it was handed out, and is read again")
        if chunk is None or chunk.key != key:
            return None
        if not chunk.fits(layout):
            self._tally.count("load_failures", f"{place.name}:layout")
            place.delete(key.digest)
            return None
        return chunk

    def _hold(self, chunk: ChunkKV) -> ChunkKV:
        """Hold a chunk where there is room for it; gives it as the nearest place has it."""
        for place in self.held:
            try:
                self._forget(place, place.put(chunk))
                if place.reads_importance and (share := self._known_share(chunk.key.digest)) is not None:
                    place.record_importance(chunk.key.digest, share)
            except (RuntimeError, MemoryError) as error:  # of a device that is full
                self._tally.count("store_failures", type(error).__name__)
                self._tally.warn_once(f"chunks cannot be held in the {place.name} tier ({error})")
        return next((one for one in (place.get(chunk.key.digest) for place in self.held) if one), chunk)

    def _forget(self, place: HeldChunks, gone: Sequence[str]) -> None:
        self._tally.count("evicted", place.name, len(gone))
        for digest in gone:
            self._catalog.forget_unlisted(digest)

    def _new_queue(self, tier: BoundedTier, queue_bytes: int) -> WriteQueue:
        def write(pending: PendingWrite) -> None:
            if not pending.guard.is_intact():
                return drop("changed")
            self._write_behind(tier, pending.chunk, lambda: pending.parts)

        def drop(reason: str) -> None:
            self._tally.count("dropped_writes", f"{tier.name}:{reason}")
            self._tally.warn_once(f"chunks are not written to the {tier.name} tier ({reason}); see dropped_writes")

        return WriteQueue(queue_bytes, write, lambda digest: self._catalog.forget_unlisted(digest), drop)

    def _send(self, tier: BoundedTier, chunk: ChunkKV, encoded: Encoded, wait_s: float = 0.0) -> ObjectStat | None:
        """Queue an entry for a tier, or write it now if there are no queues.

        Its digests are computed now: what happens to the tensors while they wait is noticed by whoever reads them.
        """
        if not self.queues:
            return self._write_behind(tier, chunk, encoded)
        try:
            self.queues[tier.name].put(PendingWrite(chunk, encoded()), wait_s)
        except (OSError, MemoryError) as error:
            self._refuse_write(tier, error)
        return None

    def _write_behind(self, tier: BoundedTier, chunk: ChunkKV, encoded: Encoded) -> ObjectStat | None:
        """Write an entry to a tier; what the home of all chunks refuses goes to the nearest tier before it."""
        nearer = reversed(self.tiers[: self.tiers.index(tier)]) if tier is self.home else ()
        for one in (tier, *nearer):
            stat = self._write(one, chunk, encoded)
            if stat is not None:
                self._catalog.add(chunk.key, stat, [one.name])
                return stat if one is tier else None
        return None

    def _write(self, tier: BoundedTier, chunk: ChunkKV, encoded: Encoded) -> ObjectStat | None:
        name = self._catalog.name(chunk.key.digest)
        try:
            if not tier.contains(name):
                with self._tally.timed("store_seconds", tier.name), self._moving if self.home else _UNLOCKED:
                    stored = tier.put_if_absent(name, encoded())
                    if stored:
                        self._settle(chunk.key.digest, tier)
                self._tally.count("stored", tier.name, int(stored))
                if tier.reads_importance and (share := self._known_share(chunk.key.digest)) is not None:
                    tier.use(name, share)
            return tier.stat(name)
        except (OSError, MemoryError, EntryFault) as error:
            self._refuse_write(tier, error)
            return None

    def _keep(self, chunk: ChunkKV, tier: BoundedTier, source: Source, deleted: int) -> ChunkKV:
        """Hold a chunk that was read, and write the bytes that were verified to the nearer tiers on this machine."""
        if deleted != self._deleted:
            return chunk
        content = source.release() if isinstance(source, RecordedSource) else None
        if content is not None:
            for other in self._nearer(tier):
                stat = self._send(other, chunk, lambda: [content])
                if stat is not None:
                    self._catalog.add(chunk.key, stat, [other.name])
        else:
            self._settle(chunk.key.digest, tier)
        return self._hold(chunk)

    def _nearer(self, tier: BoundedTier) -> list[BoundedTier]:
        """The tiers that will have what was read from one."""
        nearer = [other for other in self.tiers[: self.tiers.index(tier)] if other.is_local]
        return nearer if self.home is None else [other for other in nearer if other is self.home]

    def _refuse_write(self, tier: BoundedTier, error: Exception) -> None:
        reason = errno.errorcode.get(getattr(error, "errno", None) or 0, type(error).__name__)
        self._tally.count("store_failures", reason)
        self._tally.warn_once(f"chunks cannot be stored in the {tier.name} tier ({error}); other tiers may have them")

    def _load_within(
        self, tier: BoundedTier, key: ChunkKey, take: Take, budget_s: float
    ) -> tuple[ChunkKV | None, str]:
        """The chunk and "", or None and why not."""
        if tier.is_local or math.isinf(budget_s):
            return self._load(tier, key, take)
        loaded = self._late.run(lambda: self._load(tier, key, take), budget_s)
        if loaded is not None:
            return loaded
        self._tally.count("load_failures", f"{tier.name}:slow")
        self._tally.warn_once(f"chunks of the {tier.name} tier are computed where that is faster than loading them")
        return None, "slow"

    def _load(self, tier: BoundedTier, key: ChunkKey, take: Take) -> tuple[ChunkKV | None, str]:
        with self._tally.timed("load_seconds", tier.name), contextlib.ExitStack() as opened:
            source = None
            try:
                source = self._open(tier, key)
                if source is None:
                    self._catalog.forget(key.digest, tier.name)
                    return None, "absent"
                opened.callback(source.close)
                if self._is_old(source.stat):
                    raise EntryFault("expired", f"it was stored more than {self._ttl_s} s ago")
                return take(tier, key, source, opened), ""
            except EntryFault as fault:
                self._warn(key, tier, fault)
                self._drop(tier, key, source, fault)
                return None, fault.reason
            except (OSError, MemoryError) as error:
                self._warn(key, tier, error)
                return None, "io" if isinstance(error, OSError) else "memory"

    def _open(self, tier: BoundedTier, key: ChunkKey) -> Source | None:
        """Open an entry, whose bytes are kept if nearer tiers will have them too."""
        source = tier.open(self._catalog.name(key.digest))
        if source is not None and self._nearer(tier):
            with contextlib.suppress(MemoryError):
                return RecordedSource(source)
        return source

    def _read(
        self, tier: BoundedTier, key: ChunkKey, source: Source, _: contextlib.ExitStack, *, layout: Layout | None
    ) -> ChunkKV:
        """Nothing that is read is used, or written to a nearer tier, before all of it was checked."""
        deleted, reader = self._deleted, EntryReader(source, key, self._secret, layout)
        with contextlib.ExitStack() as reserved:
            for place in self.held[-1:]:
                self._forget(place, reserved.enter_context(place.reserve(reader.nbytes)))
            chunk = reader.read()
        self._tally.count("loaded_bytes", tier.name, chunk.nbytes)
        return self._keep(chunk, tier, source, deleted)

    def _streamed(
        self,
        tier: BoundedTier,
        key: ChunkKey,
        source: Source,
        opened: contextlib.ExitStack,
        *,
        recompute: Recompute,
        stop_s: float,
        layout: Layout | None,
    ) -> ChunkKV:
        deleted = self._deleted
        reader = EntryReader(source, key, self._secret, layout)
        tables, count = reader.tables(), len(reader.header.layer_table)
        guards = [Guard(part for pair in tables for part in pair)]  # of what is used before all of it is held
        opened = opened.pop_all()

        least = 0 if tier.is_local else READ_BYTES  # what is far away costs a round trip for each read

        def read(place: int) -> Sequence[tuple[Tensor, ...]]:
            nonlocal least
            began_s = time.perf_counter()
            with self._tally.timed("load_seconds", tier.name):
                found = reader.layers(place, least)
            nbytes = sum(one.nbytes for states in found for one in states)
            self._tally.count("loaded_bytes", tier.name, nbytes)
            if tier.is_local:
                rate = nbytes / max(time.perf_counter() - began_s, 1e-6)
                least = min(READ_BYTES, 2 * nbytes, int(rate * READ_S))
            guards.append(Guard(one for states in found for one in states))
            return found

        def complete(layers: tuple[tuple[Tensor, ...], ...]) -> None:
            opened.close()
            if all(guard.is_intact() for guard in guards):
                self._keep(reader.chunk(layers, tables), tier, source, deleted)

        def instead(fault: BaseException) -> ChunkKV:
            self._warn(key, tier, fault)
            self.miss(fault.reason if isinstance(fault, EntryFault) else type(fault).__name__)
            self._drop(tier, key, source, fault)
            with self.compute_times.timed(key):
                return self.put(recompute())

        left_s = math.inf if tier.is_local else max(0.0, stop_s - time.monotonic())
        layers = StreamedLayers(count, read, instead, complete, self.patience_s, left_s)
        finalize(layers, opened.close).atexit = False  # also after a fault, or where a request ended early
        return reader.chunk(layers, tables)

    def _warn(self, key: ChunkKey, tier: BoundedTier, fault: BaseException) -> None:
        reason = fault.reason if isinstance(fault, EntryFault) else type(fault).__name__
        self._tally.count("load_failures", f"{tier.name}:{reason}")
        self._tally.warn_once(f"stored chunk {key.digest} is not used and will be computed again: {fault}")

    def _is_old(self, stat: ObjectStat | None) -> bool:
        """An entry from the future is as old as it is far off: clocks differ, and nothing lives for ever."""
        return self._ttl_s is not None and stat is not None and abs(time.time() - stat.created) > self._ttl_s

    def _drop(self, tier: BoundedTier, key: ChunkKey, source: Source | None, fault: BaseException) -> None:
        """Remove what can never become good, so that it is not tried again.

        What is not sealed as this store seals (reason secret) goes too: it lies under a name that only a holder of
        the store's secret can compute, or, without a secret, that no signed entry has; so it is nobody's.
        """
        if isinstance(fault, EntryFault) and (fault.corrupt or fault.reason == "secret"):
            cause = "expired" if fault.reason == "expired" else "corrupt"
            self._remove(tier, self._catalog.name(key.digest), source, cause)

    def _remove(self, tier: BoundedTier, name: str, source: Source | None, cause: str) -> bool:
        """Make room for a good entry, unless another process already put one there."""
        removed = False
        with contextlib.suppress(OSError):
            removed = tier.delete(name, source)
            self._tally.count("removed", cause, int(removed))
        self._catalog.forget(self._catalog.digest(name), tier.name)
        return removed


def _has(tier: BoundedTier, name: str) -> bool:
    """Whether a tier has an entry; of one on another machine, as of its last listing."""
    return tier.contains(name) if tier.is_local else name in tier.names(name[:2])


def _stat(tier: BoundedTier, name: str) -> ObjectStat | None:
    with contextlib.suppress(OSError):
        return tier.tier.stat(name)
    return None
