# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Looks after what a store keeps: pins, sizes, eviction, deletion, and checks of every entry."""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import finalize

from ..errors import StoreError
from .budget import BoundedTier
from .chunk import ChunkKey
from .entry import EntryReader, read_key
from .storage import Storage
from .tiers.base import EntryFault, Source

__all__ = ["CheckResult", "EntryInfo", "StoreAdmin"]

FLUSH_S = 30.0
DELETE_S = 60.0  # how long a delete waits for a write of the same chunk that is under way
_COUNTED = (
    *("hits", "misses", "loaded_bytes", "load_failures", "stored", "store_failures", "dropped_writes", "evicted"),
    *("removed", "skipped"),
)
_TIMED = ("load_seconds", "store_seconds")


@dataclass(frozen=True)
class EntryInfo:
    """One stored chunk, for lists."""

    digest: str
    fingerprint: str
    tokens: int
    nbytes: int
    tier: str
    created: float
    pinned: bool = False


@dataclass(frozen=True)
class CheckResult:
    """What a check of one entry found."""

    digest: str
    tier: str
    nbytes: int
    reason: str = ""
    removed: bool = False


class StoreAdmin:
    """Administers the memories and tiers of one store; its methods are those of `BaseStore`."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def tier_of(self, key: ChunkKey) -> str | None:
        """Name the nearest memory, queue or tier that has a chunk; None if none has it, or says so now."""
        if level := self.level_in_process(key.digest):
            return level
        for tier in self._storage.tiers:
            with contextlib.suppress(OSError):
                if tier.contains(self._storage.catalog.name(key.digest)):
                    return tier.name
        return None

    def level_in_process(self, digest: str) -> str | None:
        """Name the nearest memory or queue that has a chunk; None if it has to be read."""
        return next((level.name for level in self._storage.in_process if level.contains(digest)), None)

    def record_importance(self, key: ChunkKey, important_ratio: float) -> None:
        """Report which share of a chunk's tokens was important in a request, from 0 to 1."""
        for memory in self._storage.memories:
            memory.use(key.digest, important_ratio)
        for tier in self._storage.tiers:
            tier.use(self._storage.catalog.name(key.digest), important_ratio)

    def protect(self, keys: Iterable[ChunkKey], owner: object) -> Callable[[], object]:
        """Keep chunks from being evicted from memory until the result is called, or `owner` is gone."""
        digests = [key.digest for key in keys]
        protected = contextlib.ExitStack()
        for memory in self._storage.memories:
            memory.protect(digests)
            protected.callback(memory.release, digests)
        release = finalize(owner, protected.close)
        release.atexit = False
        return release

    def set_pins(self, digests: Iterable[str], pinned: bool) -> None:
        """Pin chunks in every memory and tier, or let them go."""
        for digest in digests:
            try:
                for memory in self._storage.memories:
                    memory.set_pin(digest, pinned)
                for tier in self._storage.tiers:
                    tier.set_pin(self._storage.catalog.name(digest), pinned)
            except OSError as error:
                raise _refused(f"the pin of chunk {digest} cannot be noted", error) from error

    def remove(self, digests: Iterable[str]) -> int:
        """Remove chunks from every memory, queue and tier, and count them."""
        storage, count = self._storage, 0
        for digest in digests:
            storage.deletions += 1
            try:
                removed = [queue.cancel(digest, DELETE_S) for queue in storage.queues.values()]
                removed += [tier.delete(storage.catalog.name(digest)) for tier in storage.tiers]
                removed += [memory.delete(digest) for memory in storage.memories]
            except OSError as error:
                raise _refused(f"chunk {digest} cannot be removed", error) from error
            count += any(removed)
        return count

    def flush(self, wait_s: float = FLUSH_S) -> bool:
        """Wait until every queue is empty; False if something still waits."""
        stop_s = time.monotonic() + wait_s
        return all(queue.flush(max(0.0, stop_s - time.monotonic())) for queue in self._storage.queues.values())

    def check(self, repair: bool) -> Iterator[CheckResult]:
        """Read and verify every entry of this namespace; with `repair` what can never become good is removed."""
        self.flush()
        for tier in self._storage.tiers:
            for name in self._storage.catalog.names(tier):
                yield self._check_entry(tier, name, repair)

    def collect(self, target_bytes: int | None) -> dict[str, int]:
        """Remove orphans and expired entries, then evict down to the caps, or to `target_bytes` in each tier."""
        storage = self._storage
        counts = {"orphans": 0, "expired": 0, "freed_bytes": 0}
        self.flush()
        for tier in storage.tiers:
            counts["orphans"] += tier.remove_orphans()
            storage.catalog.refresh(thorough=True)
            for name in list(tier.index.owned(storage.catalog.owner)):
                with contextlib.suppress(OSError):
                    is_expired = storage.is_expired(tier.stat(name))
                    counts["expired"] += is_expired and storage.discard(tier, name, None, "expired")
            limits = [value for value in (target_bytes, tier.cap_bytes) if value is not None]
            counts["freed_bytes"] += tier.shrink(min(limits)) if limits else 0
        return counts

    def entries(self) -> Iterator[EntryInfo]:
        """Walk over what is stored in this namespace, in the order of digests."""
        storage = self._storage
        pins = {name for tier in storage.tiers for name in tier.pins()}
        for digest, record in storage.catalog.items().items():
            names = [level.name for level in storage.in_process if level.contains(digest)]
            yield EntryInfo(
                digest,
                record.key.fingerprint,
                len(record.key.token_ids),
                record.nbytes,
                "+".join([*names, *record.tiers]),
                record.created,
                storage.catalog.name(digest) in pins,
            )

    def stats(self) -> dict[str, Any]:
        """Give counts and sizes, as `BaseStore.stats` lists them."""
        storage, group = self._storage, self._storage.stats.group
        levels: list[Any] = [*storage.memories, *storage.tiers]
        return {
            **{name: group(name) for name in _COUNTED},
            "seconds": {stage: seconds for stage in _TIMED if (seconds := group(stage))},
            "entries": len(storage.catalog),
            "bytes": {level.name: level.nbytes for level in levels},
            "pinned_bytes": {level.name: level.pinned_bytes for level in levels},
            "capacity_bytes": {level.name: level.cap_bytes for level in levels},
            "queued_bytes": {name: queue.nbytes for name, queue in storage.queues.items()},
            "healthy": {tier.name: tier.is_healthy for tier in storage.tiers},
        }

    def traffic(self) -> dict[str, tuple[int, float]]:
        """Give the bytes of K and V that were read since opening, and the seconds that took, by tier."""
        seconds, nbytes = (self._storage.stats.group(name) for name in ("load_seconds", "loaded_bytes"))
        return {tier: (count, seconds.get(tier, 0.0)) for tier, count in nbytes.items()}

    def close(self) -> None:
        """Flush for 30 s at most, save the index, and let go of memory and connections."""
        storage = self._storage
        if not self.flush(FLUSH_S):
            for queue in storage.queues.values():
                queue.clear("closed")
        for tier in storage.tiers:
            tier.close()
        for memory in storage.memories:
            memory.clear()
        storage.importance.save()

    def _check_entry(self, tier: BoundedTier, name: str, repair: bool) -> CheckResult:
        source, digest = None, self._storage.catalog.digest(name)
        with contextlib.ExitStack() as opened:
            try:
                source = tier.tier.open(name)
                if source is None:
                    return CheckResult(digest, tier.name, 0, "absent")
                opened.callback(source.close)
                return CheckResult(self._verified_key(name, source).digest, tier.name, source.stat.nbytes)
            except EntryFault as fault:
                removed = repair and fault.corrupt and self._storage.discard(tier, name, source, "corrupt")
                return CheckResult(digest, tier.name, source.stat.nbytes if source else 0, fault.reason, removed)
            except (OSError, MemoryError) as error:
                return CheckResult(digest, tier.name, 0, type(error).__name__)

    def _verified_key(self, name: str, source: Source) -> ChunkKey:
        """Read all of an entry that should have a name; gives its key, or raises what is wrong."""
        key = read_key(source, self._storage.namespace)
        if self._storage.catalog.name(key.digest) != name:
            raise EntryFault("key", f"it is {key.digest}")
        EntryReader(source, key).read()
        return key


def _refused(what: str, error: OSError) -> StoreError:
    return StoreError(f"{what}: {error}. Check who owns the files of the store.")
