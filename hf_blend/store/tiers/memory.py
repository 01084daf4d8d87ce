# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Objects as bytes in the memory of this process: for tests, and as the simplest tier there is."""

import threading
import time
from collections.abc import Container, Iterator, Mapping, Sequence

from .base import BytesSource, ObjectStat, Source, Tier, check_name

__all__ = ["MemoryTier"]


class MemoryTier(Tier):
    """Objects by name in a dictionary; they are gone with the process."""

    name = "bytes"

    def __init__(self) -> None:
        self.objects: dict[str, BytesSource] = {}
        self._changes = 0
        self._pins: frozenset[str] = frozenset()
        self._lock = threading.RLock()

    def open(self, name: str) -> Source | None:
        """Open an object, or None if there is none."""
        return self.objects.get(check_name(name))

    def put_if_absent(self, name: str, parts: Sequence[memoryview]) -> bool:
        """Store the parts one after the other; False if the object was there already."""
        with self._lock:
            if name in self.objects:
                return False
            self.replace(name, parts)
        return True

    def replace(self, name: str, parts: Sequence[memoryview]) -> None:
        """Store the parts one after the other, whether the object is there or not."""
        source = BytesSource(b"".join(parts), time.time())
        with self._lock:
            self.objects[check_name(name)] = source
            self._changes += 1

    def delete(self, name: str, source: Source | None = None) -> bool:
        """Remove an object; with `source`, only if it is still that one."""
        with self._lock:
            entry = self.objects.get(name)
            if entry is None or (source is not None and source.identity != entry.identity):
                return False
            del self.objects[name]
            self._changes += 1
        return True

    def shards(self, space: str = "") -> Mapping[str, str]:
        """The space itself, as it is in this process."""
        return {f"{space}/" if space else "": f"{id(self)}.{self._changes}"}

    def stat(self, name: str) -> ObjectStat | None:
        """Size and age of an object, or None if there is none."""
        entry = self.objects.get(check_name(name))
        return entry.stat if entry else None

    def listing(self, prefix: str = "", listed: Container[str] = ()) -> Iterator[tuple[str, ObjectStat | None]]:
        """Walk over the objects whose names begin so, with size and age."""
        with self._lock:
            objects = sorted(self.objects.items())
        yield from ((name, entry.stat) for name, entry in objects if name.startswith(prefix))

    def set_pin(self, name: str, pinned: bool) -> None:
        """Remember, as long as the process lives, that an object must not be evicted, or that it may."""
        with self._lock:
            self._pins = self._pins | {name} if pinned else self._pins - {name}

    def pins(self) -> frozenset[str]:
        """Names of the objects that must not be evicted."""
        return self._pins
