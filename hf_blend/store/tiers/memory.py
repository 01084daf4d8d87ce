# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Objects as bytes in the memory of this process: for tests, and as the simplest tier there is."""

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
        self._names: dict[str, frozenset[str]] = {}
        self._pins: frozenset[str] = frozenset()
        self._lock = threading.Lock()

    def open(self, name: str) -> Source | None:
        """Open an object, or None if there is none."""
        return self.objects.get(check_name(name))

    def put_if_absent(self, name: str, parts: Sequence[memoryview]) -> bool:
        """Store the parts one after the other; False if the object was there already."""
        source = BytesSource(b"".join(parts), time.time())
        with self._lock:
            if name in self.objects:
                return False
            self.objects[check_name(name)] = source
            self._names.pop(name[:2], None)
        return True

    def replace(self, name: str, parts: Sequence[memoryview]) -> None:
        """Store the parts one after the other, whether the object is there or not."""
        source = BytesSource(b"".join(parts), time.time())
        with self._lock:
            self.objects[check_name(name)] = source
            self._names.pop(name[:2], None)

    def delete(self, name: str, source: Source | None = None) -> bool:
        """Remove an object; with `source`, only if it is still that one."""
        with self._lock:
            found = self.objects.get(name)
            if found is None or (source is not None and source.identity != found.identity):
                return False
            del self.objects[name]
            self._names.pop(name[:2], None)
        return True

    def names(self, space: str) -> frozenset[str]:
        """All names of a space; the same frozenset as last time if nothing changed."""
        with self._lock:
            if space not in self._names:
                self._names[space] = frozenset(name for name in self.objects if name[:2] == space)
            return self._names[space]

    def stat(self, name: str) -> ObjectStat | None:
        """Size and age of an object, or None if there is none."""
        found = self.objects.get(check_name(name))
        return found.stat if found else None

    def listing(self) -> Iterator[tuple[str, ObjectStat]]:
        """Walk over every object, with its size and age."""
        for name, found in sorted(self.objects.items()):
            yield name, found.stat

    def set_pin(self, name: str, pinned: bool) -> None:
        """Remember, as long as the process lives, that an object must not be evicted, or that it may."""
        with self._lock:
            self._pins = self._pins | {name} if pinned else self._pins - {name}

    def pins(self) -> frozenset[str]:
        """Names of the objects that must not be evicted."""
        return self._pins
