# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""How much a tier may hold, and which objects leave so that more fit."""

import contextlib
import errno
import logging
import shutil
import threading
import time
from collections.abc import Iterator

from .memory import StoreStats
from .tiers.base import ObjectStat, Tier
from .tiers.disk import DiskTier

logger = logging.getLogger(__name__)
_MANY = 1000  # objects: of so many some more leave than have to, since each time all are listed
_MORE_SHARE = 50
_COUNT_EVERY_S = 2.0  # at most, and at most a twentieth of the time: what other processes stored and removed


class Capacity:
    """The cap of one tier, all namespaces together. Threads may share it.

    The tier is counted when the first object is put, and again every few seconds while objects are put, so several
    processes together may pass the cap by what they put in between. Without a cap any number of bytes may be there; on
    disk it is then what the tier holds at first and half of what is free.
    """

    def __init__(self, tier: Tier, stats: StoreStats, cap_bytes: int | None) -> None:
        self.tier = tier
        self._stats = stats
        self._cap_bytes = cap_bytes
        self._root = tier.root if isinstance(tier, DiskTier) else None
        self._nbytes = 0
        self._count_again_s = -1.0
        self._lock = threading.RLock()

    @property
    def cap_bytes(self) -> int | None:
        """How many bytes may be there; None is any number."""
        self._count()
        return self._cap_bytes

    @property
    def nbytes(self) -> int:
        """How many bytes are there."""
        self._count(exactly=True)
        return self._nbytes

    @property
    def is_bounded(self) -> bool:
        """Whether anything is ever evicted."""
        return self._cap_bytes is not None or self._root is not None

    def use(self, name: str, stat: ObjectStat) -> None:
        """Record that an object is used now."""
        if self.is_bounded:
            self.tier.set_used(name, stat, time.time())

    @contextlib.contextmanager
    def room(self, nbytes: int) -> Iterator[None]:
        """Make room for what a block writes, one block after the other; OSError(ENOSPC) if it can never fit."""
        if not self.is_bounded:
            yield
            return
        with self._lock:
            self._count()
            if self._cap_bytes is not None:
                if nbytes > self._cap_bytes:
                    raise OSError(errno.ENOSPC, f"{nbytes} bytes do not fit: {self._cap_bytes} bytes may be kept")
                self._evict_to(self._cap_bytes - nbytes)
            yield
            self._nbytes += nbytes

    def removed(self, nbytes: int) -> None:
        """Report that an object was removed."""
        with self._lock:
            self._nbytes -= nbytes

    def shrink(self, most_bytes: int) -> int:
        """Evict until no more than so many bytes are left; gives how many left."""
        with self._lock:
            self._count(exactly=True)
            before = self._nbytes
            self._evict_to(most_bytes)
            return before - self._nbytes

    def _evict_to(self, most_bytes: int) -> None:
        """Let the least recently used objects go."""
        if self._nbytes <= most_bytes:
            return
        with self.tier.lock():
            objects = self._list()
            if self._nbytes > most_bytes and len(objects) > _MANY:
                most_bytes -= self._nbytes // _MORE_SHARE
            for name, found in objects:
                if self._nbytes <= most_bytes:
                    return
                try:
                    is_deleted = self.tier.delete(name)
                except OSError as error:
                    logger.warning("chunk %s cannot be evicted (%s) and stays", name[-64:], error)
                    continue
                self._nbytes -= found.nbytes
                self._stats.count("evicted", self.tier.name, int(is_deleted))

    def _count(self, exactly: bool = False) -> None:
        """Count what is there, unless that was done a moment ago or nothing depends on it."""
        began_s = time.monotonic()
        if not exactly and (began_s < self._count_again_s or not self.is_bounded):
            return
        with self._lock:
            self._list()
            if self._cap_bytes is None and self._root is not None:
                self._cap_bytes = self._nbytes + shutil.disk_usage(self._root).free // 2
            now_s = time.monotonic()
            self._count_again_s = now_s + max(_COUNT_EVERY_S, 20 * (now_s - began_s))

    def _list(self) -> list[tuple[str, ObjectStat]]:
        """Count all objects, and give them by their last use; a tier that does not answer has what it had."""
        try:
            objects = sorted(self.tier.listing(), key=lambda entry: entry[1].used)
        except OSError as error:
            logger.info("the %s tier cannot be listed now (%s)", self.tier.name, error)
            return []
        self._nbytes = sum(found.nbytes for _, found in objects)
        return objects
