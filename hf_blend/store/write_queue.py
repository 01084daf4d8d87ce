# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A bounded queue of writes that a thread of its own empties, so that a slow tier does not slow requests down."""

import contextlib
import os
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from .chunk import ChunkKey
from .index import Index

__all__ = ["WriteQueue"]

QUEUE_ENTRIES = 1024
EXIT_S = 5.0  # how long a process that ends continues to write
Item = TypeVar("Item")


class WriteQueue(Generic[Item]):
    """Writes that requests do not wait for, such as entries on their way to one tier, the oldest first.

    Threads may share it. `index` lists the chunks in it.

    The thread that writes lives only while something is in the queue. When the process ends, it continues for
    `EXIT_S`, finishes the write that is under way, and drops the rest. A forked child begins with an empty queue: the
    parent writes what was in it.
    """

    name = "queue"

    def __init__(
        self, cap_bytes: int, write: Callable[[Item], object], dropped: Callable[[str], object] = lambda _: None
    ) -> None:
        self._cap_bytes, self._write, self._dropped = cap_bytes, write, dropped
        self.index = Index()
        self._items: dict[str, tuple[Item, int]] = {}  # and the bytes of each
        self._writing = ""  # digest of the one that is being written
        self._thread: threading.Thread | None = None
        self._exit_by_s: float | None = None
        self._pid = os.getpid()
        self._changed = threading.Condition()

    @property
    def nbytes(self) -> int:
        """Bytes in the queue, those that are being written included."""
        with self._own():
            return sum(nbytes for _, nbytes in self._items.values())

    def put(
        self, digest: str, item: Item, nbytes: int = 1, wait_s: float | None = 0.0, key: ChunkKey | None = None
    ) -> bool:
        """Queue an item, unless its digest is there; False if no room comes in `wait_s`, or no thread can start."""
        with self._own():
            if digest in self._items:
                return True
            has_room = self._changed.wait_for(lambda: self._fits(nbytes), wait_s)
            if has_room:
                if key is not None:
                    self.index.enter([(digest, nbytes, time.time(), "")])
                    self.index.describe([(digest, key)], "")
                self._items[digest] = item, nbytes
                if self._start():
                    return True
                self._remove(digest)
        self._dropped("thread" if has_room else "full")
        return False

    def get(self, digest: str) -> Item | None:
        """Find what is in the queue."""
        with self._own():
            return self._items[digest][0] if digest in self._items else None

    def contains(self, digest: str) -> bool:
        """Say whether a chunk is in the queue."""
        return self.get(digest) is not None

    def cancel(self, digest: str, wait_s: float) -> bool:
        """Remove a chunk from the queue; if it is being written, wait until it was."""
        with self._own():
            was_there = digest in self._items
            if digest != self._writing:
                self._remove(digest)
            if not self._changed.wait_for(lambda: digest not in self._items, wait_s):
                raise TimeoutError(f"chunk {digest} is still being written after {wait_s} s")
            return was_there

    def flush(self, wait_s: float | None = None) -> bool:
        """Wait until the queue is empty."""
        with self._own():
            return self._changed.wait_for(lambda: self._thread is None and not self._items, wait_s)

    def clear(self, reason: str) -> None:
        """Drop what is not being written yet, for a reason."""
        with self._own():
            gone = [digest for digest in self._items if digest != self._writing]
            self._remove(*gone)
        for _ in gone:
            self._dropped(reason)

    def _own(self) -> threading.Condition:
        """The lock around all there is; a forked child has no thread, and the parent writes what is here."""
        if self._pid != os.getpid():
            self._pid, self._writing, self._thread = os.getpid(), "", None
            self._remove(*self._items)
        return self._changed

    def _remove(self, *digests: str) -> None:
        with self._changed:
            for digest in digests:
                self._items.pop(digest, None)
            with contextlib.suppress(OSError):
                self.index.remove(*digests)
            self._changed.notify_all()

    def _fits(self, nbytes: int) -> bool:
        waiting = len(self._items) - bool(self._writing)
        return not self._items or (waiting < QUEUE_ENTRIES and self.nbytes + nbytes <= self._cap_bytes)

    def _start(self) -> bool:
        """Start the thread unless it runs. It is no daemon: the interpreter waits for it before it ends."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="hf_blend-write")
            try:
                self._thread.start()
            except RuntimeError:  # too many threads, or the interpreter ends
                self._thread = None
        return self._thread is not None

    def _run(self) -> None:
        try:
            while item := self._next():
                try:
                    self._write(item[0])
                finally:
                    with self._changed:
                        done, self._writing = self._writing, ""
                        self._remove(done)
        finally:
            with self._changed:
                self._thread = None
                if self._items:  # it came while this thread ended, or `write` failed
                    self._start()
                self._changed.notify_all()

    def _next(self) -> tuple[Item, int] | None:
        if self._is_too_late():
            self.clear("exit")
        with self._changed:
            self._writing = next(iter(self._items), "")
            return self._items.get(self._writing)

    def _is_too_late(self) -> bool:
        if threading.main_thread().is_alive():
            return False
        if self._exit_by_s is None:
            self._exit_by_s = time.monotonic() + EXIT_S
        return time.monotonic() > self._exit_by_s
