# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A tier that gives no more than so many bytes a second: for measurements of what a slower one would do."""

import threading
import time

from .tiers.base import Source, Tier
from .wrapped import WrappedTier

__all__ = ["ThrottledTier"]


class ThrottledTier(WrappedTier):
    """Reads from the tier behind, all readers together at a bounded rate.

    Args:
        tier: the tier behind.
        bytes_s: the rate.
    """

    def __init__(self, tier: Tier, bytes_s: float) -> None:
        super().__init__(tier)
        self._bytes_s, self._free_at, self._lock = bytes_s, 0.0, threading.Lock()

    def open(self, name: str) -> Source | None:
        """As the tier behind, to be read slowly."""
        source = self.tier.open(name)
        return None if source is None else _SlowSource(source, self)

    def wait(self, nbytes: int) -> None:
        """Wait until so many more bytes may have come."""
        with self._lock:
            self._free_at = max(self._free_at, time.perf_counter()) + nbytes / self._bytes_s
            until = self._free_at
        time.sleep(max(0.0, until - time.perf_counter()))


class _SlowSource:
    def __init__(self, source: Source, tier: ThrottledTier) -> None:
        self._source, self._tier = source, tier
        self.stat, self.identity = source.stat, source.identity

    def read_into(self, start: int, target: memoryview) -> None:
        nbytes = len(target)
        self._source.read_into(start, target)
        self._tier.wait(nbytes)

    def close(self) -> None:
        self._source.close()
