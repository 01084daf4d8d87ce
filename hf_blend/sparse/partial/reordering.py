# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Writing chunks in a new order beside requests: one at a time, on a thread that lives only while some wait."""

import os
import threading
import time
from collections.abc import Callable

from ...store.chunk import ChunkKey
from ...store.locks import new_lock

CAP_CHUNKS = 1024  # that wait; what comes on top is due again later
FIRST_REQUESTS = 4  # after which a chunk is ordered first; then after twice as many each time


def is_due(requests: int) -> bool:
    """Whether a chunk should be ordered after so many reports: 4, 8, 16, …, so that it is written a few times only."""
    return requests >= FIRST_REQUESTS and requests & (requests - 1) == 0


class Reordering:
    """Chunks that wait to be written in another order. Threads may share it; a forked child begins empty.

    Args:
        write: writes one chunk; deals with its errors.
    """

    def __init__(self, write: Callable[[ChunkKey], object]) -> None:
        self._write = write
        self._waiting: dict[str, ChunkKey] = {}
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        self._changed = threading.Condition(new_lock())

    def add(self, key: ChunkKey) -> bool:
        """Have a chunk written soon; False if too many wait, or no thread can be started."""
        with self._own():
            if len(self._waiting) >= CAP_CHUNKS:
                return False
            self._waiting[key.digest] = key
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="hf_blend-reorder")
                try:
                    self._thread.start()
                except RuntimeError:  # too many threads, or the interpreter ends
                    self._thread = None
            return self._thread is not None

    def flush(self, wait_s: float) -> bool:
        """Wait until nothing waits, so many seconds at most, and say whether that is so."""
        stop_s = time.monotonic() + wait_s
        with self._own():
            return self._changed.wait_for(lambda: self._thread is None, stop_s - time.monotonic())

    def close(self) -> None:
        """Drop what waits, and let the chunk that is being written be finished."""
        with self._own():
            self._waiting.clear()
        self.flush(60.0)

    def _own(self) -> threading.Condition:
        if self._pid != os.getpid():
            self._pid, self._thread = os.getpid(), None
            self._waiting.clear()
        return self._changed

    def _run(self) -> None:
        while (key := self._next()) is not None:
            try:
                self._write(key)
            except BaseException:
                with self._changed:
                    self._thread = None
                    self._changed.notify_all()
                raise

    def _next(self) -> ChunkKey | None:
        with self._changed:
            if not threading.main_thread().is_alive():
                self._waiting.clear()
            if not self._waiting:
                self._thread = None
                self._changed.notify_all()
                return None
            return self._waiting.pop(next(iter(self._waiting)))
