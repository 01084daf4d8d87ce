# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What keeps a slow tier from slowing requests down.

Writes wait in a bounded queue that a thread of its own empties (`WriteQueue`). A chunk is waited for as long as it
takes to compute it, and no longer (`ComputeTimes`, `LateLoads`). No byte is read twice: what was verified is what is
written to nearer tiers (`RecordedSource`).
"""

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from typing import Any, Generic, TypeVar

import numpy as np

from ..threads import new_lock, start
from .chunk import ChunkKey
from .index import Index
from .tiers.base import EntryFault, Source

__all__ = ["ComputeTimes", "LateLoads", "RecordedSource", "WriteQueue"]

QUEUE_ENTRIES = 1024
EXIT_S = 5.0  # how long a process that ends continues to write
MOST_LATE = 4  # loads that nobody waits for any more; while there are so many, a slow tier is not asked
_NEW_SHARE = 0.25  # of the newest time in the average
Loaded = TypeVar("Loaded")
Item = TypeVar("Item")


class WriteQueue(Generic[Item]):
    """What is to be written behind requests, such as entries on their way to one tier, the oldest first.

    Threads may share it. `index` knows the chunks in it.

    The thread that writes lives only while something is in the queue. A process that ends goes on writing for
    `EXIT_S` and the call that is under way, and drops the rest. A forked child begins with an empty queue: what was in
    it is written by the parent.
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
        self._changed = threading.Condition(new_lock())

    @property
    def nbytes(self) -> int:
        """Bytes in the queue, those that are being written included."""
        with self._own():
            return sum(nbytes for _, nbytes in self._items.values())

    def put(
        self, digest: str, item: Item, nbytes: int = 1, wait_s: float | None = 0.0, key: ChunkKey | None = None
    ) -> bool:
        """Take an entry, unless it is in the queue already; with a key it is listed."""
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


class ComputeTimes:
    """Seconds per token that chunks of each model took to compute and put, as a moving average."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._per_token_s: dict[str, float] = {}
        self._lock = new_lock()

    @contextlib.contextmanager
    def timed(self, *keys: ChunkKey) -> Iterator[None]:
        """Learn from a block that computes chunks of one model and puts them.

        The copy to the CPU is when a device has finished.
        """
        began_s = self._clock()
        yield
        took_s = (self._clock() - began_s) / sum(len(key.token_ids) for key in keys)
        identity = keys[0].fingerprint
        with self._lock:
            known_s = self._per_token_s.get(identity, took_s)
            self._per_token_s[identity] = known_s + _NEW_SHARE * (took_s - known_s)

    def expect_s(self, key: ChunkKey) -> float:
        """How long computing a chunk takes, in seconds; infinite as long as none of its model was computed."""
        return len(key.token_ids) * self._per_token_s.get(key.fingerprint, math.inf)


class LateLoads:
    """Runs loads that are given up when they take too long; they end by themselves, in threads of their own."""

    def __init__(self) -> None:
        self._late: set[Future[Any]] = set()

    def run(self, load: Callable[[], Loaded], budget_s: float) -> Loaded | None:
        """Load, and wait no longer than the budget."""
        if sum(not loading.done() for loading in list(self._late)) >= MOST_LATE:  # a parent's are done in its child
            return None
        try:
            loading = start(load, "hf_blend-load")
        except RuntimeError:  # no thread can be started
            return load()
        if wait([loading], budget_s).done:
            return loading.result()
        self._late.add(loading)
        loading.add_done_callback(self._late.discard)
        return None


class RecordedSource:
    """An opened object in front of another one, read from its first byte on; no byte of it is read twice."""

    def __init__(self, source: Source) -> None:
        self.stat, self.identity = source.stat, source.identity
        self._source = source
        # takes memory only as it is filled: whether the size is a sane one turns out when the header is read
        self._content = np.empty(source.stat.nbytes, np.uint8).data
        self._filled = 0  # bytes of it that were read, from the first on

    def read_into(self, start: int, target: memoryview) -> None:
        """Fill `target` with the bytes from `start` on; raises EntryFault("truncated") if there are fewer."""
        stop = start + len(target)
        if stop > self.stat.nbytes:
            raise EntryFault("truncated", f"the bytes end {stop - self.stat.nbytes} too early")
        if stop > self._filled:
            self._source.read_into(self._filled, self._content[self._filled : stop])
            self._filled = stop
        target[:] = self._content[start:stop]

    def release(self) -> memoryview | None:
        """Hand the whole object over, or None if some of it was not read; nothing can be read from here any more."""
        content, is_whole = self._content, self._filled == self.stat.nbytes
        self._content, self._filled = memoryview(b""), 0
        return content if is_whole else None

    def close(self) -> None:
        """Close the object; its bytes stay until they are released. Closing twice is allowed."""
        self._source.close()
