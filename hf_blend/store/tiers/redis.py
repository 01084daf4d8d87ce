# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Objects in Redis or Valkey: near, fast, and forgotten when the server wants its memory back."""

import contextlib
import errno
import time
from collections.abc import Iterator, Mapping
from typing import Any

from ...errors import ConfigError, import_extra
from .base import EntryFault, ObjectStat, Tier, is_name
from .remote import RefusedError, RemoteTier

__all__ = ["RedisTier"]

_PREFIX = "hf_blend:"
_WAIT_S = 5.0  # for a connection, and for each part of an answer
_PAGE = 1000


class RedisTier(RemoteTier, Tier):
    """An object is one value. Eviction, and how much there may be, is the server's (`maxmemory`); it has no times."""

    schemes = ("redis", "rediss", "valkey", "valkeys")

    def __init__(self, url: str) -> None:
        super().__init__("redis")
        self._redis: Any = import_extra("redis", extra="redis", needed_by="a redis:// tier")
        try:
            scheme, rest = url.split("://", 1)
            self._client: Any = self._redis.Redis.from_url(
                f"{scheme.replace('valkey', 'redis')}://{rest}",
                **{"socket_timeout": _WAIT_S, "socket_connect_timeout": _WAIT_S, "decode_responses": False},
            )
        except ValueError as error:
            raise ConfigError(
                "the URL of the redis tier cannot be read (it is not shown: it may hold a password). Write "
                "redis://host:6379/0."
            ) from error

    @classmethod
    def from_url(cls, url: str) -> "RedisTier":
        """Open the tier that a URL names; connects only when it is first used."""
        return cls(url)

    def ask_stat(self, name: str) -> ObjectStat | None:
        """Ask for the length of a value."""
        with self._translated():
            nbytes = self._client.strlen(_PREFIX + name)
        return ObjectStat(nbytes, time.time()) if nbytes else None

    def ask_bytes(self, name: str, start: int, stop: int) -> bytes:
        """Read a part of a value."""
        with self._translated():
            content: bytes = self._client.getrange(_PREFIX + name, start, stop - 1)
        return content

    def ask_put(self, name: str, content: bytes) -> None:
        """Set the value; what is no object of ours gives way, of whatever type."""
        with self._translated():
            self._client.set(_PREFIX + name, content)

    def ask_delete(self, name: str) -> bool:
        """Remove a value."""
        with self._translated():
            return bool(self._client.unlink(_PREFIX + name))

    def ask_all(self) -> Mapping[str, ObjectStat]:
        """Walk over the keys."""
        found = {}
        with self._translated():
            keys = self._client.scan_iter(match=f"{_PREFIX}*", count=_PAGE)
            for name in [key.decode("ascii", "replace").removeprefix(_PREFIX) for key in keys]:
                if is_name(name):
                    with contextlib.suppress(EntryFault):
                        if stat := self.ask_stat(name):
                            found[name] = stat
        return found

    def close(self) -> None:
        """Let go of the connections."""
        with contextlib.suppress(OSError), self._translated():
            self._client.close()

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        """An answer that is an error costs only this call; all else is a fault of the way there."""
        try:
            yield
        except self._redis.exceptions.ResponseError as error:
            if "WRONGTYPE" in str(error):
                raise EntryFault("foreign", f"a key has another type than an object of ours ({error})") from error
            raise RefusedError(errno.EIO, f"the server refuses: {error}") from error
        except self._redis.exceptions.RedisError as error:
            raise ConnectionError(errno.EIO, f"{type(error).__name__}: {error}") from error
