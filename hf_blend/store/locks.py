# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Locks that a forked child finds open, whatever thread of the parent held them at that instant."""

import functools
import os
import threading
import weakref
from typing import Any

__all__ = ["new_lock"]

_LOCKS: "weakref.WeakSet[Any]" = weakref.WeakSet()


def new_lock() -> Any:
    """Make a lock that its holder may take again."""
    _watch_forks()
    lock = threading.RLock()
    _LOCKS.add(lock)
    return lock


@functools.cache
def _watch_forks() -> None:
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_open_all)


def _open_all() -> None:
    for lock in list(_LOCKS):
        lock._at_fork_reinit()  # as logging and threading do with theirs
