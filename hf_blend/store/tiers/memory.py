# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Objects as bytes in the memory of this process: for tests, and as the simplest tier there is."""

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence

from .base import BytesSource, ObjectStat, Source, Tier, check_name

__all__ = ["MemoryTier"]


class MemoryTier(Tier):
    """Objects by name in a dictionary; they are gone with the process."""

    name = "bytes"

    def __init__(self) -> None:
        self.objects: dict[str, BytesSource] = {}
        self._lock = threading.RLock()

    def open(self, name: str) -> Source | None:
        """Open an object, or None if there is none."""
        return self.objects.get(check_name(name))

    def put(self, name: str, parts: Sequence[memoryview]) -> None:
        """Store the parts one after the other."""
        content, now_s = b"".join(parts), time.time()
        self.objects[check_name(name)] = BytesSource(content, ObjectStat(len(content), now_s, now_s))

    def delete(self, name: str) -> bool:
        """Remove an object; False if there was nothing to remove."""
        return self.objects.pop(name, None) is not None

    def stat(self, name: str) -> ObjectStat | None:
        """Look an object up."""
        entry = self.objects.get(check_name(name))
        return entry.stat if entry else None

    def listing(self, prefix: str = "") -> Iterator[tuple[str, ObjectStat]]:
        """Walk over the objects whose names begin so."""
        for name, entry in sorted(self.objects.copy().items()):
            if name.startswith(prefix):
                yield name, entry.stat

    def set_used(self, name: str, stat: ObjectStat, used_s: float) -> None:
        """Record when an object was used last, as long as the process lives."""
        if entry := self.objects.get(name):
            entry.stat = entry.stat._replace(used=used_s)

    def lock(self) -> contextlib.AbstractContextManager[object]:
        """Keep other threads from evicting."""
        return self._lock
