# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Files that are whole or absent: written under a unique name, then renamed."""

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Sequence
from pathlib import Path

from .base import EntryFault, ObjectStat

__all__ = ["FileSource", "open_regular", "sync_directory", "write_atomically"]

_MAX_CALL_BYTES = 1 << 30
_NO_WAITING = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NO_TIME = getattr(os, "O_NOATIME", 0)  # reading must not change the score that the time of access keeps


class FileSource:
    """An open entry file. It is read, never mapped: a file that shrinks under a map kills the process."""

    def __init__(self, handle: int, info: os.stat_result) -> None:
        self._handle = handle
        self.stat = ObjectStat(info.st_size, info.st_mtime, info.st_atime)

    def read_into(self, start: int, target: memoryview) -> None:
        """Fill `target` from the bytes at `start`."""
        while target:
            count = os.preadv(self._handle, [target[:_MAX_CALL_BYTES]], start)
            if not count:
                raise EntryFault("truncated", f"the file ends at byte {start}, {len(target)} bytes too early")
            start += count
            target = target[count:]

    def close(self) -> None:
        """Close the file; closing twice is allowed, and nothing that was read depends on it."""
        handle = self._handle
        self._handle = -1
        if handle >= 0:
            with contextlib.suppress(OSError):
                os.close(handle)


def open_regular(path: Path) -> FileSource:
    """Open a file for reading without following a link and without waiting for a pipe's other end.

    Raises EntryFault("foreign") where something that is not a regular file stands there.
    """
    try:
        handle = _open_quietly(path)
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

    It is written in another folder of the same device, or beside its name, until it is whole.

    With `durable` content and name have reached the device when this returns. After an OSError nothing was changed,
    and nothing is left behind (unless only the directory could not be synced).
    """
    temporary = (folder or path.parent) / f"{path.stem}.{secrets.token_hex(8)}.tmp"
    handle = -1
    try:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        for content in parts:
            _write_all(handle, memoryview(content))
        if durable:
            os.fdatasync(handle)
        os.replace(temporary, path)
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


def _open_quietly(path: Path) -> int:
    """Open a file without changing its time of access, where we may."""
    try:
        return os.open(path, os.O_RDONLY | _NO_WAITING | _NO_TIME)
    except PermissionError:  # only the owner may leave the time alone
        return os.open(path, os.O_RDONLY | _NO_WAITING)


def _write_all(handle: int, data: memoryview) -> None:
    """Write all of it: the system may take less than it is given, and takes no more than 2 GiB at once."""
    while data:
        data = data[os.write(handle, data[:_MAX_CALL_BYTES]) :]
