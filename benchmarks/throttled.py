# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A tier that gives no more than so many bytes a second: for measurements of what a slower one would do."""

import threading
import time
from collections.abc import Iterator, Sequence

from hf_blend.store.tiers.base import ObjectStat, Source, Tier

__all__ = ["ThrottledTier", "WrappedTier"]

SLACK_S = 1e-3  # what a sleep lasts too long, or a reader pauses, is made up for by reads that follow within this time


class WrappedTier(Tier):
    """Does what the tier behind does."""

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self.name = tier.name
        self.is_local = tier.is_local

    def open(self, name: str) -> Source | None:
        """As the tier behind."""
        return self.tier.open(name)

    def put(self, name: str, parts: Sequence[memoryview]) -> None:
        """As the tier behind."""
        self.tier.put(name, parts)

    def delete(self, name: str) -> bool:
        """As the tier behind."""
        return self.tier.delete(name)

    def stat(self, name: str) -> ObjectStat | None:
        """As the tier behind."""
        return self.tier.stat(name)

    def listing(self, prefix: str = "") -> Iterator[tuple[str, ObjectStat]]:
        """As the tier behind."""
        return self.tier.listing(prefix)

    def set_score(self, name: str, stat: ObjectStat, score: float) -> None:
        """As the tier behind."""
        self.tier.set_score(name, stat, score)


class ThrottledTier(WrappedTier):
    """Reads from the tier behind, all readers together at a bounded rate."""

    def __init__(self, tier: Tier, bytes_s: float) -> None:
        super().__init__(tier)
        self._bytes_s, self._free_at, self._lock = bytes_s, 0.0, threading.Lock()

    def open(self, name: str) -> Source | None:
        """As the tier behind, to be read slowly."""
        source = self.tier.open(name)
        return None if source is None else _SlowSource(source, self)

    def wait(self, nbytes: int, begun: float) -> None:
        """Wait until so many more bytes may have come."""
        with self._lock:
            self._free_at = max(self._free_at, begun - SLACK_S) + nbytes / self._bytes_s
            ahead = self._free_at - time.perf_counter()
        if ahead > 0:
            time.sleep(ahead)


class _SlowSource:
    def __init__(self, source: Source, tier: ThrottledTier) -> None:
        self._source = source
        self._tier = tier
        self.stat = source.stat

    def read_into(self, start: int, target: memoryview) -> None:
        nbytes = len(target)
        begun = time.perf_counter()
        self._source.read_into(start, target)
        self._tier.wait(nbytes, begun)

    def close(self) -> None:
        self._source.close()
