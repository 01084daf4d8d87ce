# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The disk tier: one immutable file per object, correct without locks, on local and shared file systems.

With `durable`, an object that this process put, and one that it removed, are so after a power loss too. An object
that was there already is left to the process that put it, which syncs before it says that it did.
"""

import contextlib
import errno
import os
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from ...errors import StoreError
from .base import ObjectStat, Source, Tier, check_name, is_name
from .files import FileSource, is_abandoned, open_regular, sync_directory, write_atomically

__all__ = ["DiskTier"]

_SUFFIX = ".safetensors"
_RACY_NS = 2_000_000_000  # a directory this young may change again without changing its time


class DiskTier(Tier):
    """Objects as files below `root`, in directories that only their owner may read."""

    name = "disk"

    def __init__(self, root: Path, *, durable: bool = True) -> None:
        self.root = root
        self._durable = durable
        self._ready: set[Path] = set()
        self._shards: dict[Path, tuple[int, frozenset[str]]] = {}
        self._spaces: dict[str, tuple[tuple[frozenset[str], ...], frozenset[str]]] = {}
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
            self._make_ready(path.parent)
            write_atomically(path, parts, durable=self._durable)
        except FileNotFoundError:  # someone removed the directory since it was made ready
            self._ready.clear()
            self._make_ready(path.parent)
            write_atomically(path, parts, durable=self._durable)

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

    def names(self, space: str) -> frozenset[str]:
        """All objects of a space. Only directories that changed are read again, so asking often is cheap."""
        shards = tuple(self._shard_names(shard) for shard in self._subdirectories(self.root / "objects" / space))
        known, names = self._spaces.get(space, ((), frozenset[str]()))
        if len(known) == len(shards) and all(old is new for old, new in zip(known, shards, strict=True)):
            return names
        names = frozenset(filter(is_name, (f"{space}/{name[:2]}/{name}" for shard in shards for name in shard)))
        self._spaces[space] = (shards, names)
        return names

    def touch(self, name: str, stamp_s: float) -> None:
        """Remember that an object was used at a time, in seconds since 1970."""
        os.utime(self.path(name), (stamp_s, stamp_s), follow_symlinks=False)

    def remove_orphans(self) -> int:
        """Remove temporary files whose writers are gone."""
        spaces = self._subdirectories(self.root / "objects")
        directories = [self.root / "index", *(shard for space in spaces for shard in self._subdirectories(space))]
        temporary = (
            Path(entry.path) for where in directories for entry in _entries(where) if entry.name.endswith(".tmp")
        )
        removed = 0
        for path in filter(is_abandoned, temporary):
            with contextlib.suppress(OSError):
                path.unlink()
                removed += 1
        return removed

    def path(self, name: str) -> Path:
        """Where an object is kept."""
        return self.root / "objects" / f"{check_name(name)}{_SUFFIX}"

    def file(self, name: str) -> Path:
        """The file that holds an object."""
        return self.path(name)

    def listing(self) -> Iterator[tuple[str, ObjectStat]]:
        """Walk over every object of every space, with its size and age."""
        for space in self._subdirectories(self.root / "objects"):
            for shard in self._subdirectories(space):
                for entry in _entries(shard):
                    name = f"{space.name}/{shard.name}/{entry.name.removesuffix(_SUFFIX)}"
                    if entry.name.endswith(_SUFFIX) and is_name(name) and entry.is_file(follow_symlinks=False):
                        info = entry.stat(follow_symlinks=False)
                        yield name, ObjectStat(info.st_size, info.st_mtime)

    def set_pin(self, name: str, pinned: bool) -> None:
        """Remember that an object must not be evicted, or that it may: an empty file beside the entries."""
        path = self.root / "pins" / check_name(name)
        if pinned:
            self._make_ready(path.parent)
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        else:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    def pins(self) -> frozenset[str]:
        """Names of the objects that must not be evicted."""
        shards = [shard for space in self._subdirectories(self.root / "pins") for shard in self._subdirectories(space)]
        names = (f"{shard.parent.name}/{shard.name}/{entry.name}" for shard in shards for entry in _entries(shard))
        return frozenset(filter(is_name, names))

    def _make_ready(self, shard: Path) -> None:
        """Make the directories down to `shard`, readable by their owner only, and their names durable."""
        for directory in (shard.parent.parent, shard.parent, shard):
            if shard not in self._ready:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(directory, 0o700)
                if self._durable:
                    sync_directory(directory.parent)
            if stat.S_ISLNK(os.lstat(directory).st_mode):
                raise NotADirectoryError(errno.ENOTDIR, f"{directory} is a link, and nothing is written behind it")
        self._ready.add(shard)

    def _shard_names(self, shard: Path) -> frozenset[str]:
        now = time.time_ns()
        changed = os.stat(shard).st_mtime_ns
        seen, names = self._shards.get(shard, (-1, frozenset[str]()))
        if seen == changed:
            return names
        found = frozenset(_stems(shard))
        names = names if found == names else found
        self._shards[shard] = (changed if now - changed > _RACY_NS else -1, names)
        return names

    def _subdirectories(self, directory: Path) -> list[Path]:
        paths = sorted(entry.path for entry in _entries(directory) if entry.is_dir(follow_symlinks=False))
        return list(map(Path, paths))


def _stems(shard: Path) -> Iterator[str]:
    for entry in _entries(shard):
        stem = entry.name.removesuffix(_SUFFIX)
        if len(stem) == 64 and stem != entry.name and stem.startswith(shard.name):
            yield stem


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
