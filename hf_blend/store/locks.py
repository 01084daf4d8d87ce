# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Locks that a forked child finds open, whatever thread held them, and threads that keep no process from ending."""

import functools
import os
import threading
import traceback
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

__all__ = ["new_lock", "start"]

Answer = TypeVar("Answer")
_LOCKS: "weakref.WeakSet[Any]" = weakref.WeakSet()
_HELD: "weakref.WeakSet[Any]" = weakref.WeakSet()


def new_lock(held_by_forks: bool = False) -> Any:
    """Make a lock that its holder may take again.

    With `held_by_forks` no other thread holds it in the instant of a fork: what it guards is whole in the child.
    """
    _watch_forks()
    lock = threading.RLock()
    (_HELD if held_by_forks else _LOCKS).add(lock)
    return lock


def start(act: Callable[[], Answer], name: str) -> "Future[Answer]":
    """Do something in a thread of its own, which keeps no process from ending."""
    future: Future[Answer] = Future()

    def run(future: Future[Answer]) -> None:
        try:
            future.set_result(act())
        except BaseException as error:  # for the thread that waits
            held: BaseException | None = error
            while held is not None:  # a client's frame may hold it, and so all bytes of the call until a collection
                traceback.clear_frames(held.__traceback__)
                held = held.__cause__ or held.__context__
            future.set_exception(error)
            del future  # this frame is held by the exception

    threading.Thread(target=run, args=(future,), name=name, daemon=True).start()
    return future


@functools.cache
def _watch_forks() -> None:
    if hasattr(os, "register_at_fork"):
        held: list[Any] = []
        os.register_at_fork(
            before=lambda: held.extend(lock for lock in list(_HELD) if lock.acquire()),
            after_in_parent=lambda: _release(held),
            after_in_child=lambda: _release(held, is_child=True),
        )


def _release(held: list[Any], is_child: bool = False) -> None:
    while held:
        held.pop().release()
    for lock in list(_LOCKS) if is_child else ():
        lock._at_fork_reinit()  # as logging and threading do with theirs
