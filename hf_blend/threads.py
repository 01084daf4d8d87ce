# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Locks, threads and futures that may be kept over a fork: a forked child has none of its parent's threads.

It finds each lock open, makes threads of its own, and waits for nothing that a thread of its parent was to bring.
"""

import functools
import os
import threading
import traceback
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from .errors import HfBlendError

__all__ = ["ForkedError", "PerProcess", "Workers", "cached_property", "is_lost", "new_lock", "start"]

Answer = TypeVar("Answer")
_LOCKS: "weakref.WeakSet[Any]" = weakref.WeakSet()
_HELD: "weakref.WeakSet[Any]" = weakref.WeakSet()
_FUTURES: "weakref.WeakSet[Future[Any]]" = weakref.WeakSet()


class ForkedError(HfBlendError, RuntimeError):
    """What a thread of the parent process was at when it forked; it comes in the parent alone."""


def new_lock(held_by_forks: bool = False) -> Any:
    """Make a lock that its holder may take again, and that a forked child finds open.

    With `held_by_forks` no other thread holds it in the instant of a fork: what it guards is whole in the child.
    """
    _watch_forks()
    lock = threading.RLock()
    (_HELD if held_by_forks else _LOCKS).add(lock)
    return lock


class PerProcess(Generic[Answer]):
    """A value that each process makes when it first asks; a forked child does not see its parent's."""

    def __init__(self, make: Callable[[], Answer]) -> None:
        self._make, self._lock = make, new_lock()
        self._made: tuple[int, Answer] | None = None

    def get(self) -> Answer:
        """Give this process's value."""
        with self._lock:
            if self._made is None or self._made[0] != os.getpid():
                self._made = os.getpid(), self._make()
            return self._made[1]

    def take(self) -> Answer | None:
        """Give this process's value for the last time, if it was made: the next one is another."""
        with self._lock:
            made, self._made = self._made, None
            return made[1] if made is not None and made[0] == os.getpid() else None


class Workers:
    """Threads that run what they are handed, made when they are needed and, in a forked child, made again.

    A future that was pending when the process forked ends in the child with `ForkedError`, and calls nobody back.
    """

    def __init__(self, name: str, count: int = 1) -> None:
        self._name, self._threads = name, PerProcess(lambda: ThreadPoolExecutor(count, name))

    def submit(self, act: Callable[..., Answer], *args: Any) -> "Future[Answer]":
        """Run something as soon as a thread is free; raises RuntimeError if no thread can be made."""
        future = self._threads.get().submit(act, *args)
        _FUTURES.add(future)
        return future

    def close(self, wait: bool = True) -> None:
        """Drop what was not begun and end the threads, after what they are at; a later `submit` makes new ones."""
        threads = self._threads.take()
        if threads is not None:
            is_mine = threading.current_thread().name.startswith(self._name)
            threads.shutdown(wait=wait and not is_mine, cancel_futures=True)


class cached_property(functools.cached_property[Answer]):
    """A property that is computed once; the lock that Python 3.11 has around it is open in a forked child."""

    def __init__(self, find: Callable[[Any], Answer]) -> None:
        super().__init__(find)
        self.lock = new_lock()


def is_lost(future: "Future[Any]") -> bool:
    """Whether a thread of the parent process was to bring it."""
    return future.done() and isinstance(future.exception(), ForkedError)


class Started(Future[Answer]):
    """What a thread brings. Join it before the process ends: one that is inside torch then makes it abort."""

    thread: threading.Thread


def start(act: Callable[[], Answer], name: str) -> Started[Answer]:
    """Do something in a thread of its own, which keeps no process from ending; its future is as of `Workers`."""
    future: Started[Answer] = Started()

    def run(future: Future[Answer]) -> None:
        try:
            future.set_result(act())
        except BaseException as error:  # for the thread that waits
            failure: BaseException | None = error
            while failure is not None:  # a client's frame may hold it, and so all bytes of the call until a collection
                traceback.clear_frames(failure.__traceback__)
                failure = failure.__cause__ or failure.__context__
            future.set_exception(error)
            del future  # this frame is held by the exception

    _watch_forks()
    future.thread = threading.Thread(target=run, args=(future,), name=name, daemon=True)
    future.thread.start()
    _FUTURES.add(future)
    return future


@functools.cache
def _watch_forks() -> None:
    if hasattr(os, "register_at_fork"):
        locks: list[Any] = []
        os.register_at_fork(
            before=lambda: locks.extend(lock for lock in _all(_HELD) if lock.acquire()),
            after_in_parent=lambda: _release(locks),
            after_in_child=lambda: _release(locks, is_child=True),
        )


def _all(some: "weakref.WeakSet[Answer]") -> list[Answer]:
    """The members of a set to which other threads may add meanwhile."""
    return [member for member in (reference() for reference in list(some.data)) if member is not None]  # type: ignore[attr-defined]


def _release(locks: list[Any], is_child: bool = False) -> None:
    while locks:
        locks.pop().release()
    if is_child:
        for lock in _all(_LOCKS):
            lock._at_fork_reinit()  # as logging and threading do with theirs
        for future in _all(_FUTURES):
            future._condition._at_fork_reinit()  # type: ignore[attr-defined]
            if not future.done():
                Future.__init__(future)  # nobody waits for it here, nor is called back
                future.set_exception(
                    ForkedError("a thread of the parent process was at this when it forked. Ask for it again here.")
                )
