# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Threads for one call each, which keep no process from ending. A pool of Python's own would be waited for."""

import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Answer = TypeVar("Answer")


class Started(Future[Answer]):
    """What a thread brings. Join it before the process ends: one that is inside torch then makes it abort."""

    thread: threading.Thread


def start(act: Callable[[], Answer], name: str) -> Started[Answer]:
    """Run something in a thread of its own."""
    future: Started[Answer] = Started()
    future.thread = threading.Thread(target=_run, args=(act, future), name=name, daemon=True)
    future.thread.start()
    return future


def _run(act: Callable[[], Answer], future: Future[Answer]) -> None:
    try:
        future.set_result(act())
    except BaseException as error:  # for the thread that waits
        failure: BaseException | None = error
        while failure is not None:  # a client's frame may hold it, and so all bytes of the call until a collection
            traceback.clear_frames(failure.__traceback__)
            failure = failure.__cause__ or failure.__context__
        future.set_exception(error)
        del future  # this frame is held by the exception
