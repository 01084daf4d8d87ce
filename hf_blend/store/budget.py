# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Bytes by name under a cap, and which objects leave so that more fit: the book of every tier with a cap."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from .eviction.base import EvictionPolicy
from .locks import new_lock

__all__ = ["Budget"]

Owned = Callable[[str], bool]


class Budget:
    """Sizes, pins and an eviction policy. It moves no bytes itself; threads may share it."""

    def __init__(self, cap_bytes: int | None, policy: EvictionPolicy) -> None:
        self.policy = policy
        self._cap_bytes = cap_bytes
        self._in_flight_bytes = 0
        self._sizes: dict[str, int] = {}
        self._total = 0
        self._pins: set[str] = set()
        self._used: Counter[str] = Counter()  # by how many running requests
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
            return self._total + self._in_flight_bytes

    @property
    def pinned_bytes(self) -> int:
        """Bytes that may not leave."""
        with self._lock:
            self._look()
            return sum(self._sizes.get(name, 0) for name in self._pins)

    @property
    def reads_importance(self) -> bool:
        """Whether the policy uses the share of an object's tokens that was important."""
        return self.policy.reads_importance

    def add(self, name: str, nbytes: int, stamp_s: float | None = None) -> None:
        """Enter an object, or correct its size."""
        with self._lock:
            self._total += nbytes - self._sizes.get(name, 0)
            self._sizes[name] = nbytes
            self.policy.use(name, self._now_s() if stamp_s is None else stamp_s)

    def use(self, name: str, important_ratio: float | None = None) -> None:
        """Count a use of an object, or report which share of its tokens was important."""
        with self._lock:
            if name in self._sizes:
                self.policy.use(name, self._now_s(), important_ratio)

    def remove(self, name: str) -> int:
        """Strike an object off; its pin stays for its return. Gives the bytes that it took."""
        with self._lock:
            nbytes = self._sizes.pop(name, 0)
            self._total -= nbytes
            self.policy.forget(name)
            return nbytes

    def sync(self, found: Mapping[str, tuple[int, float]], pins: Iterable[str]) -> None:
        """Take over what is really there: size and time of each object."""
        with self._lock:
            for name in self._sizes.keys() - found.keys():
                self.remove(name)
            for name in sorted(found.keys() - self._sizes.keys(), key=lambda name: found[name][1]):
                self.add(name, *found[name])
            self._pins = set(pins)

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

    def fits(self, nbytes: int, *, owned: Owned | None = None, quota_bytes: int = 0) -> bool:
        """Return True if so many more bytes stay below the cap, or with `owned`, as in `victims`, below the quota."""
        with self._lock:
            return self._excess(nbytes, owned, quota_bytes) <= 0

    def victims(self, nbytes: int, *, owned: Owned | None = None, quota_bytes: int = 0) -> list[str]:
        """Choose the objects that leave so that more bytes fit; they are not removed here."""
        with self._lock:
            excess = self._excess(nbytes, owned, quota_bytes)
            chosen: list[str] = []
            for name in self.policy.victims() if excess > 0 else ():
                if name not in self._pins and name not in self._used and (owned is None or owned(name)):
                    chosen.append(name)
                    excess -= self._sizes[name]
                    if excess <= 0:
                        break
            return chosen

    def in_order(self) -> list[str]:
        """All objects, the one that leaves first first."""
        with self._lock:
            return list(self.policy.victims())

    def _look(self) -> None:
        """Count what is really there, where others may change it."""

    def _excess(self, nbytes: int, owned: Owned | None, quota_bytes: int) -> int:
        if owned is not None:
            return nbytes + sum(size for name, size in self._sizes.items() if owned(name)) - quota_bytes
        return 0 if self._cap_bytes is None else self._total + self._in_flight_bytes + nbytes - self._cap_bytes

    def _now_s(self) -> float:
        """A clock that only goes forward, whatever happens to the system's."""
        self._last_s = max(time.time(), self._last_s + 1e-6)
        return self._last_s
