# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The system refuses one call of a put or a get, or writes less than it was given, or reads less."""

import errno
import os
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

from hf_blend.store import ChunkKV, ChunkStore

from .fault import FaultClass, Verdict
from .world import drawn_chunk

ERRORS = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EMFILE, errno.EACCES)
CHUNKS = 20
CALLS = ("open", "write", "fdatasync", "rename", "fsync", "mkdir", "lstat", "preadv", "unlink", "close")


class FailingCalls(FaultClass):
    """Each call in turn; with short writes every write of the entry takes only some bytes."""

    share = 0.03

    def setup(self) -> None:
        """Draw the chunks."""
        self._chunks = [drawn_chunk(number) for number in range(CHUNKS)]

    def inject(self, count: int) -> None:
        """Fail, then see that the store is as before, or has the chunk."""
        store = ChunkStore.open(self.folder, memory_bytes=0, durability="full")
        for number in range(count):
            chunk = self.random.choice(self._chunks)
            if number % 4 == 0:
                self._shortly(store, chunk)
            elif number % 4 == 1:
                self._failing(store, chunk, partial(self.expect, store, chunk))
            else:
                self._failing(store, chunk, partial(store.put, chunk))
        self._look(store)
        store.close()

    def _shortly(self, store: ChunkStore, chunk: ChunkKV) -> None:
        real, most = os.write, self.random.randint(200, 30_000)
        store.delete(chunk.key)
        with mock.patch.object(os, "write", lambda handle, data: real(handle, memoryview(data)[:most])):
            store.put(chunk)
        self.judge("short writes", lambda: self.find(store, chunk))

    def _failing(self, store: ChunkStore, chunk: ChunkKV, act: Callable[[], object]) -> None:
        call, number, left = self.random.choice(CALLS), self.random.choice(ERRORS), self.random.randrange(3)
        there = store.contains(chunk.key)
        real = getattr(os, call)

        def fail(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left == -1:
                if call == "close":
                    real(*args, **kwargs)
                raise OSError(number, os.strerror(number))
            return real(*args, **kwargs)

        def look() -> Verdict:
            with mock.patch.object(os, call, fail):
                during = act()
            after = self.find(store, chunk) if there else self.expect(store, chunk)
            return Verdict.WRONG if during is Verdict.WRONG else after

        self.judge(call, look)
        if self.random.random() < 0.7:
            store.delete(chunk.key)

    def _look(self, store: ChunkStore) -> None:
        """Nothing half-written may be left, and what is listed must be whole."""
        self.note("left half-written", Verdict.LOST, count=len(list(self.folder.rglob("*.tmp"))))
        known = {chunk.key.digest: chunk for chunk in self._chunks}
        torn = [entry for entry in store.entries() if self.expect(store, known[entry.digest]) is not Verdict.RIGHT]
        self.note("listed, and not whole", Verdict.LOST, count=len(torn))
