# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What happened in a store: counts by kind and name, and each warning once."""

import logging
import threading
from collections import Counter

__all__ = ["Tally"]

logger = logging.getLogger("hf_blend.store")

_MAX_WARNED = 10_000


class Tally:
    """Counts that threads may share, grouped as `hits`, `misses` and so on."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()
        self._warned: set[str] = set()
        self._lock = threading.Lock()

    def count(self, group: str, name: str, by: int = 1) -> None:
        """Add to one count.

        Args:
            group: what kind of event, such as "misses".
            name: which, such as "digest".
            by: how many.
        """
        with self._lock:
            self._counts[group, name] += by

    def group(self, group: str) -> dict[str, int]:
        """The counts of one group, by name."""
        with self._lock:
            return {name: count for (kind, name), count in sorted(self._counts.items()) if kind == group and count}

    def warn_once(self, text: str) -> None:
        """Log a warning unless the same was logged before."""
        with self._lock:
            known = text in self._warned or len(self._warned) >= _MAX_WARNED
            self._warned.add(text)
        if not known:
            logger.warning(text)
