# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Verified chunks held ready to use, in the memory of the machine or of a device."""

import contextlib
import time
from collections.abc import Iterable, Iterator

from .available import available_bytes
from .budget import Budget
from .chunk import ChunkKV
from .eviction.base import EvictionPolicy
from .guard import Guard
from .locks import new_lock

__all__ = ["HeldChunks", "default_memory_bytes"]

_MAX_DEFAULT_BYTES = 64 << 30


class HeldChunks:
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
        self.name = name
        self.device = device
        self.ttl_s = ttl_s
        self._budget = Budget(cap_bytes, policy)
        self._chunks: dict[str, ChunkKV] = {}
        self._since: dict[str, float] = {}
        self._guards: dict[str, Guard] = {}
        self.changed = 0
        self._lock = new_lock()

    @property
    def reads_importance(self) -> bool:
        """Whether it wants to be told which share of a chunk's tokens was important."""
        return self._budget.reads_importance

    @property
    def cap_bytes(self) -> int:
        """How much may be held, in bytes."""
        return self._budget.cap_bytes or 0

    @property
    def nbytes(self) -> int:
        """What is held and being loaded, in bytes."""
        return self._budget.nbytes

    @property
    def pinned_bytes(self) -> int:
        """What is held and may not be evicted, in bytes."""
        with self._lock:
            return self._budget.pinned_bytes

    def get(self, digest: str) -> ChunkKV | None:
        """Find a chunk, and count this as a use of it; one that was written to is dropped."""
        with self._lock:
            if digest in self._chunks and self._is_old(digest):
                self._remove(digest)
            if digest in self._chunks and not self._guards[digest].is_intact():
                self._remove(digest)
                self.changed += 1
            if digest in self._chunks:
                self._budget.use(digest)
            return self._chunks.get(digest)

    def contains(self, digest: str) -> bool:
        """Say whether a chunk is held, without using it."""
        with self._lock:
            return digest in self._chunks and not self._is_old(digest)

    def put(self, chunk: ChunkKV) -> list[str]:
        """Hold a chunk, unless what is pinned or protected leaves no room for it."""
        digest = chunk.key.digest
        if not self.cap_bytes:
            return []
        chunk = chunk.stacked()
        with self._lock:
            self._remove(digest)
            gone = self._make_room(chunk.nbytes)
            if self._budget.fits(chunk.nbytes) or not self._chunks:
                mine = chunk.to(self.device) if self.device else chunk
                self._chunks[digest] = mine
                self._guards[digest] = Guard(mine.buffers())
                self._since[digest] = time.monotonic()
                self._budget.add(digest, chunk.nbytes)
            return gone

    @contextlib.contextmanager
    def reserve(self, nbytes: int) -> Iterator[list[str]]:
        """Count bytes that are about to be loaded, and make room for them first."""
        with self._lock:
            gone = self._make_room(nbytes) if self.cap_bytes else []
            self._budget.in_flight_bytes += nbytes
        try:
            yield gone
        finally:
            with self._lock:
                self._budget.in_flight_bytes -= nbytes

    def set_pin(self, digest: str, pinned: bool) -> None:
        """Keep a chunk from being evicted, now or once it is held, or let it go again."""
        with self._lock:
            self._budget.set_pin(digest, pinned)

    def protect(self, digests: Iterable[str]) -> None:
        """Keep the chunks of a request that runs from being evicted, held already or not."""
        with self._lock:
            self._budget.protect(digests)

    def release(self, digests: Iterable[str]) -> None:
        """Let the chunks of a request go: it ended."""
        with self._lock:
            self._budget.release(digests)

    def record_importance(self, digest: str, important_ratio: float) -> None:
        """Tell the policy which share of a chunk's tokens turned out to be important."""
        with self._lock:
            self._budget.use(digest, important_ratio=important_ratio)

    def delete(self, digest: str) -> bool:
        """Let a chunk go; False if it was not held."""
        with self._lock:
            return self._remove(digest)

    def digests(self) -> list[str]:
        """What is held, the one that leaves first first."""
        with self._lock:
            return list(self._budget.policy.victims())

    def clear(self) -> None:
        """Let everything go."""
        with self._lock:
            for digest in list(self._chunks):
                self._remove(digest)

    def _make_room(self, nbytes: int) -> list[str]:
        gone = self._budget.victims(nbytes)
        for digest in gone:
            self._remove(digest)
        return gone

    def _is_old(self, digest: str) -> bool:
        return self.ttl_s is not None and time.monotonic() - self._since[digest] > self.ttl_s

    def _remove(self, digest: str) -> bool:
        self._budget.remove(digest)
        self._since.pop(digest, None)
        self._guards.pop(digest, None)
        return self._chunks.pop(digest, None) is not None


def default_memory_bytes() -> int:
    """A quarter of the memory that is available now, at most 64 GiB."""
    return min(available_bytes() // 4, _MAX_DEFAULT_BYTES)
