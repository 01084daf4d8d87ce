# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The disk tier: one immutable file per object, on local and shared file systems.

Files are whole or absent: written under a unique name, then renamed. Reading and writing need no lock. The time of
access of a file says when it was used last: processes that share the folder evict by one order, which survives a
restart. With `durable`, an object that this process put, and one that it removed, are so after a power loss too.
"""

import contextlib
import errno
import json
import os
import secrets
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock

from ...errors import StoreError
from .base import EntryFault, ObjectStat, Tier, as_fault, check_name, is_name

_MAX_CALL_BYTES = 1 << 30
_MOST_JSON_BYTES = 1 << 16
_MOST_JSON_LEVELS = 8
_NO_WAITING = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NO_TIME = getattr(os, "O_NOATIME", 0)  # reading must not change the time of access, which is that of the last use
_SUFFIX = ".safetensors"
_ABANDONED_S = 3600.0  # a file that was half-written so long ago has no writer
_BUSY_S = 30.0  # for another process that evicts


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


def read_json(path: Path) -> Any:
    """Read a small file beside the chunks, which others may have written: regular, bounded, and nested by few levels.

    Raises EntryFault with what is wrong, and OSError.
    """
    with contextlib.closing(open_regular(path)) as source, as_fault("it"):
        size = source.stat.nbytes
        if size > _MOST_JSON_BYTES:
            raise ValueError(f"it has {size} bytes, expected at most {_MOST_JSON_BYTES}")
        content = bytearray(size)
        source.read_into(0, memoryview(content))
        value = json.loads(content)
        levels = _levels_of(value)
        if levels > _MOST_JSON_LEVELS:
            raise ValueError(f"it is nested by {levels} levels, expected at most {_MOST_JSON_LEVELS}")
    return value


def write_json(path: Path, value: Any) -> None:
    """Write a small file beside the chunks, which is whole or absent, and which only its owner may read."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomically(path, [json.dumps(value, sort_keys=True).encode()], durable=False)


def _levels_of(value: Any) -> int:
    inside = value.values() if isinstance(value, dict) else value
    return 1 + max(map(_levels_of, inside), default=0) if isinstance(value, dict | list) else 0


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


class DiskTier(Tier):
    """Objects as files below `root`, in directories that only their owner may read."""

    name = "disk"

    def __init__(self, root: Path, *, durable: bool = True) -> None:
        self.root = root
        self._durable = durable
        self._lock = FileLock(root / "lock", timeout=_BUSY_S)
        _make_root(root)

    def open(self, name: str) -> FileSource | None:
        """Open an object without following links and without blocking."""
        try:
            return open_regular(self.path(name))
        except (FileNotFoundError, NotADirectoryError):
            return None

    def put(self, name: str, parts: Sequence[memoryview]) -> None:
        """Write an object by one rename: readers see the old file or the new one."""
        path, incoming = self.path(name), self.root / "incoming"
        _make_root(self.root)  # whoever removed it meanwhile
        self._make_folder(incoming)
        self._make_folder(path.parent)
        with contextlib.suppress(OSError):
            os.rmdir(path)  # a folder in its place gives way if it is empty; the rename refuses another one
        write_atomically(path, parts, durable=self._durable, folder=incoming)

    def delete(self, name: str) -> bool:
        """Remove an object, so that it does not come back."""
        path = self.path(name)
        try:
            os.unlink(path)
            if self._durable:
                sync_directory(path.parent)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def stat(self, name: str) -> ObjectStat | None:
        """Look an object up; what is no regular file is none."""
        try:
            info = os.lstat(self.path(name))
        except (FileNotFoundError, NotADirectoryError):
            return None
        if not stat.S_ISREG(info.st_mode):
            return None
        return ObjectStat(info.st_size, info.st_mtime, info.st_atime)

    def names(self, prefix: str = "") -> Iterator[str]:
        """Walk over the names that begin so; what they lead to is not looked at."""
        for name, _ in self._entries(prefix):
            yield name

    def listing(self, prefix: str = "") -> Iterator[tuple[str, ObjectStat]]:
        """Walk over every object whose name begins so."""
        for name, entry in self._entries(prefix):
            with contextlib.suppress(FileNotFoundError):
                info = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(info.st_mode):
                    yield name, ObjectStat(info.st_size, info.st_mtime, info.st_atime)

    def changed_s(self, prefix: str) -> float:
        """Say when a file of a namespace came or went last."""
        try:
            return os.lstat(self.root / "objects" / prefix[:16]).st_mtime
        except FileNotFoundError:
            return 0.0

    def set_used(self, name: str, stat: ObjectStat, used_s: float) -> None:
        """Record the last use as the file's time of access; a folder that we may only read has none."""
        with contextlib.suppress(OSError):
            times = (int(used_s * 1e9), int(stat.created * 1e9))
            os.utime(self.path(name), ns=times, follow_symlinks=False)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other processes and threads out, where the file system has locks."""
        try:
            self._lock.acquire()
        except NotImplementedError:
            yield
            return
        try:
            yield
        finally:
            self._lock.release()

    def remove_orphans(self) -> int:
        """Remove files that were half-written an hour ago or earlier."""
        removed = 0
        for entry in _entries(self.root / "incoming"):
            with contextlib.suppress(OSError):
                if time.time() - entry.stat(follow_symlinks=False).st_mtime > _ABANDONED_S:
                    os.unlink(entry.path)
                    removed += 1
        return removed

    def path(self, name: str) -> Path:
        """Say where an object is kept."""
        return self.root / "objects" / f"{check_name(name)}{_SUFFIX}"

    def _entries(self, prefix: str) -> Iterator[tuple[str, os.DirEntry[str]]]:
        """Walk over names of objects in the folders of namespaces that begin so, and what has these names."""
        for folder in _entries(self.root / "objects"):
            if not folder.name.startswith(prefix[:16]) or not folder.is_dir(follow_symlinks=False):
                continue
            for entry in _entries(folder):
                name = f"{folder.name}/{entry.name.removesuffix(_SUFFIX)}"
                if entry.name.endswith(_SUFFIX) and is_name(name):
                    yield name, entry

    def _make_folder(self, folder: Path) -> None:
        """Make a directory that only we may read; nothing is written behind a link."""
        try:
            os.mkdir(folder, 0o700)
            if self._durable:
                sync_directory(folder.parent)
        except FileExistsError:
            mode = os.lstat(folder).st_mode
            if not stat.S_ISDIR(mode):
                raise NotADirectoryError(f"{folder} is a link or a file, and nothing is written behind it") from None


def _entries(folder: Path | os.DirEntry[str]) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _make_root(root: Path) -> None:
    """Refuse a place that can never work; a place that is only read-only still serves what it holds."""
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        (root / "objects").mkdir(mode=0o700, exist_ok=True)
        os.scandir(root / "objects").close()
    except OSError as error:
        raise StoreError(
            f"the chunk store cannot be kept at {root}: {error.strerror or error}. Give ChunkStore.open a directory "
            'that you may write to, or "memory://" to keep chunks in memory only.'
        ) from error
