# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Verified chunks ready to use, in the memory of the machine or of a device."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from .budget import Budget
from .chunk import ChunkKey, ChunkKV, Layout
from .eviction.base import EvictionPolicy
from .guard import Guard
from .index import Index

__all__ = ["MemoryCache", "available_bytes", "default_memory_bytes"]

_MAX_DEFAULT_BYTES = 64 << 30
FILES = {"": ("", "memory.max"), "memory": ("memory", "memory.limit_in_bytes")}  # by controller: cgroup v2, v1


class MemoryCache(Budget):
    """Chunks by digest, together never larger than the cap, or than the one chunk that was put last."""

    def __init__(
        self,
        cap_bytes: int,
        policy: EvictionPolicy,
        *,
        name: str = "memory",
        device: str | None = None,
        ttl_s: float | None = None,
    ) -> None:
        super().__init__(cap_bytes, policy, Index(None, policy))
        self.name, self.device, self.ttl_s = name, device, ttl_s
        self._chunks: dict[str, tuple[ChunkKV, Guard, float]] = {}  # with the time at which it came

    def get(self, keys: Sequence[ChunkKey], layout: Layout | None = None) -> dict[ChunkKey, ChunkKV]:
        """Find chunks of a layout, and count the uses; what is too old, written to, or of another layout leaves."""
        chunks: dict[ChunkKey, ChunkKV] = {}
        with self._lock:
            for key in keys:
                name = key.digest
                if name not in self._chunks:
                    continue
                chunk, guard, since_s = self._chunks[name]
                if self.ttl_s is not None and time.monotonic() - since_s > self.ttl_s:
                    self.delete(name)
                    continue
                if not guard.is_intact():
                    self.delete(name)
                    self.stats.count("load_failures", f"{self.name}:changed")
                    self.stats.warn_once(f"chunk {name} was written to after it was handed out, and is read again")
                    continue
                self._note(name, None)
                if chunk.key is not key and chunk.key != key:
                    continue
                if not chunk.fits(layout):
                    self.delete(name)
                    self.stats.count("load_failures", f"{self.name}:layout")
                    continue
                chunks[key] = chunk
            self.stats.count("hits", self.name, len(chunks))
        return chunks

    def peek(self, digest: str) -> ChunkKV | None:
        """Give a chunk without using it; None if it is not there, or was written to."""
        with self._lock:
            chunk, guard, _ = self._chunks.get(digest, (None, None, 0.0))
            return chunk if guard is not None and guard.is_intact() else None

    def contains(self, digest: str) -> bool:
        """Return True if a chunk is there, without using it."""
        with self._lock:
            chunk = self._chunks.get(digest)
            return chunk is not None and (self.ttl_s is None or time.monotonic() - chunk[2] <= self.ttl_s)

    def put(self, chunk: ChunkKV) -> None:
        """Take a chunk, unless what is pinned or protected leaves no room for it."""
        digest = chunk.key.digest
        if not self._cap_bytes:
            return
        chunk = chunk.stacked()
        with self._lock:
            self.delete(digest)
            self._make_room(chunk.nbytes)
            if self.fits(chunk.nbytes) or not self._chunks:
                mine = chunk.to(self.device) if self.device else chunk
                self._chunks[digest] = mine, Guard(mine.buffers()), time.monotonic()
                self.add(digest, chunk.nbytes)
                self.index.describe([(digest, chunk.key)], "")

    def delete(self, digest: str) -> bool:
        """Drop a chunk; False if it was not there."""
        with self._lock:
            if digest in self._chunks:
                self.remove(digest)
            return self._chunks.pop(digest, None) is not None

    def clear(self) -> None:
        """Drop everything."""
        with self._lock:
            for digest in list(self._chunks):
                self.delete(digest)

    def _let_go(self, name: str) -> bool:
        return self.delete(name)


def default_memory_bytes() -> int:
    """A quarter of the memory that is available now, at most 64 GiB."""
    return min(available_bytes() // 4, _MAX_DEFAULT_BYTES)


def available_bytes(groups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """What the machine has left, or less: what the container or unit leaves to this process."""
    import psutil

    taken = psutil.Process().memory_info().rss
    left = [limit - taken for limit in _limits(groups, own)]
    return max(0, min([int(psutil.virtual_memory().available), *left]))


def _limits(groups: Path, own: Path) -> Iterator[int]:
    """Give the limits of the groups of this process and of those around them."""
    for line in _text(own).splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        for folder, file in [FILES[controller] for controller in controllers.split(",") if controller in FILES]:
            at = groups / folder / path.strip("/")
            for group in (at, *at.parents):
                text = _text(group / file) if group.is_relative_to(groups) else ""
                if text.isdecimal():
                    yield int(text)


def _text(path: Path) -> str:
    """The text of a file; none where there is no such file, as on systems other than Linux."""
    try:
        return path.read_text("utf-8").strip()
    except OSError:
        return ""
