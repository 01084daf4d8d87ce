# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Files that are whole or absent: written under a unique name, then renamed."""

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
import time
from collections.abc import Sequence
from pathlib import Path

from .base import EntryFault, ObjectStat

__all__ = ["FileSource", "open_regular", "remove_abandoned", "sync_directory", "write_atomically"]

_TEMPORARY = re.compile(r".+\.[0-9a-f]{16}\.tmp")
_MAX_CALL_BYTES = 1 << 30
_ABANDONED_S = 24 * 3600.0


class FileSource:
    """An open entry file. It is read, never mapped: a file that shrinks under a map kills the process."""

    def __init__(self, handle: int, info: os.stat_result) -> None:
        self._handle = handle
        self.stat = ObjectStat(info.st_size, info.st_mtime)
        self.identity: object = (info.st_dev, info.st_ino)

    def read_into(self, start: int, target: memoryview) -> None:
        """Fill `target` from the bytes at `start`."""
        while target:
            count = os.preadv(self._handle, [target[:_MAX_CALL_BYTES]], start)
            if not count:
                raise EntryFault("truncated", f"the file ends at byte {start}, {len(target)} bytes too early")
            start, target = start + count, target[count:]

    def expect(self, start: int, nbytes: int) -> None:
        """Say what will be read soon, so that the device begins; from now on nothing else is read ahead."""
        if hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):
                os.posix_fadvise(self._handle, 0, 0, os.POSIX_FADV_RANDOM)
                os.posix_fadvise(self._handle, start, nbytes, os.POSIX_FADV_WILLNEED)

    def close(self) -> None:
        """Close the file; closing twice is allowed, and nothing that was read depends on it."""
        handle, self._handle = self._handle, -1
        if handle >= 0:
            with contextlib.suppress(OSError):
                os.close(handle)


def open_regular(path: Path) -> FileSource:
    """Open a file for reading without following a link and without waiting for a pipe's other end.

    Raises EntryFault("foreign") where something that is not a regular file stands there.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link; a socket or a device without a driver
            raise EntryFault("foreign", f"{path} is not a regular file", corrupt=False) from None
        raise
    info = os.fstat(handle)
    if not stat.S_ISREG(info.st_mode):
        os.close(handle)
        raise EntryFault("foreign", f"{path} is not a regular file", corrupt=False)
    return FileSource(handle, info)


def write_atomically(
    path: Path, parts: Sequence[memoryview | bytes], *, durable: bool, folder: Path | None = None
) -> None:
    """Write a file so that no reader, at any moment or after a crash, sees less than all of it.

    It is written in another folder of the same device, or beside its place, until it is whole.

    With `durable` content and name have reached the device when this returns. After an OSError nothing was changed,
    and nothing is left behind (unless only the directory could not be synced).
    """
    temporary = (folder or path.parent) / f"{path.stem}.{secrets.token_hex(8)}.tmp"
    handle = -1
    try:
        handle = _create_locked(temporary)
        for content in parts:
            _write_all(handle, memoryview(content))
        if durable:
            os.fdatasync(handle)
        os.rename(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    finally:
        if handle >= 0:
            os.close(handle)
    if durable:
        sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_abandoned(path: Path) -> bool:
    """Remove a temporary file that nobody writes any more: its lock is free; where there are no locks, a day old."""
    if not _TEMPORARY.fullmatch(path.name):
        return False
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not _lock(handle, fcntl.LOCK_NB) and time.time() - os.fstat(handle).st_mtime < _ABANDONED_S:
                return False
            os.unlink(path)
            return True
        finally:
            os.close(handle)
    return False


def _create_locked(path: Path) -> int:
    """Make a file that is locked as long as its writer lives."""
    while True:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        _lock(handle)
        if os.fstat(handle).st_nlink:
            return handle
        os.close(handle)  # it was taken for abandoned before it had its lock


def _lock(handle: int, flags: int = 0) -> bool:
    """Return False where a file system has no locks; BlockingIOError where another one holds it."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | flags)
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True


def _write_all(handle: int, data: memoryview) -> None:
    """The system may take less than it is given, and takes no more than 2 GiB at once."""
    while data:
        data = data[os.write(handle, data[:_MAX_CALL_BYTES]) :]
