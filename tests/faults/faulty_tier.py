# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Faults on purpose, for tests of what is built on a store.

tier = FaultyTier(MemoryTier(), seed=7, rates={"read.flip": 0.1, "put.full": 0.05})
store = ChunkStore(None, [tier])
"""

import errno
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from throttled import WrappedTier

from hf_blend.store.tiers.base import EntryFault, ObjectStat, Source, Tier

FAULTS = {
    "open.io": "raises EIO",
    "open.denied": "raises EACCES",
    "open.timeout": "raises ETIMEDOUT after `delay_s`",
    "open.absent": "says that the object is not there",
    "open.other": "opens another object",
    "read.io": "raises EIO",
    "read.flip": "changes one bit",
    "read.zero": "gives zeros",
    "read.truncate": "ends too early",
    "read.late": "takes `delay_s` longer",
    "put.io": "raises EIO",
    "put.full": "raises ENOSPC",
    "put.torn": "raises EIO and leaves the first half under the name",
    "put.lost": "says that it stored, and did not",
    "put.flip": "stores one changed bit",
    "stat.io": "raises EIO",
    "names.io": "raises EIO",
    "delete.io": "raises EIO",
}


ERRORS = {"io": errno.EIO, "denied": errno.EACCES, "timeout": errno.ETIMEDOUT, "full": errno.ENOSPC}


class _FaultySource:
    """An open object whose reads can fail."""

    def __init__(self, source: Source, owner: "FaultyTier") -> None:
        self.stat = source.stat
        self._source = source
        self._owner = owner

    def read_into(self, start: int, target: memoryview) -> None:
        fault = self._owner.draw("read")
        if fault == "truncate":
            raise EntryFault("truncated", f"the object ends before byte {start + len(target)}")
        if fault == "late":
            time.sleep(self._owner.delay_s)
        self._source.read_into(start, target)
        if fault == "zero":
            target[:] = bytes(len(target))
        if fault == "flip" and target:
            place = self._owner.below(len(target) * 8)
            target[place // 8] ^= 1 << place % 8

    def close(self) -> None:
        self._source.close()


class FaultyTier(WrappedTier):
    """A tier in front of another that fails now and then, the same way for the same seed."""

    def __init__(
        self, tier: Tier, seed: int = 0, rates: Mapping[str, float] | None = None, delay_s: float = 0.0
    ) -> None:
        super().__init__(tier)
        self.delay_s = delay_s
        self.counts: Counter[str] = Counter()
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._rates: dict[str, dict[str, float]] = {}
        self.set_rates(rates or {})

    def set_rates(self, rates: Mapping[str, float]) -> None:
        found: dict[str, dict[str, float]] = {}
        for name, rate in rates.items():
            operation, _, fault = _checked(name).partition(".")
            found.setdefault(operation, {})[fault] = rate
        self._rates = found

    def draw(self, operation: str) -> str:
        """Decide whether an operation fails now: raises the fault, or gives its name, or "" for none."""
        with self._lock:
            fault = self._decide(operation)
            if fault:
                self.counts[f"{operation}.{fault}"] += 1
        if fault == "timeout":
            time.sleep(self.delay_s)
        if fault in ERRORS:
            raise OSError(ERRORS[fault], os.strerror(ERRORS[fault]))
        return fault

    def below(self, stop: int) -> int:
        """A random number from 0 to `stop` - 1."""
        with self._lock:
            return self._random.randrange(stop)

    def open(self, name: str) -> Source | None:
        fault = self.draw("open")
        if fault == "absent":
            return None
        if fault == "other":
            others = sorted(other for other, _ in self.tier.listing(name[:17]) if other != name)
            name = others[self.below(len(others))] if others else name
        source = self.tier.open(name)
        return _FaultySource(source, self) if source is not None else None

    def put(self, name: str, parts: Sequence[memoryview]) -> None:
        fault = self.draw("put")
        content = bytearray(b"".join(parts))
        if fault == "lost":
            return
        if fault == "torn":
            self.tier.put(name, [memoryview(content)[: len(content) // 2]])
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if fault == "flip":
            bit = self.below(len(content) * 8)
            content[bit // 8] ^= 1 << bit % 8
        self.tier.put(name, [memoryview(content)])

    def delete(self, name: str) -> bool:
        self.draw("delete")
        return self.tier.delete(name)

    def listing(self, prefix: str = "") -> Iterator[tuple[str, ObjectStat]]:
        self.draw("names")
        return self.tier.listing(prefix)

    def stat(self, name: str) -> ObjectStat | None:
        self.draw("stat")
        return self.tier.stat(name)

    def _decide(self, operation: str) -> str:
        faults = self._rates.get(operation)
        if not faults:
            return ""
        at = self._random.random()
        for fault, rate in faults.items():
            at -= rate
            if at < 0:
                return fault
        return ""


def _checked(name: str) -> str:
    if name not in FAULTS:
        raise KeyError(name)
    return name
