# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Bytes by name under a cap: which objects leave so that more fit, and a tier that keeps to it."""

import contextlib
import errno
import logging
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from .chunk import ChunkKey
from .eviction.base import EvictionPolicy
from .index import Index, Use
from .stats import StoreStats
from .tiers.base import ObjectStat, Source, Tier, is_name

__all__ = ["BoundedTier", "Budget"]

logger = logging.getLogger(__name__)

_APPLY_EVERY = 1024  # uses that are noted before they are entered in the index
_LOOK_EVERY_S = 2.0  # at what other processes stored, and at most a fiftieth of the time
_RECOUNT_S = 60.0  # at most so often all sizes are read again
_FULL = (errno.ENOSPC, errno.EDQUOT)


class Budget:
    """Sizes, pins and an eviction policy. It moves no bytes itself; threads may share it."""

    owner = ""  # of what is added
    name = ""  # of the tier, under which is counted what leaves it

    def __init__(self, cap_bytes: int | None, policy: EvictionPolicy, index: Index) -> None:
        self.policy, self.index, self.stats = policy, index, StoreStats()
        self._cap_bytes = cap_bytes
        self._in_flight_bytes = 0
        self._totals: dict[str | None, int] = {None: 0}  # bytes of an owner that has a quota, and of all
        self._pins: set[str] = set()
        self._used: Counter[str] = Counter()  # by how many running requests
        self._noted: list[Use] = []  # what the index does not know of
        self._last_s = 0.0
        self._lock = threading.RLock()

    @property
    def cap_bytes(self) -> int | None:
        """How many bytes may be there; None is any number."""
        with self._lock:
            self._look()
            return self._cap_bytes

    @property
    def nbytes(self) -> int:
        """All bytes that count, with those in flight."""
        with self._lock:
            self._look()
            return self._totals[None] + self._in_flight_bytes

    @property
    def pinned_bytes(self) -> int:
        """Bytes that may not leave."""
        with self._lock:
            self._look()
            return self._held_bytes(self._pins)

    def _held_bytes(self, names: Iterable[str]) -> int:
        return sum(row[0] for row in map(self.index.row, names) if row)

    def add(self, name: str, nbytes: int, created: float | None = None) -> None:
        """Enter an object, or correct its size and count a use of it."""
        with self._lock:
            now_s, row = self._now_s(), self.index.row(name)
            self.apply()  # what was used before
            self.index.enter([(name, nbytes, now_s if created is None else created, self.owner)])
            self._grow(nbytes - (row[0] if row else 0), row[1] if row else self.owner)
            if row:
                self._note(name, None)

    def use(self, name: str, important_ratio: float | None = None) -> None:
        """Count a use of an object, or report which share of its tokens was important."""
        with self._lock, contextlib.suppress(OSError):  # it costs only a better choice of who leaves
            self._note(name, important_ratio)

    def remove(self, name: str) -> None:
        """Remove an object from the count; a pin of its name stays."""
        with self._lock:
            if (row := self.index.row(name)) is not None:
                self.index.remove(name)
                self._grow(-row[0], row[1])

    def set_pin(self, name: str, pinned: bool) -> None:
        """Pin or unpin a name, whether such an object is entered or not."""
        with self._lock:
            (self._pins.add if pinned else self._pins.discard)(name)

    def protect(self, names: Iterable[str]) -> None:
        """Protect names from eviction until each was released as often as it was protected."""
        with self._lock:
            self._used.update(names)

    def release(self, names: Iterable[str]) -> None:
        """Undo one `protect`."""
        with self._lock:
            self._used.subtract(names)
            self._used += Counter()  # drops those with a count of 0

    def fits(self, nbytes: int, quota: tuple[str, int] | None = None) -> bool:
        """Return True if `nbytes` more stay below the cap, or below a quota (owner, bytes)."""
        with self._lock:
            return self._excess(nbytes, quota) <= 0

    def victims(self, nbytes: int, quota: tuple[str, int] | None = None) -> list[str]:
        """Choose the objects to evict so that `nbytes` more fit; they are not removed here."""
        with self._lock:
            excess, chosen = self._excess(nbytes, quota), list[str]()
            if excess > 0:
                self.apply()
                for name, size in self.index.in_order(quota[0] if quota else None):
                    if name not in self._pins and name not in self._used:
                        chosen.append(name)
                        excess -= size
                        if excess <= 0:
                            break
            return chosen

    @contextlib.contextmanager
    def reserve(self, nbytes: int) -> Iterator[None]:
        """Count bytes that are about to come, and make room for them first."""
        with self._lock:
            self._make_room(nbytes)
            self._in_flight_bytes += nbytes
        try:
            yield
        finally:
            with self._lock:
                self._in_flight_bytes -= nbytes

    def _make_room(self, nbytes: int) -> None:
        """Evict for what is about to come; may raise OSError where that leaves no room."""
        self._evict(nbytes)

    def _evict(self, nbytes: int, quota: tuple[str, int] | None = None) -> None:
        while names := self.victims(nbytes, quota):
            for name in names:
                self.stats.count("evicted", self.name, int(self._let_go(name)))

    def _let_go(self, name: str) -> bool:
        """Delete an object and remove it from the count; False if there was none, or it cannot be deleted."""
        raise NotImplementedError

    def _look(self) -> None:
        """Count what is really there, where others may change it."""

    def _excess(self, nbytes: int, quota: tuple[str, int] | None) -> int:
        if quota is not None:
            return nbytes + self._totals[quota[0]] - quota[1]
        return 0 if self._cap_bytes is None else self._totals[None] + self._in_flight_bytes + nbytes - self._cap_bytes

    def _grow(self, nbytes: int, owner: str | None) -> None:
        for group in {None, owner} & {*self._totals}:
            self._totals[group] += nbytes

    def _note(self, name: str, important_ratio: float | None) -> None:
        self._noted.append((name, self._now_s(), important_ratio))
        if len(self._noted) >= _APPLY_EVERY:
            self.apply()

    def apply(self) -> None:
        """Enter the uses that were noted in the index."""
        noted, self._noted = self._noted, []
        with contextlib.suppress(OSError):
            self.index.note(noted)

    def _now_s(self) -> float:
        """Seconds since 1970, but never less than before."""
        self._last_s = max(time.time(), self._last_s + 1e-6)
        return self._last_s


class BoundedTier(Budget):
    """A tier whose bytes, with those being written, stay below a cap; all else is the tier's.

    The tier is counted when the first object is put, and again every few seconds while objects are put, so several
    processes together may pass the cap by what they put in between.

    The cap is `cap_bytes`, or with `spare_bytes` so many more than the tier holds at first. `owner` is the namespace
    of what is put, to which `quota_bytes` applies.
    """

    def __init__(
        self,
        tier: Tier,
        cap_bytes: int | None,
        policy: EvictionPolicy,
        index: Index,
        *,
        owner: str = "",
        spare_bytes: int | None = None,
        quota_bytes: int | None = None,
    ) -> None:
        super().__init__(cap_bytes, policy, index)
        self.tier, self.name, self.owner = tier, tier.name, owner
        self.quota = None if quota_bytes is None else (owner, quota_bytes)
        self._totals |= {} if quota_bytes is None else {owner: 0}
        self._spare_bytes = spare_bytes
        self._next_look_s = self._next_recount_s = -1.0
        self._has_put = False
        self._stuck: frozenset[str] = frozenset()

    def __getattr__(self, method: str) -> Any:
        """Pass on what is not bounded here."""
        return getattr(self.tier, method)

    def sync(self, space: str = "", thorough: bool = False) -> None:
        """Bring the index in step with the tier; raises OSError if one of them cannot be asked now."""
        with self._lock:
            self.index.sync(self.tier, space, thorough)

    def open(self, name: str) -> Source | None:
        """Open an object, and count this as a use of it."""
        source = self.tier.open(name)
        if source is not None:
            self.use(name)
        return source

    def put_if_absent(self, name: str, parts: Sequence[memoryview]) -> bool:
        """Make room, then store; raises OSError(ENOSPC) if what is pinned and in flight leaves no room."""
        nbytes = sum(map(len, parts))
        with self.reserve(nbytes):
            stored = self._put(name, parts, nbytes)
        self.know(name, self.tier.stat(name) if stored else None)
        return stored

    def replace(self, name: str, parts: Sequence[memoryview]) -> None:
        """Make room, then store whether the object is there or not; errors as in `put_if_absent`."""
        try:
            with self.reserve(sum(map(len, parts))):
                self.tier.replace(name, parts)
        finally:
            self.know(name, self.tier.stat(name))

    def know(self, name: str, stat: ObjectStat | None, key: ChunkKey | None = None) -> None:
        """Enter an object and which chunk it holds; if the index cannot be written now, `sync` enters it later."""
        self._has_put = True
        with self._lock, contextlib.suppress(OSError):
            row = self.index.row(name) if key is not None else None
            if stat is not None and (row is None or row[0] != stat.nbytes):
                self.add(name, stat.nbytes, stat.created)
            if key is not None:
                self.describe([(name, key)], is_ours=row is None or row[1] == self.owner)

    def describe(self, said: Sequence[tuple[str, ChunkKey]], is_ours: bool = False) -> None:
        """Enter which chunks objects hold; `is_ours` says that they counted as the owner's before."""
        with self._lock:
            self.index.describe(said, self.owner)
            if self.quota is not None and not is_ours:
                self._count()

    def delete(self, name: str, source: Source | None = None) -> bool:
        """Remove an object; with `source`, only if it is still that one."""
        removed = self.tier.delete(name, source)
        if removed or source is None:
            self.forget(name)
        return removed

    def forget(self, name: str) -> None:
        """Remove an object from the count that turned out to be gone."""
        with contextlib.suppress(OSError):
            self.remove(name)

    def set_pin(self, name: str, pinned: bool) -> None:
        """Keep an object from being evicted, also after a restart if the tier behind remembers, or let it."""
        Budget.set_pin(self, name, pinned)
        self.tier.set_pin(name, pinned)

    def shrink(self, most_bytes: int) -> int:
        """Evict until no more than so many bytes are left, or only what is pinned; gives the bytes that left."""
        with self._lock:
            self._next_look_s = -1.0
            before, cap_bytes = self.nbytes, self._cap_bytes
            try:
                self._cap_bytes = most_bytes + self._in_flight_bytes
                self._evict(0)
            finally:
                self._cap_bytes = cap_bytes
            return before - self.nbytes

    def close(self) -> None:
        """Keep the order of eviction, list what was put for the next process, and close the tier behind."""
        with self._lock:
            self.apply()
            if self.tier.is_local and self._has_put:
                with contextlib.suppress(OSError):
                    self.sync()
            self.index.close()
        self.tier.close()

    def _make_room(self, nbytes: int) -> None:
        self._look()
        pinned_bytes = (
            0 if self._cap_bytes is None else self._held_bytes({*self._pins, *self._used}) + self._in_flight_bytes
        )
        excess = 0 if self._cap_bytes is None else pinned_bytes + nbytes - self._cap_bytes
        for _ in range(2) if excess <= 0 else ():  # what can never fit evicts nothing
            for quota in (self.quota, None):
                if quota is not None or self._cap_bytes is not None:
                    self._evict(nbytes, quota)
            excess = self._excess(nbytes, None)
            if excess <= 0:
                return
            self._next_look_s = -1.0  # other processes may have made room since it was counted
            self._look()
        if excess > 0:
            raise OSError(
                errno.ENOSPC,
                f"{nbytes} bytes do not fit: of {self._cap_bytes} bytes {self.pinned_bytes} are pinned and "
                f"{self._in_flight_bytes} are being written",
            )

    def _put(self, name: str, parts: Sequence[memoryview], nbytes: int) -> bool:
        """Store; on a full device once more, after as much was evicted as is needed."""
        try:
            return self.tier.put_if_absent(name, parts)
        except OSError as error:
            with self._lock:
                most_bytes = self.nbytes - self._in_flight_bytes - nbytes
                if error.errno not in _FULL or not self.shrink(max(0, most_bytes)):
                    raise
        return self.tier.put_if_absent(name, parts)

    def _evict(self, nbytes: int, quota: tuple[str, int] | None = None) -> None:
        """As in `Budget`; sizes are read again first if more has to leave than `nbytes`."""
        if self._excess(nbytes, quota) > max(nbytes, 1) and time.monotonic() > self._next_recount_s:
            self._next_recount_s = time.monotonic() + _RECOUNT_S
            self.index.distrust()  # more has to leave than this one takes: are the sizes right?
            self._next_look_s = -1.0
            self._look()
            for name in self.index.larger(self._cap_bytes):  # damaged: what is whole need not leave for it
                if name not in self._pins and name not in self._used:
                    self.stats.count("evicted", self.name, int(self._let_go(name)))
        super()._evict(nbytes, quota)

    def _let_go(self, name: str) -> bool:
        """As in `Budget`; what cannot be deleted counts as pinned from then on."""
        if not is_name(name):  # what a file says that anybody may have written
            self.remove(name)
            return False
        try:
            self.tier.delete(name)
        except OSError as error:
            logger.warning("chunk %s cannot be evicted (%s) and stays", name[-64:], error)
            self._stuck |= {name}
            Budget.set_pin(self, name, True)
            return False
        self.remove(name)
        return True

    def _count(self) -> None:
        self._totals = {group: self.index.nbytes(group) for group in self._totals}

    def _look(self) -> None:
        """Count what is there, unless that was done a moment ago, or takes the time of another machine for nothing."""
        began_s = time.monotonic()
        is_counted = self.tier.is_local or self._cap_bytes is not None or self.quota is not None
        if began_s < self._next_look_s or not is_counted:
            return
        self._next_look_s = began_s + _LOOK_EVERY_S
        try:
            self.sync(thorough=True)
            self._count()
            self._pins = {*self.tier.pins(), *self._stuck}
        except OSError as error:
            logger.info("the %s tier cannot be listed now (%s)", self.name, error)
            self._next_look_s = -1.0
            return
        if self._spare_bytes is not None:
            self._cap_bytes, self._spare_bytes = self._totals[None] + self._in_flight_bytes + self._spare_bytes, None
        now_s = time.monotonic()
        self._next_look_s = now_s + max(_LOOK_EVERY_S, 50 * (now_s - began_s))
