# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""kill -9 before and after each call to the system in a put, an eviction, a deletion, a pin and a close, in turn."""

import os
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

from .base import FaultClass, tiny_chunk
from .killing import Killing, read_numbers

CALLS = "open write fdatasync fsync rename unlink mkdir lstat stat scandir close preadv".split()
MODES = ("before", "after", "within")


class CallKills(Killing, FaultClass):
    """The child counts its calls and kills itself at the n-th; when it outlives the scenario, n begins again."""

    kill_share = 0.39

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._at, self._mode = 0, 0

    def kill_one(self, capped: bool) -> list[int]:
        """Kill at the next call."""
        self._at += 1
        child, pipe = self.fork(lambda tell: self._act(capped, self.outcome.kills * 1000, tell))
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            self._at, self._mode = 0, (self._mode + 1) % len(MODES)
        else:
            mode = MODES[self._mode]
            self.outcome.regions[mode] = self.outcome.regions.get(mode, 0) + 1
        return read_numbers(pipe)

    def _act(self, capped: bool, first: int, tell: Callable[[int], None]) -> None:
        store = self.opened(capped)
        acknowledge = os.write
        pipe = tell
        self._count_calls(acknowledge)
        for number in range(first + 1, first + 4):
            store.put(tiny_chunk(number))
            _quietly(partial(pipe, number))
        store.pin(tiny_chunk(first + 3).key)
        store.unpin(tiny_chunk(first + 3).key)
        store.put(tiny_chunk(first + 999))
        store.delete(tiny_chunk(first + 999).key)
        store.close()

    def _count_calls(self, real_write: Callable[..., int]) -> None:
        left, mode = self._at, MODES[self._mode]

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
