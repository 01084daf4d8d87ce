# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The memory tier: verified chunks, ready to use, the least recently used leaving first."""

import threading
from collections import OrderedDict

from ..chunk import ChunkKV

__all__ = ["MemoryTier", "default_memory_bytes"]

_MAX_DEFAULT_BYTES = 64 << 30


class MemoryTier:
    """Chunks by digest, together never larger than the cap, or than the one chunk that was put last.

    Args:
        cap_bytes: how much may be held; 0 holds nothing.
    """

    name = "memory"

    def __init__(self, cap_bytes: int) -> None:
        self.cap_bytes = cap_bytes
        self.nbytes = 0
        self._chunks: OrderedDict[str, ChunkKV] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, digest: str) -> ChunkKV | None:
        """Find a chunk and make it the most recently used one."""
        with self._lock:
            if digest in self._chunks:
                self._chunks.move_to_end(digest)
            return self._chunks.get(digest)

    def contains(self, digest: str) -> bool:
        """Say whether a chunk is held, without using it."""
        return digest in self._chunks

    def put(self, chunk: ChunkKV) -> list[str]:
        """Hold a chunk.

        Args:
            chunk: to be shared with everyone who asks for it.

        Returns:
            The digests of the chunks that had to leave.
        """
        if not self.cap_bytes:
            return []
        with self._lock:
            self._remove(chunk.key.digest)
            self._chunks[chunk.key.digest] = chunk
            self.nbytes += chunk.nbytes
            gone = []
            while self.nbytes > self.cap_bytes and len(self._chunks) > 1:
                gone.append(next(iter(self._chunks)))
                self._remove(gone[-1])
            return gone

    def delete(self, digest: str) -> bool:
        """Let a chunk go; False if it was not held."""
        with self._lock:
            return self._remove(digest)

    def digests(self) -> list[str]:
        """What is held, the least recently used first."""
        with self._lock:
            return list(self._chunks)

    def clear(self) -> None:
        """Let everything go."""
        with self._lock:
            self._chunks.clear()
            self.nbytes = 0

    def _remove(self, digest: str) -> bool:
        chunk = self._chunks.pop(digest, None)
        self.nbytes -= chunk.nbytes if chunk else 0
        return chunk is not None


def default_memory_bytes() -> int:
    """A quarter of the memory that is available now, at most 64 GiB."""
    import psutil

    return min(psutil.virtual_memory().available // 4, _MAX_DEFAULT_BYTES)
