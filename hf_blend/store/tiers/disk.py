# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The disk tier: one immutable file per object, on local and shared file systems.

Reading and writing need no lock. The time of access of a file keeps its score: processes that share the folder evict
by one order, which survives a restart. With `durable`, an object that this process put, and one that it removed, are
so after a power loss too.
"""

import contextlib
import os
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from filelock import FileLock

from ...errors import StoreError
from .base import ObjectStat, Tier, check_name
from .files import FileSource, open_regular, sync_directory, write_atomically

__all__ = ["DiskTier"]

_SUFFIX = ".safetensors"
_ABANDONED_S = 3600.0  # a file that was half-written so long ago has no writer
_BUSY_S = 30.0  # for another process that evicts


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
        for folder in self._folders(prefix):
            for entry in _entries(folder):
                if _is_file_name(entry.name):
                    yield f"{folder.name}/{entry.name[:64]}"

    def listing(self, prefix: str = "") -> Iterator[tuple[str, ObjectStat]]:
        """Walk over every object whose name begins so."""
        for folder in self._folders(prefix):
            for entry in _entries(folder):
                if _is_file_name(entry.name):
                    with contextlib.suppress(FileNotFoundError):
                        info = entry.stat(follow_symlinks=False)
                        if stat.S_ISREG(info.st_mode):
                            found = ObjectStat(info.st_size, info.st_mtime, info.st_atime)
                            yield f"{folder.name}/{entry.name[:64]}", found

    def changed_s(self, prefix: str) -> float:
        """Say when a file of a namespace came or went last."""
        try:
            return os.lstat(self.root / "objects" / prefix[:16]).st_mtime
        except FileNotFoundError:
            return 0.0

    def set_score(self, name: str, stat: ObjectStat, score: float) -> None:
        """Keep the score as the file's time of access; a folder that we may only read has none."""
        with contextlib.suppress(OSError):
            times = (int(score * 1e9), int(stat.created * 1e9))
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

    def _folders(self, prefix: str) -> list[Path]:
        """Give the folders of the namespaces whose names begin so."""
        folders = []
        for entry in _entries(self.root / "objects"):
            if entry.name.startswith(prefix[:16]) and entry.is_dir(follow_symlinks=False):
                folders.append(Path(entry.path))
        return folders

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


def _is_file_name(name: str) -> bool:
    """Say whether a file has the name of an entry: 64 hex digits and the suffix."""
    return len(name) == 64 + len(_SUFFIX) and name.endswith(_SUFFIX) and not name[:64].strip("0123456789abcdef")


def _entries(folder: Path) -> list[os.DirEntry[str]]:
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
