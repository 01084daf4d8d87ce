# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Bytes by name under a cap, and who must leave so that more fit."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from .eviction.base import EvictionPolicy

__all__ = ["Budget"]


class Budget:
    """The book of one tier. It moves no bytes itself, and whoever owns it holds a lock around every call."""

    def __init__(self, cap_bytes: int | None, policy: EvictionPolicy) -> None:
        self.cap_bytes = cap_bytes
        self.policy = policy
        self.in_flight_bytes = 0
        self._sizes: dict[str, int] = {}
        self._total = 0
        self._pins: set[str] = set()
        self._used: Counter[str] = Counter()  # by how many requests that run
        self._last_s = 0.0

    @property
    def nbytes(self) -> int:
        """All bytes that count, with those in flight."""
        return self._total + self.in_flight_bytes

    @property
    def pinned_bytes(self) -> int:
        """Bytes that may not leave."""
        return sum(self._sizes.get(name, 0) for name in self._pins)

    @property
    def reads_importance(self) -> bool:
        """Whether the policy wants to know which share of an object's tokens was important."""
        return self.policy.reads_importance

    def add(self, name: str, nbytes: int, stamp_s: float | None = None) -> None:
        """Enter an object, or correct its size."""
        self._total += nbytes - self._sizes.get(name, 0)
        self._sizes[name] = nbytes
        self.policy.use(name, self._now_s() if stamp_s is None else stamp_s)

    def use(self, name: str, important_ratio: float | None = None) -> None:
        """Count a use of an object, if it is entered."""
        if name in self._sizes:
            self.policy.use(name, self._now_s(), important_ratio)

    def remove(self, name: str) -> int:
        """Strike an object off; its pin stays for its return. Gives the bytes that it took."""
        nbytes = self._sizes.pop(name, 0)
        self._total -= nbytes
        self.policy.forget(name)
        return nbytes

    def replace(self, found: Mapping[str, tuple[int, float]], pins: Iterable[str]) -> None:
        """Take over what is really there."""
        for name in self._sizes.keys() - found.keys():
            self.remove(name)
        for name in sorted(found.keys() - self._sizes.keys(), key=lambda name: found[name][1]):
            self.add(name, *found[name])
        self._pins = set(pins)

    def set_pin(self, name: str, pinned: bool) -> None:
        """Keep an object from leaving, or let it."""
        (self._pins.add if pinned else self._pins.discard)(name)

    def protect(self, names: Iterable[str]) -> None:
        """Keep objects, entered or not, from leaving until as many calls of `release` as of this have named them."""
        self._used.update(names)

    def release(self, names: Iterable[str]) -> None:
        """Take one `protect` back."""
        self._used.subtract(names)
        self._used += Counter()  # strikes off what nobody uses

    def fits(self, nbytes: int, *, owned: Callable[[str], bool] | None = None, quota_bytes: int = 0) -> bool:
        """Say whether so many more bytes stay below the cap, or with `owned`, as in `victims`, below the quota."""
        return self._excess(nbytes, owned, quota_bytes) <= 0

    def victims(self, nbytes: int, *, owned: Callable[[str], bool] | None = None, quota_bytes: int = 0) -> list[str]:
        """Choose who leaves so that more bytes fit; nobody is struck off yet."""
        excess = self._excess(nbytes, owned, quota_bytes)
        chosen: list[str] = []
        if excess <= 0:
            return chosen
        for name in self.policy.victims():
            if name not in self._pins and name not in self._used and (owned is None or owned(name)):
                chosen.append(name)
                excess -= self._sizes[name]
                if excess <= 0:
                    break
        return chosen

    def _excess(self, nbytes: int, owned: Callable[[str], bool] | None = None, quota_bytes: int = 0) -> int:
        if owned is not None:
            return nbytes + self._bytes_of(owned) - quota_bytes
        return 0 if self.cap_bytes is None else self.nbytes + nbytes - self.cap_bytes

    def _bytes_of(self, owned: Callable[[str], bool]) -> int:
        return sum(size for name, size in self._sizes.items() if owned(name))

    def _now_s(self) -> float:
        """A clock that only goes forward: use after use, whatever happens to the system's."""
        self._last_s = max(time.time(), self._last_s + 1e-6)
        return self._last_s
