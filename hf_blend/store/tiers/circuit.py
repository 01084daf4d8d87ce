# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Calls to a server that may be gone: each has a deadline, and once one failed the next ones fail at once."""

import contextlib
import errno
import logging
import os
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from ..locks import new_lock
from .base import EntryFault

__all__ = ["Circuit", "RefusedError", "start"]

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
SLOWEST_BYTES_PER_S = 20e6  # a transfer that is slower is not worth waiting for


class RefusedError(OSError):
    """The server answered, and said no: only this call failed, and the way there is fine."""


_ANSWERS = (FileNotFoundError, FileExistsError, IsADirectoryError, PermissionError, RefusedError)
_ANSWER_CODES = (  # no room, or none for writing; or what is wrong with one object alone: answers too
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS),
    *(errno.ELOOP, errno.ENOTDIR, errno.ENAMETOOLONG),
)


class Circuit:
    """Runs calls, each in a thread of its own, so that none keeps its caller longer than its deadline.

    After a call that failed on the way the circuit is open: every call fails at once, and nobody waits. The server is
    asked again in the background, after pauses that double, and the circuit closes when it answers.
    """

    def __init__(self, name: str, ping: Callable[[], object], deadline_s: float) -> None:
        self.name = name
        self.deadline_s = deadline_s
        self._ping = ping
        self._is_open = False
        self._pause_s = FIRST_PAUSE_S
        self._ask_again_s = 0.0
        self._asking_pid = -1  # of the process that asks in the background: a forked child has no such thread
        self._lock = new_lock()

    @property
    def is_open(self) -> bool:
        """Whether calls fail at once."""
        return self._is_open

    def call(self, act: Callable[[], Answer], nbytes: int = 0, limit_s: float | None = None) -> Answer:
        """Do something that needs the server."""
        if self._is_open:
            self._refuse()
        try:
            return _within(limit_s or self.deadline_s + nbytes / SLOWEST_BYTES_PER_S, act)
        except (EntryFault, *_ANSWERS):
            raise
        except NotImplementedError as error:
            raise RefusedError(errno.ENOTSUP, f"the {self.name} tier cannot do this: {error}") from error
        except Exception as error:
            is_answer = isinstance(error, OSError) and error.errno in _ANSWER_CODES
            if not is_answer:
                self._open(error)
            if isinstance(error, OSError):
                raise
            raise OSError(errno.EIO, f"{type(error).__name__} of the {self.name} tier: {error}") from error

    def _open(self, error: Exception) -> None:
        with self._lock:
            if not self._is_open:
                logger.warning("the %s tier is left alone until it answers again (%s)", self.name, _said(error))
            self._is_open = True
            self._ask_again_s = time.monotonic() + self._pause_s * random.uniform(0.75, 1.25)

    def _refuse(self) -> None:
        with self._lock:
            is_due = self._asking_pid != os.getpid() and time.monotonic() >= self._ask_again_s
            if is_due:
                self._asking_pid = os.getpid()
        if is_due:
            threading.Thread(target=self._ask_again, name="hf_blend-ping", daemon=True).start()
        raise ConnectionError(errno.EHOSTDOWN, f"the {self.name} tier did not answer, and is asked again later")

    def _ask_again(self) -> None:
        """In the background; whatever goes wrong is one more reason to wait."""
        answered = False
        try:
            _within(self.deadline_s, self._ping)
            answered = True
        except (OSError, EntryFault) as error:
            logger.debug("the %s tier still does not answer (%s)", self.name, error)
        finally:
            with self._lock:
                self._pause_s = FIRST_PAUSE_S if answered else min(2 * self._pause_s, LONGEST_PAUSE_S)
                self._ask_again_s = time.monotonic() + self._pause_s * random.uniform(0.75, 1.25)
                self._asking_pid, self._is_open = -1, not answered


def start(act: Callable[[], Answer], name: str) -> "Future[Answer]":
    """Do something in a thread of its own, which keeps no process from ending."""
    future: Future[Answer] = Future()
    threading.Thread(target=_settle, args=(future, act), name=name, daemon=True).start()
    return future


def _within(limit_s: float, act: Callable[[], Answer]) -> Answer:
    """Run `act` in a thread; TimeoutError if it takes longer, whatever it waits for."""
    future = start(act, "hf_blend-remote")
    try:
        return future.result(limit_s)
    except TimeoutError as error:
        if error.errno is not None:
            raise
        raise TimeoutError(errno.ETIMEDOUT, f"no answer within {limit_s:.3g} s") from None
    finally:
        del future  # an exception holds this frame, and would hold itself


def _settle(future: "Future[Answer]", act: Callable[[], Answer]) -> None:
    """Hand over the result, or whatever was raised, to the thread that waits."""
    with contextlib.ExitStack() as stack:
        stack.push(partial(_hand_over, future))
        future.set_result(act())


def _hand_over(future: "Future[Answer]", _: object, error: BaseException | None, __: object) -> bool:
    if error is not None:
        future.set_exception(error)
    return error is not None


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
