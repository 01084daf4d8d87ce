# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Bytes by name under a cap, and which objects leave so that more fit: the book of every tier with a cap."""

import contextlib
import time
from collections import Counter
from collections.abc import Iterable, Iterator

from .eviction.base import EvictionPolicy
from .index import Index, Use
from .locks import new_lock
from .stats import StoreStats

__all__ = ["APPLY_EVERY", "Budget"]

APPLY_EVERY = 1024  # uses that are noted before they are weighed


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
        self._lock = new_lock()

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
        """Enter an object, or correct its size, and count a use of it."""
        with self._lock:
            now_s, known = self._now_s(), self.index.row(name)
            self.apply()  # what was used before
            self.index.enter([(name, nbytes, now_s if created is None else created, self.owner)])
            self._grow(nbytes - (known[0] if known else 0), known[1] if known else self.owner)
            if known:
                self._note(name, None)

    def use(self, name: str, important_ratio: float | None = None) -> None:
        """Count a use of an object, or report which share of its tokens was important."""
        with self._lock, contextlib.suppress(OSError):  # it costs only a better choice of who leaves
            self._note(name, important_ratio)

    def remove(self, name: str) -> int:
        """Strike an object off; its pin stays for its return. Gives the bytes that it took."""
        with self._lock:
            row = self.index.row(name)
            if row is None:
                return 0
            self.index.remove(name)
            self._grow(-row[0], row[1])
            return row[0]

    def set_pin(self, name: str, pinned: bool) -> None:
        """Keep an object, entered or not, from leaving, or let it."""
        with self._lock:
            (self._pins.add if pinned else self._pins.discard)(name)

    def protect(self, names: Iterable[str]) -> None:
        """Keep objects, entered or not, from leaving until as many calls of `release` as of this have named them."""
        with self._lock:
            self._used.update(names)

    def release(self, names: Iterable[str]) -> None:
        """Take one `protect` back."""
        with self._lock:
            self._used.subtract(names)
            self._used += Counter()  # drops those with a count of 0

    def fits(self, nbytes: int, quota: tuple[str, int] | None = None) -> bool:
        """Return True if so many more bytes stay below the cap, or with a quota (owner, bytes) below that."""
        with self._lock:
            return self._excess(nbytes, quota) <= 0

    def victims(self, nbytes: int, quota: tuple[str, int] | None = None) -> list[str]:
        """Choose the objects that leave so that more bytes fit; they are not removed here."""
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
        """Let go of what leaves, until enough is gone."""
        while names := self.victims(nbytes, quota):
            for name in names:
                self.stats.count("evicted", self.name, int(self._let_go(name)))

    def _let_go(self, name: str) -> bool:
        """Delete an object and strike it off; False if it was none, or stays and does not count as one that may."""
        raise NotImplementedError

    def _look(self) -> None:
        """Count what is really there, where others may change it."""

    def _excess(self, nbytes: int, quota: tuple[str, int] | None) -> int:
        if quota is not None:
            return nbytes + self._totals[quota[0]] - quota[1]
        return 0 if self._cap_bytes is None else self._totals[None] + self._in_flight_bytes + nbytes - self._cap_bytes

    def _grow(self, nbytes: int, owner: str | None) -> None:
        for one in {None, owner} & {*self._totals}:
            self._totals[one] += nbytes

    def _note(self, name: str, important_ratio: float | None) -> None:
        self._noted.append((name, self._now_s(), important_ratio))
        if len(self._noted) >= APPLY_EVERY:
            self.apply()

    def apply(self) -> None:
        """Enter the uses that were noted in the index."""
        noted, self._noted = self._noted, []
        with contextlib.suppress(OSError):
            self.index.note(noted)

    def _now_s(self) -> float:
        """A clock that only goes forward, whatever happens to the system's."""
        self._last_s = max(time.time(), self._last_s + 1e-6)
        return self._last_s
