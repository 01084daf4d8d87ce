# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What happened in a store: counts by kind and name, times by stage, and each warning once."""

import contextlib
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Iterator

from .locks import new_lock

__all__ = ["StoreStats"]

logger = logging.getLogger("hf_blend.store")

_MAX_WARNED = 10_000


class StoreStats:
    """Counts that threads may share, grouped as `hits`, `misses` and so on."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self.lock = new_lock()  # held around each change of `counts`
        self._seconds: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._warned: set[str] = set()

    @contextlib.contextmanager
    def timed(self, stage: str, name: str) -> Iterator[None]:
        """Add the time that a block takes to `seconds`, under a stage such as "load_seconds" and a name."""
        began_s = time.perf_counter()
        try:
            yield
        finally:
            with self.lock:
                self._seconds[stage][name] += time.perf_counter() - began_s  # type: ignore[assignment]

    def seconds(self) -> dict[str, dict[str, float]]:
        """Time by stage and name, in seconds."""
        with self.lock:
            return {stage: dict(sorted(times.items())) for stage, times in sorted(self._seconds.items())}

    def count(self, group: str, name: str, by: int = 1) -> None:
        """Add to one count."""
        with self.lock:
            self.counts[group, name] += by

    def group(self, group: str) -> dict[str, int]:
        """Give the counts of one group, by name."""
        with self.lock:
            return {name: count for (kind, name), count in sorted(self.counts.items()) if kind == group and count}

    def warn_once(self, text: str) -> None:
        """Log a warning unless the same was logged before."""
        with self.lock:
            known = text in self._warned or len(self._warned) >= _MAX_WARNED
            self._warned.add(text)
        if not known:
            logger.warning(text)
