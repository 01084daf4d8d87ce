# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What the reader, the writer and the administration of a store share: memories, tiers, queues, catalog and counts."""

import contextlib
import errno
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from .budget import BoundedTier
from .catalog import Catalog, owner_of
from .chunk import ChunkKey, ChunkKV
from .guard import Guard
from .importance import TokenImportance
from .memory import MemoryCache
from .opening import Limits
from .stats import StoreStats
from .tiers.base import EntryFault, ObjectStat, Source, Tier
from .write_queue import WriteQueue

__all__ = ["PendingWrite", "Storage"]


class PendingWrite(NamedTuple):
    """An entry that waits in a queue."""

    chunk: ChunkKV
    guard: Guard  # notices what is written to the chunk while it waits
    write: Callable[[], object]


class Storage:
    """The memories and tiers of one namespace, the nearest first, and what is counted and known of them."""

    def __init__(
        self,
        memories: Sequence[MemoryCache],
        tiers: Sequence[Tier],
        namespace: str,
        index: Path | None,
        limits: Limits,
    ) -> None:
        self.namespace, self.ttl_s = namespace, limits.ttl_s
        self.stats, self.deletions = StoreStats(), 0
        owner, folder = owner_of(namespace), index.parent if index else None
        self.importance = TokenImportance(index / f"{owner}.importance" if index else None)
        skipped = partial(self.stats.count, "skipped")
        self.memories = tuple(memories)
        self.tiers = tuple(limits.bound(tier, folder, owner, skipped) for tier in tiers)
        for level in (*self.memories, *self.tiers):
            level.stats = self.stats
        self.queues = {
            tier.name: WriteQueue[PendingWrite](
                limits.queue_bytes, lambda pending: pending.write(), partial(self.count_dropped, tier.name)
            )
            for tier in (self.tiers if limits.queue_bytes else ())
        }
        self.in_process: tuple[MemoryCache | WriteQueue[PendingWrite], ...]  # a chunk here need not be read
        self.in_process = (*self.memories, *self.queues.values())
        indexes = [level.index for level in self.in_process]
        self.catalog = Catalog(namespace, self.tiers, indexes, stats=self.stats)
        for tier in tiers:
            self.stats.count("removed", "orphans", tier.remove_orphans())

    @property
    def reads_importance(self) -> bool:
        """Whether an eviction policy reads which share of a chunk's tokens is important."""
        return any(level.policy.reads_importance for level in (*self.memories, *self.tiers))

    def nearer(self, tier: BoundedTier) -> list[BoundedTier]:
        """The tiers on this machine that receive what was read from a farther one."""
        return [other for other in self.tiers[: self.tiers.index(tier)] if other.is_local]

    def is_expired(self, stat: ObjectStat | None) -> bool:
        """Whether an entry is too old. Clocks differ: one from the future is as old as it lies ahead."""
        return self.ttl_s is not None and stat is not None and abs(time.time() - stat.created) > self.ttl_s

    def restore_importance(self, level: MemoryCache | BoundedTier, name: str, digest: str) -> None:
        """Tell a level's eviction policy which share of a chunk's tokens was important, if it ranks chunks by that."""
        if level.policy.reads_importance and (record := self.importance.get(digest)) is not None:
            level.use(name, record.share)

    def discard(self, tier: BoundedTier, name: str, source: Source | None, cause: str) -> bool:
        """Remove an entry, unless another process has put a good one in its place; count it under a cause."""
        removed = False
        with contextlib.suppress(OSError):
            removed = tier.delete(name, source)
            self.stats.count("removed", cause, int(removed))
        return removed

    def refuse_entry(self, tier: BoundedTier, key: ChunkKey, source: Source | None, fault: BaseException) -> str:
        """Count what is wrong with an entry, warn of it once, and remove what can never become good."""
        reason = fault.reason if isinstance(fault, EntryFault) else type(fault).__name__
        self.stats.count("load_failures", f"{tier.name}:{reason}")
        self.stats.warn_once(f"stored chunk {key.digest} is not used and will be computed again: {fault}")
        if isinstance(fault, EntryFault) and fault.corrupt:
            cause = "expired" if reason == "expired" else "corrupt"
            self.discard(tier, self.catalog.name(key.digest), source, cause)
        return reason

    def refuse_write(self, tier: BoundedTier, error: Exception) -> None:
        """Count a write that failed, and warn of it once."""
        reason = errno.errorcode.get(getattr(error, "errno", None) or 0, type(error).__name__)
        self.stats.count("store_failures", reason)
        self.stats.warn_once(f"chunks cannot be stored in the {tier.name} tier ({error}); other tiers may have them")

    def count_dropped(self, tier: str, reason: str) -> None:
        """Count a queued write that never reaches its tier, and warn of it once."""
        self.stats.count("dropped_writes", f"{tier}:{reason}")
        self.stats.warn_once(f"chunks are not written to the {tier} tier ({reason}); see dropped_writes")
