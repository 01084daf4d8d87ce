# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The disk tier: one immutable file per object, correct without locks, on local and shared file systems.

With `durable`, an object that this process put, and one that it removed, are so after a power loss too. An object
that was there already is left to the process that put it, which syncs before it says that it did.
"""

import contextlib
import errno
import os
import re
import stat
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path

from ...errors import StoreError
from .base import ObjectStat, Source, Tier, check_name, is_name
from .files import FileSource, open_regular, remove_abandoned, sync_directory, write_atomically

__all__ = ["DiskTier"]

_SUFFIX = ".safetensors"
_PART = re.compile("[0-9a-f]{2}")
_RACY_NS = 2_000_000_000  # a directory this young may change again without changing its time


class DiskTier(Tier):
    """Objects as files below `root`, in directories that only their owner may read."""

    name = "disk"

    def __init__(self, root: Path, *, durable: bool = True) -> None:
        self.root = root
        self._durable = durable
        self._ready: set[Path] = set()
        _make_root(root, durable)

    def open(self, name: str) -> FileSource | None:
        """Open an object without following links and without blocking."""
        try:
            return open_regular(self.path(name))
        except (FileNotFoundError, NotADirectoryError):
            return None

    def stat(self, name: str) -> ObjectStat | None:
        """Size and age of an object, or None if there is none."""
        try:
            info = os.lstat(self.path(name))
        except (FileNotFoundError, NotADirectoryError):
            return None
        return ObjectStat(info.st_size, info.st_mtime) if stat.S_ISREG(info.st_mode) else None

    def put_if_absent(self, name: str, parts: Sequence[memoryview]) -> bool:
        """Write an object unless it is there; two writers at once both succeed and leave one file."""
        if self.contains(name):
            return False
        self.replace(name, parts)
        return True

    def replace(self, name: str, parts: Sequence[memoryview]) -> None:
        """Write an object whether it is there or not, by one rename: readers see the old file or the new one."""
        path = self.path(name)
        try:
            self._write(path, parts)
        except FileNotFoundError:
            self._make_again()
            self._write(path, parts)

    def delete(self, name: str, source: Source | None = None) -> bool:
        """Remove an object, so that it does not come back; with `source` only if the name still leads to that file."""
        path = self.path(name)
        try:
            info = os.lstat(path)
            if source is not None and (info.st_dev, info.st_ino) != source.identity:
                return False
            os.unlink(path)
            if self._durable:
                sync_directory(path.parent)
        except FileNotFoundError:
            return False
        return True

    def shards(self, space: str = "") -> Mapping[str, str]:
        """The directories, with the time of their last change; none that is so young that it may change again."""
        objects, now_ns = self.root / "objects", time.time_ns()
        shards = {}
        for directory in [objects / space] if space else _parts(objects):
            for folder in _parts(directory):
                info = os.lstat(folder)
                is_old = now_ns - info.st_mtime_ns > _RACY_NS
                shards[f"{directory.name}/{folder.name}/"] = f"{info.st_ino}.{info.st_mtime_ns}" if is_old else ""
        return shards

    def remove_orphans(self) -> int:
        """Remove temporary files whose writers are gone."""
        return sum(remove_abandoned(Path(entry.path)) for entry in _entries(self.root / "incoming"))

    def path(self, name: str) -> Path:
        """Where an object is kept."""
        return self.root / "objects" / f"{check_name(name)}{_SUFFIX}"

    def listing(self, prefix: str = "", listed: Container[str] = ()) -> Iterator[tuple[str, ObjectStat | None]]:
        """Walk over every object whose name begins so, with its size and age, or None for one that is `listed`."""
        for shard in [prefix] if prefix.count("/") == 2 else sorted(self.shards(prefix[:2])):
            for entry in _entries(self.root / "objects" / shard):
                name = f"{shard}{entry.name.removesuffix(_SUFFIX)}"
                if name in listed:
                    yield name, None
                elif entry.name.endswith(_SUFFIX) and _is_in_place(name) and entry.is_file(follow_symlinks=False):
                    info = entry.stat(follow_symlinks=False)
                    yield name, ObjectStat(info.st_size, info.st_mtime)

    def set_pin(self, name: str, pinned: bool) -> None:
        """Remember that an object must not be evicted, or that it may: an empty file beside the entries."""
        path = self.root / "pins" / check_name(name)
        if pinned:
            try:
                self._note(path)
            except FileNotFoundError:
                self._make_again()
                self._note(path)
        else:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    def _note(self, path: Path) -> None:
        self._make_ready(path.parent)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))

    def pins(self) -> frozenset[str]:
        """Names of the objects that must not be evicted."""
        shards = [shard for space in _parts(self.root / "pins") for shard in _parts(space)]
        names = (f"{shard.parent.name}/{shard.name}/{entry.name}" for shard in shards for entry in _entries(shard))
        return frozenset(filter(is_name, names))

    def _write(self, path: Path, parts: Sequence[memoryview]) -> None:
        self._make_ready(path.parent)
        with contextlib.suppress(OSError):
            os.rmdir(path)  # a folder in its place gives way if it is empty; the rename refuses another one
        write_atomically(path, parts, durable=self._durable, folder=self.root / "incoming")

    def _make_again(self) -> None:
        """Someone removed a directory since it was made ready: what was in it is not there any more."""
        self._ready.clear()
        _make_root(self.root, self._durable)

    def _make_ready(self, shard: Path) -> None:
        """Make the directories down to `shard`, readable by their owner only, and their names durable."""
        incoming = self.root / "incoming"
        for directory in (incoming, shard.parent.parent, shard.parent, shard):
            if shard not in self._ready:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(directory, 0o700)
            mode = os.lstat(directory).st_mode
            if stat.S_ISLNK(mode):
                raise NotADirectoryError(errno.ENOTDIR, f"{directory} is a link, and nothing is written behind it")
            if not stat.S_ISDIR(mode):  # nothing of ours: it gives way
                os.unlink(directory)
                os.mkdir(directory, 0o700)
            if shard not in self._ready and self._durable and directory is not incoming:
                sync_directory(directory.parent)
        self._ready.add(shard)


def _parts(directory: Path) -> list[Path]:
    """The directories in one that are named by two hex digits, as names of objects are divided."""
    folders = (entry for entry in _entries(directory) if _PART.fullmatch(entry.name))
    return [directory / entry.name for entry in folders if entry.is_dir(follow_symlinks=False)]


def _is_in_place(name: str) -> bool:
    return is_name(name) and name[3:5] == name[6:8]


def _entries(directory: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _make_root(root: Path, durable: bool) -> None:
    """Refuse a place that can never work; a place that is only read-only still serves what it holds."""
    try:
        new = [folder for folder in (root, *root.parents) if not folder.exists()]
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        (root / "objects").mkdir(mode=0o700, exist_ok=True)
        os.scandir(root / "objects").close()
        for folder in new if durable else ():
            sync_directory(folder.parent)
    except OSError as error:
        raise StoreError(
            f"the chunk store cannot be kept at {root}: {error.strerror or error}. Give ChunkStore.open a directory "
            'that you may write to, or "memory://" to keep chunks in memory only.'
        ) from error
