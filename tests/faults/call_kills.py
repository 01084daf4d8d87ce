# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""kill -9 before, after and within any call to the system in a put, an eviction, a deletion, a pin and a close."""

import os
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

from .killing import Killing, read_numbers
from .world import drawn_chunk

CALLS = "open write fdatasync fsync rename unlink mkdir lstat stat scandir close preadv".split()
MODES = ("before", "after", "within")


class CallKills(Killing):
    """The child counts its calls and kills itself at one that is drawn, before it, after it or within it."""

    kill_share = 0.3

    def setup(self) -> None:
        """How many calls a scenario makes is found out."""
        self._calls, self._at, self._mode = 60, 1, MODES[0]

    def kill_one(self, capped: bool) -> list[int]:
        """Let children use the store until one was killed."""
        acknowledged, first = [], self.outcome.kills * 1000
        while True:
            self._at, self._mode = self.random.randint(1, self._calls), self.random.choice(MODES)
            child, pipe = self.fork(lambda tell: self._act(capped, first, tell))  # noqa: B023
            _, status = os.waitpid(child, 0)
            acknowledged += read_numbers(pipe)
            self.outcome.paths[self._mode if os.WIFSIGNALED(status) else "outlived"] += 1
            if os.WIFSIGNALED(status):
                self._calls = max(self._calls, self._at * 5 // 4)
                return acknowledged
            self._calls, first = max(20, self._at - 1), first + 10

    def _act(self, capped: bool, first: int, tell: Callable[[int], None]) -> None:
        store = self.opened(capped)
        self._count_calls(os.write)
        for number in range(first + 1, first + 4):
            store.put(drawn_chunk(number))
            _quietly(partial(tell, number))
        store.pin(drawn_chunk(first + 3).key)
        store.unpin(drawn_chunk(first + 3).key)
        store.put(drawn_chunk(first + 999))
        store.delete(drawn_chunk(first + 999).key)
        store.close()

    def _count_calls(self, real_write: Callable[..., int]) -> None:
        left, mode = self._at, self._mode

        def counted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                nonlocal left
                if _QUIET:
                    return real(*args, **kwargs)
                left -= 1
                if left == 0 and mode == "before":
                    os.kill(os.getpid(), signal.SIGKILL)
                if left == 0 and mode == "within" and name == "write":
                    real_write(args[0], memoryview(args[1])[: len(args[1]) // 2])
                    os.kill(os.getpid(), signal.SIGKILL)
                result = real(*args, **kwargs)
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return result

            return call

        for name in CALLS:
            setattr(os, name, counted(name, getattr(os, name)))


_QUIET: list[bool] = []


def _quietly(act: Callable[[], None]) -> None:
    """An acknowledgement is no call of the store."""
    _QUIET.append(True)
    act()
    _QUIET.pop()
