# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Verified chunks ready to use, in memory, and the counts of what happened in a store."""

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .chunk import ChunkKey, ChunkKV, Layout

_MAX_DEFAULT_BYTES = 64 << 30
FILES = {"": ("", "memory.max"), "memory": ("memory", "memory.limit_in_bytes")}  # by controller: cgroup v2, v1
logger = logging.getLogger("hf_blend.store")
WARN_EVERY_S = 60.0
_MOST_WARNED = 1000  # subjects that are remembered


class MemoryCache:
    """Chunks by digest, together never larger than the cap, or than the one chunk that was put last.

    The least recently used chunk leaves first.
    """

    def __init__(self, cap_bytes: int) -> None:
        self.cap_bytes = cap_bytes
        self.nbytes = 0
        self.stats = StoreStats()
        self._chunks: dict[str, ChunkKV] = {}  # the least recently used first
        self._lock = threading.RLock()

    def get(self, keys: Sequence[ChunkKey], layout: Layout | None = None) -> dict[ChunkKey, ChunkKV]:
        """Find chunks of a layout, and count the uses; what is of another layout leaves."""
        chunks: dict[ChunkKey, ChunkKV] = {}
        with self._lock:
            for key in keys:
                chunk = self._chunks.get(key.digest)
                if chunk is None or chunk.key != key:
                    continue
                if layout is not None and chunk.layout != layout:
                    self.delete(key.digest)
                    self.stats.count("load_failures", "memory:layout")
                    continue
                self._chunks[key.digest] = self._chunks.pop(key.digest)  # to the end
                chunks[key] = chunk
        if chunks:
            self.stats.count("hits", "memory", len(chunks))
        return chunks

    def contains(self, digest: str) -> bool:
        """Say whether a chunk is there, without using it."""
        return digest in self._chunks

    def put(self, chunk: ChunkKV) -> ChunkKV:
        """Keep a chunk, and evict others until it fits; returns it as it is kept."""
        if not self.cap_bytes:
            return chunk
        digest = chunk.key.digest
        chunk = chunk.stacked()
        with self._lock:
            self.delete(digest)
            while self._chunks and self.nbytes + chunk.nbytes > self.cap_bytes:
                self.delete(next(iter(self._chunks)))
                self.stats.count("evicted", "memory")
            self._chunks[digest] = chunk
            self.nbytes += chunk.nbytes
        return chunk

    def delete(self, digest: str) -> bool:
        """Drop a chunk; False if it was not there."""
        with self._lock:
            chunk = self._chunks.pop(digest, None)
            if chunk is None:
                return False
            self.nbytes -= chunk.nbytes
            return True

    def clear(self) -> None:
        """Drop everything."""
        with self._lock:
            self._chunks.clear()
            self.nbytes = 0

    def digests(self) -> list[str]:
        """List what is there."""
        with self._lock:
            return list(self._chunks)


def default_memory_bytes() -> int:
    """Give a quarter of the memory that is available now, at most 64 GiB."""
    return min(available_bytes() // 4, _MAX_DEFAULT_BYTES)


def available_bytes(groups: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> int:
    """How much memory is free: of the machine, or of the container or unit of this process where that is less."""
    import psutil

    used = psutil.Process().memory_info().rss
    left = [limit - used for limit in _limits(groups, membership)]
    return max(0, min([int(psutil.virtual_memory().available), *left]))


def _limits(groups: Path, membership: Path) -> Iterator[int]:
    """Give the limits of the groups of this process and of those around them."""
    for line in _text(membership).splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        for controller in controllers.split(","):
            if controller not in FILES:
                continue
            folder, file = FILES[controller]
            group = groups / folder / path.strip("/")
            for parent in (group, *group.parents):
                text = _text(parent / file) if parent.is_relative_to(groups) else ""
                if text.isdecimal():
                    yield int(text)


def _text(path: Path) -> str:
    """The text of a file; none where there is no such file, as on systems other than Linux."""
    try:
        return path.read_text("utf-8").strip()
    except OSError:
        return ""


class StoreStats:
    """Counts that threads may share, grouped as `hits`, `misses` and so on."""

    def __init__(self) -> None:
        self._counts: defaultdict[tuple[str, str], int] = defaultdict(int)
        self._lock = threading.RLock()
        self._warned: dict[str, float] = {}

    def count(self, group: str, name: str, by: int = 1) -> None:
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
