# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The system refuses one call of a put or a get, or writes less than it was given, or reads less."""

import errno
import os
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

from hf_blend.store import ChunkStore

from .base import FaultClass, tiny_chunk

ERRORS = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EMFILE, errno.EACCES)
CALLS = ("open", "write", "fdatasync", "rename", "fsync", "mkdir", "lstat", "preadv", "unlink", "close")


class FailingCalls(FaultClass):
    """Each call in turn; with short writes every write of the entry takes only some bytes."""

    share = 0.02

    def inject(self, count: int) -> None:
        """Fail, then see that the store is as before, or has the chunk."""
        store = ChunkStore.open(self.folder, memory_bytes=0, durability="full")
        for number in range(count):
            chunk = tiny_chunk(self.random.randrange(40))
            if number % 4 == 0:
                self._shortly(store, chunk)
            elif number % 4 == 1:
                self._failing(store, chunk, partial(self.expect, store, chunk))
            else:
                self._failing(store, chunk, partial(store.put, chunk))
            if number % 40 == 39:
                self._look(store)
        store.close()

    def _shortly(self, store: ChunkStore, chunk: Any) -> None:
        real, most = os.write, self.random.randint(1, 700)
        store.delete(chunk.key)
        with mock.patch.object(os, "write", lambda handle, data: real(handle, memoryview(data)[:most])):
            store.put(chunk)
        if not self.expect(store, chunk):
            self.outcome.lost += 1
        self.hit("short writes")

    def _failing(self, store: ChunkStore, chunk: Any, act: Callable[[], object]) -> None:
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

        with mock.patch.object(os, call, fail):
            act()
        if not self.expect(store, chunk) and there:
            self.outcome.lost += 1
        self.hit(call)
        if self.random.random() < 0.7:
            store.delete(chunk.key)

    def _look(self, store: ChunkStore) -> None:
        """Nothing half-written may be left, and what is listed must be whole."""
        self.outcome.torn += len(list(self.folder.rglob("*.tmp")))
        listed = {entry.digest for entry in store.entries()}
        known = {chunk.key.digest: chunk for chunk in map(tiny_chunk, range(40))}
        self.outcome.torn += sum(not self.expect(store, known[digest]) for digest in listed)
