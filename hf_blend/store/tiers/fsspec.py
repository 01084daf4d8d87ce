# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Objects behind any fsspec URL: S3, GCS, Azure, Hugging Face buckets, WebDAV, a shared folder."""

import contextlib
import errno
import secrets
import time
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import fsspec

from ...errors import ConfigError, MissingExtraError
from .base import EntryFault, ObjectStat, Tier, is_name
from .remote import RefusedError, RemoteObject, RemoteTier

__all__ = ["FsspecTier"]

_SUFFIX = ".safetensors"  # the layout of the disk tier: a folder can be copied to a bucket, and back
_WHOLE_PUTS = frozenset(["s3", "s3a", "gs", "gcs", "az", "abfs", "adl", "hf", "oss", "oci", "tos", "memory"])
_NO_PLACES = frozenset(  # file systems inside others, or of one document
    "async_wrapper asyncwrapper asynclocal blockcache cached dask data dir filecache generic gist git github jlab "
    "jupyter libarchive pyscript reference root simplecache tar zip".split()
)
_TIMES = ("mtime", "LastModified", "last_modified", "modified", "updated", "created")
_IDENTITY = ("ETag", "etag", "ino", "size", *_TIMES)
_DEADLINE_S = 5.0  # the first call imports, looks for credentials and connects
_UNFINISHED_S = 24 * 3600.0


class FsspecTier(RemoteTier, Tier):
    """Objects below a URL. Stores of objects show a put when it is complete; elsewhere files are moved to their place.

    Keys and endpoints are found where the file system looks for them, such as `AWS_ENDPOINT_URL`. A shared folder is
    not synced to the device: give its path to `ChunkStore.open` where that matters.
    """

    schemes = tuple(name for name in fsspec.available_protocols() if name not in _NO_PLACES)

    def __init__(self, url: str, *, deadline_s: float | None = None, **options: Any) -> None:
        scheme, deadline_s = url.partition("://")[0].lower(), deadline_s or _DEADLINE_S
        super().__init__(scheme, deadline_s)
        self._puts_whole = scheme in _WHOLE_PUTS
        if scheme in ("s3", "s3a"):
            limits = {"connect_timeout": deadline_s, "read_timeout": deadline_s}
            options = {"use_listings_cache": False, "config_kwargs": limits, **options}
        self._files: Any
        try:
            self._files, root = fsspec.core.url_to_fs(url, **options)
            self._root = root.rstrip("/")
        except ImportError as error:
            raise MissingExtraError(
                f"a {scheme}:// tier needs a package that is not installed: {error}. For S3: "
                'pip install "hf-blend[s3]"'
            ) from error
        except ValueError as error:
            raise ConfigError(
                f"the URL of the {scheme} tier cannot be read (it is not shown: it may hold a password). Write it "
                "as fsspec does."
            ) from error

    @classmethod
    def from_url(cls, url: str, deadline_s: float | None = None) -> "FsspecTier":
        """Open the tier that a URL names; connects only when it is first used. Arguments as for the class."""
        return cls(url, deadline_s=deadline_s)

    def ask_ping(self) -> object:
        """Look for a file that is never there."""
        return self._info(f"{self._root}/objects/ping")

    def ask_stat(self, name: str) -> RemoteObject | None:
        """Ask for size, time and tag of a file."""
        info = self._info(self._path(name))
        if info is None:
            return None
        if not _is_file(info):
            raise EntryFault("foreign", f"a {info['type']} is in the place of an object", corrupt=False)
        return RemoteObject(_stat(info), tuple(str(info.get(field)) for field in _IDENTITY))

    def ask_bytes(self, name: str, entry: RemoteObject, start: int, stop: int) -> bytes:
        """Read a range of a file."""
        return bytes(self._files.cat_file(self._path(name), start=start, end=stop))

    def ask_put(self, name: str, content: bytes) -> bool:
        """Put a file, or write it elsewhere and move it to its place."""
        path = self._path(name)
        if self._puts_whole:
            try:
                self._files.pipe_file(path, content, mode="create")
            except FileExistsError:
                if self._has_file(path):
                    return False
                self._files.pipe_file(path, content)
            return True
        if self._has_file(path):
            return False
        unfinished = f"{self._root}/incoming/{secrets.token_hex(16)}.tmp"
        self._files.makedirs(f"{self._root}/incoming", exist_ok=True)
        self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
        try:
            self._files.pipe_file(unfinished, content)
            self._files.mv(unfinished, path)
        except BaseException:
            with contextlib.suppress(OSError):
                self._files.rm_file(unfinished)
            raise
        return True

    def ask_delete(self, name: str, identity: object) -> bool:
        """Remove a file."""
        entry = self.ask_stat(name) if self._has_file(self._path(name)) else None
        if entry is None or (identity is not None and identity != entry.identity):
            return False
        self._files.rm_file(self._path(name))
        return True

    def ask_all(self, space: str) -> Mapping[str, ObjectStat]:
        """List the files of a space, or all."""
        folder = f"{self._root}/objects/{space}".rstrip("/")
        self._files.invalidate_cache(folder)
        try:
            infos = self._files.find(folder, detail=True)
        except FileNotFoundError:
            return {}
        names = {path.partition(f"{self._root}/objects/")[2].removesuffix(_SUFFIX): path for path in infos}
        return {name: _stat(infos[path]) for name, path in names.items() if is_name(name) and path.endswith(_SUFFIX)}

    def remove_orphans(self) -> int:
        """Remove what writers left unfinished more than a day ago, where files are moved to their place."""
        if self._puts_whole:
            return 0
        with contextlib.suppress(OSError):
            return self.circuit.call(self._reclaim)
        return 0

    def _reclaim(self) -> int:
        removed = 0
        with contextlib.suppress(FileNotFoundError):
            for path, info in self._files.find(f"{self._root}/incoming", detail=True).items():
                if path.endswith(".tmp") and time.time() - _stat(info).created > _UNFINISHED_S:
                    self._files.rm_file(path)
                    removed += 1
        return removed

    def _path(self, name: str) -> str:
        return f"{self._root}/objects/{name}{_SUFFIX}"

    def _has_file(self, path: str) -> bool:
        """Whether a file is there; an empty folder in its place is removed, and one that holds something refused."""
        info = self._info(path)
        if info is None or _is_file(info):
            return info is not None
        try:
            self._files.rmdir(path)
        except OSError as error:
            raise RefusedError(errno.EISDIR, f"a folder is in the place of an object: {error}") from error
        return False

    def _info(self, path: str) -> dict[str, Any] | None:
        self._files.invalidate_cache(path)
        try:
            return dict(self._files.info(path))
        except FileNotFoundError:
            return None


def _is_file(info: Mapping[str, Any]) -> bool:
    return bool(info.get("type", "file") == "file")


def _stat(info: Mapping[str, Any]) -> ObjectStat:
    """Size and time; where a file system tells no time, an object is never old."""
    for field in _TIMES:
        value = info.get(field)
        if isinstance(value, str):
            with contextlib.suppress(ValueError):
                value = datetime.fromisoformat(value)
        value = value.timestamp() if isinstance(value, datetime) else value
        if isinstance(value, int | float):
            return ObjectStat(int(info["size"] or 0), float(value))
    return ObjectStat(int(info["size"] or 0), time.time())
