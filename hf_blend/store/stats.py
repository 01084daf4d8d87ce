# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What happened in a store: counts by kind and name, times by stage, and each warning once a minute."""

import contextlib
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

__all__ = ["StoreStats"]

logger = logging.getLogger("hf_blend.store")

WARN_EVERY_S = 60.0
_MOST_WARNED = 1000  # subjects that are remembered


class StoreStats:
    """Counts that threads may share, grouped as `hits`, `misses` and so on."""

    def __init__(self) -> None:
        self._counts: defaultdict[tuple[str, str], float] = defaultdict(int)
        self._lock = threading.RLock()
        self._warned: dict[str, float] = {}

    @contextlib.contextmanager
    def timed(self, stage: str, name: str) -> Iterator[None]:
        """Add the seconds that a block takes to a stage such as "load_seconds", under a name."""
        began_s = time.perf_counter()
        try:
            yield
        finally:
            self.count(stage, name, time.perf_counter() - began_s)

    def count(self, group: str, name: str, by: float = 1) -> None:
        """Add to one count."""
        with self._lock:
            self._counts[group, name] += by

    def group(self, group: str) -> dict[str, Any]:
        """Give the counts of one group, by name."""
        with self._lock:
            rows = sorted(self._counts.items())
        return {name: count for (kind, name), count in rows if kind == group and count}

    def warn(self, subject: str, text: str) -> None:
        """Log a warning, but only one a minute about a subject."""
        now_s = time.monotonic()
        with self._lock:
            if now_s < self._warned.get(subject, 0.0):
                return
            if len(self._warned) >= _MOST_WARNED:
                self._warned.clear()
            self._warned[subject] = now_s + WARN_EVERY_S
        logger.warning(text)
