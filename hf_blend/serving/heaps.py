# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Memory that threads keep in a process that serves for hours."""

import contextlib
import ctypes
import os

__all__ = ["share_heaps"]

ARENA_MAX = -8  # M_ARENA_MAX of glibc's malloc.h


def share_heaps() -> None:
    """Let the threads that start from now on share two heaps of glibc; without glibc do nothing.

    Otherwise each thread that reads or writes a chunk keeps what it frees in a heap of its own, and memory grows for
    hours. MALLOC_ARENA_MAX of the environment comes first.
    """
    if "MALLOC_ARENA_MAX" not in os.environ:
        with contextlib.suppress(OSError, TypeError, AttributeError):
            ctypes.CDLL(None).mallopt(ARENA_MAX, 2)
