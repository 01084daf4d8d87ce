# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A tier under a cap: something leaves before something new comes in."""

import errno
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from .budget import Budget
from .eviction.base import EvictionPolicy
from .snapshot import load_order, save_order
from .tiers.base import Source, Tier, WrappedTier

__all__ = ["BoundedTier"]

logger = logging.getLogger(__name__)

_SAVE_EVERY = 1024  # uses since the order was saved
_LOOK_EVERY_S = 2.0  # at what other processes stored, and at most a fiftieth of the time
_FULL = (errno.ENOSPC, errno.EDQUOT)


class BoundedTier(WrappedTier, Budget):
    """Passes everything on to another tier, and keeps its bytes, with those being written, below a cap.

    What is in the tier is counted when the first object is put, and again every few seconds while objects are put, so
    several processes together may pass the cap by what they put in between.
    """

    def __init__(
        self,
        tier: Tier,
        cap_bytes: int | None,
        policy: EvictionPolicy,
        *,
        spare_bytes: int | None = None,
        order: Path | None = None,
        owned: Callable[[str], bool] | None = None,
        quota_bytes: int | None = None,
        on_evicted: Callable[[str, int], None] | None = None,
        on_fault: Callable[[str], None] | None = None,
    ) -> None:
        WrappedTier.__init__(self, tier)
        Budget.__init__(self, cap_bytes, policy)
        self.on_fault = on_fault
        self.owned = owned
        self.quota_bytes = quota_bytes
        self.on_evicted = on_evicted
        self.makes_room = True  # on a full device, by evicting; not where another tier takes what is refused
        self.before_eviction: Callable[[str], object] | None = None  # receives the name of what is about to leave
        self._spare_bytes = spare_bytes
        self._order = order
        self._next_look_s = -1.0
        self._unsaved = 0
        self._restored = False
        self._stuck: frozenset[str] = frozenset()

    def has_room(self, nbytes: int) -> bool:
        """Return True if an object of this namespace with so many bytes fits, and nothing has to leave for it."""
        with self._lock:
            if self._is_counted:
                self._look()
            quota_bytes = self.quota_bytes
            is_within = quota_bytes is None or self.fits(nbytes, owned=self.owned, quota_bytes=quota_bytes)
            return is_within and self.fits(nbytes)

    def open(self, name: str) -> Source | None:
        """Open an object, and count this as a use of it."""
        source = self.tier.open(name)
        if source is not None:
            self.use(name)
        return source

    def put_if_absent(self, name: str, parts: Sequence[memoryview]) -> bool:
        """Make room, then store; raises OSError(ENOSPC) if what is pinned and in flight leaves no room."""
        nbytes, stored = sum(map(len, parts)), None
        self._reserve(nbytes)
        try:
            stored = self._put(name, parts, nbytes)
        finally:
            with self._lock:
                self._in_flight_bytes -= nbytes
                if stored is not None:
                    self.add(name, nbytes)
                    self._count_use()
        return stored

    def replace(self, name: str, parts: Sequence[memoryview]) -> None:
        """Make room, then store whether the object is there or not; errors as in `put_if_absent`."""
        nbytes = sum(map(len, parts))
        self._reserve(nbytes)
        try:
            self.tier.replace(name, parts)
        finally:
            with self._lock:
                self._in_flight_bytes -= nbytes
                stat = self.tier.stat(name)
                if stat is not None:
                    self.add(name, stat.nbytes)
                    self._count_use()

    def delete(self, name: str, source: Source | None = None) -> bool:
        """Remove an object; with `source`, only if it is still that one."""
        removed = self.tier.delete(name, source)
        if removed:
            self.remove(name)
        return removed

    def set_pin(self, name: str, pinned: bool) -> None:
        """Keep an object from being evicted, also after a restart if the tier behind remembers, or let it."""
        Budget.set_pin(self, name, pinned)
        self.tier.set_pin(name, pinned)

    def use(self, name: str, important_ratio: float | None = None) -> None:
        """Count a use of an object, or report which share of its tokens was important."""
        with self._lock:
            if not self._restored and self._is_counted:
                self._look()
            Budget.use(self, name, important_ratio)
            self._count_use()

    def shrink(self, most_bytes: int) -> int:
        """Evict until no more than so many bytes are left, or only what is pinned; gives the bytes that left."""
        with self._lock:
            self._next_look_s = -1.0
            before = self.nbytes
            self._evict(lambda: self.victims(0, owned=lambda _: True, quota_bytes=most_bytes))
            return before - self.nbytes

    def close(self) -> None:
        """Save the order, and close the tier behind."""
        with self._lock:
            self._save()
        self.tier.close()

    @property
    def _is_counted(self) -> bool:
        """Whether requests must know what is there; a listing of a tier on another machine takes its time."""
        return self.tier.is_local or self._cap_bytes is not None or self.quota_bytes is not None

    def _reserve(self, nbytes: int) -> None:
        with self._lock:
            if self._is_counted:
                self._look()
            owned, quota_bytes = self.owned, self.quota_bytes
            if owned is not None and quota_bytes is not None:
                self._evict(lambda: self.victims(nbytes, owned=owned, quota_bytes=quota_bytes))
            self._evict(lambda: self.victims(nbytes))
            if not self.fits(nbytes):
                raise OSError(
                    errno.ENOSPC,
                    f"{nbytes} bytes do not fit: of {self.cap_bytes} bytes {self.pinned_bytes} are pinned and "
                    f"{self._in_flight_bytes} are being written",
                )
            self._in_flight_bytes += nbytes

    def _put(self, name: str, parts: Sequence[memoryview], nbytes: int) -> bool:
        """Store; on a full device once more, after as much was evicted as is needed."""
        try:
            return self.tier.put_if_absent(name, parts)
        except OSError as error:
            with self._lock:
                most_bytes = self.nbytes - 2 * nbytes  # of which nbytes are these, in flight
                if error.errno not in _FULL or not self.makes_room or not self.shrink(max(0, most_bytes)):
                    raise
        return self.tier.put_if_absent(name, parts)

    def _evict(self, choose: Callable[[], list[str]]) -> None:
        """Delete what is chosen, until nothing is; what cannot be deleted stays and counts as pinned from then on."""
        while names := choose():
            for name in names:
                self._evict_one(name)

    def _evict_one(self, name: str) -> None:
        if self.before_eviction is not None:
            self.before_eviction(name)
        try:
            self.tier.delete(name)
        except OSError as error:
            logger.warning("chunk %s cannot be evicted (%s) and stays", name[-64:], error)
            self._stuck |= {name}
            Budget.set_pin(self, name, True)
            return
        nbytes = self.remove(name)
        if self.on_evicted is not None:
            self.on_evicted(name, nbytes)

    def _look(self) -> None:
        """Count what is there, unless that was done a moment ago."""
        began_s = time.monotonic()
        if began_s < self._next_look_s:
            return
        self._next_look_s = began_s + _LOOK_EVERY_S
        try:
            found = {name: (stat.nbytes, stat.created) for name, stat in self.tier.listing()}
            pins = self.tier.pins()
        except OSError as error:
            logger.info("the %s tier cannot be listed now (%s)", self.name, error)
            self._next_look_s = -1.0
            return
        self.sync(found, pins | self._stuck)
        if not self._restored:
            self._restore()
        now_s = time.monotonic()
        self._next_look_s = now_s + max(_LOOK_EVERY_S, 50 * (now_s - began_s))

    def _restore(self) -> None:
        """At the first look."""
        self._restored = True
        if self._order is not None:
            self.policy.restore(load_order(self._order, self.on_fault))
        if self._spare_bytes is not None:
            self._cap_bytes = self._total + self._in_flight_bytes + self._spare_bytes

    def _count_use(self) -> None:
        self._unsaved += 1
        if self._unsaved >= _SAVE_EVERY:
            self._save()

    def _save(self) -> None:
        if self._order is not None and self._restored and self._unsaved:
            save_order(self._order, self.policy.states())
        self._unsaved = 0
