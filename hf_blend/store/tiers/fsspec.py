# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Objects behind any fsspec URL: S3, GCS, Azure, Hugging Face buckets, WebDAV, a shared folder."""

import contextlib
import secrets
import time
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import fsspec

from ...errors import ConfigError, MissingExtraError
from .base import EntryFault, ObjectStat, Tier, is_name
from .remote import RemoteTier

__all__ = ["FsspecTier"]

_SUFFIX = ".safetensors"  # the layout of the disk tier: a folder can be copied to a bucket, and back
_WHOLE_PUTS = frozenset(["s3", "s3a", "gs", "gcs", "az", "abfs", "adl", "hf", "oss", "oci", "tos"])
_NO_STORAGE = frozenset(  # file systems inside others, or of one document
    "async_wrapper asyncwrapper asynclocal blockcache cached dask data dir filecache generic gist git github jlab "
    "jupyter libarchive pyscript reference root simplecache tar zip".split()
)
_TIMES = ("mtime", "LastModified", "last_modified", "updated")
_WAIT_S = 5.0  # for a connection, and for each part of an answer


class FsspecTier(RemoteTier, Tier):
    """Objects below a URL. Stores of objects show a put when it is complete; elsewhere files are moved to their place.

    Keys and endpoints are found where the file system looks for them, such as `AWS_ENDPOINT_URL`. A shared folder is
    not synced to the device: give its path to `ChunkStore.open` where that matters.
    """

    schemes = tuple(name for name in fsspec.available_protocols() if name not in _NO_STORAGE)

    def __init__(self, url: str, **options: Any) -> None:
        scheme = url.partition("://")[0].lower()
        super().__init__(scheme)
        self._puts_whole = scheme in _WHOLE_PUTS
        if scheme in ("s3", "s3a"):
            limits = {"connect_timeout": _WAIT_S, "read_timeout": _WAIT_S}
            options = {"use_listings_cache": False, "config_kwargs": limits, **options}
        self._files: Any
        try:
            self._files, root = fsspec.core.url_to_fs(url, **options)
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
        self._root = root.rstrip("/")

    @classmethod
    def from_url(cls, url: str) -> "FsspecTier":
        """Open the tier that a URL names; connects only when it is first used."""
        return cls(url)

    def ask_stat(self, name: str) -> ObjectStat | None:
        """Ask for size and time of a file."""
        info = self._info(self._path(name))
        if info is None:
            return None
        if not _is_file(info):
            raise EntryFault("foreign", f"a {info['type']} is in the place of an object", corrupt=False)
        return _stat(info)

    def ask_bytes(self, name: str, start: int, stop: int) -> bytes:
        """Read a range of a file."""
        return bytes(self._files.cat_file(self._path(name), start=start, end=stop))

    def ask_put(self, name: str, content: bytes) -> None:
        """Put a file, or write it elsewhere and move it to its name."""
        path = self._path(name)
        if self._puts_whole:
            self._files.pipe_file(path, content)
            return
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

    def ask_delete(self, name: str) -> bool:
        """Remove a file."""
        info = self._info(self._path(name))
        if info is None or not _is_file(info):
            return False
        self._files.rm_file(self._path(name))
        return True

    def ask_all(self) -> Mapping[str, ObjectStat]:
        """List the files."""
        folder = f"{self._root}/objects"
        self._files.invalidate_cache(folder)
        try:
            infos = self._files.find(folder, detail=True)
        except FileNotFoundError:
            return {}
        found = {}
        for path, info in infos.items():
            name = path.partition(f"{folder}/")[2].removesuffix(_SUFFIX)
            if is_name(name) and path.endswith(_SUFFIX):
                found[name] = _stat(info)
        return found

    def _path(self, name: str) -> str:
        return f"{self._root}/objects/{name}{_SUFFIX}"

    def _info(self, path: str) -> dict[str, Any] | None:
        self._files.invalidate_cache(path)
        try:
            return dict(self._files.info(path))
        except FileNotFoundError:
            return None


def _is_file(info: Mapping[str, Any]) -> bool:
    return bool(info.get("type", "file") == "file")


def _stat(info: Mapping[str, Any]) -> ObjectStat:
    """Size and time; the time of now where a file system tells none."""
    found = next((info[name] for name in _TIMES if info.get(name)), None)
    created = found.timestamp() if isinstance(found, datetime) else found
    if not isinstance(created, int | float):
        created = time.time()
    return ObjectStat(int(info["size"] or 0), created, created)
