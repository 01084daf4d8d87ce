# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What happened in a store: counts by kind and name, times by stage, and each warning once."""

import contextlib
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

__all__ = ["StoreStats"]

logger = logging.getLogger("hf_blend.store")

_MAX_WARNED = 10_000


class StoreStats:
    """Counts that threads may share, grouped as `hits`, `misses` and so on."""

    def __init__(self) -> None:
        self._counts: defaultdict[tuple[str, str], float] = defaultdict(int)
        self._lock = threading.RLock()
        self._warned: set[str] = set()

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
            return {name: count for (kind, name), count in sorted(self._counts.items()) if kind == group and count}

    def warn_once(self, text: str) -> None:
        """Log a warning unless the same was logged before."""
        with self._lock:
            is_repeated = text in self._warned or len(self._warned) >= _MAX_WARNED
            self._warned.add(text)
        if not is_repeated:
            logger.warning(text)
