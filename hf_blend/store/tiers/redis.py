# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Objects in Redis or Valkey: near, fast, and forgotten when the server wants its memory back."""

import contextlib
import errno
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...errors import ConfigError, import_extra
from .base import EntryFault, ObjectStat, Tier, is_name
from .remote import PIECE_BYTES, RefusedError, RemoteObject, RemoteTier

__all__ = ["RedisTier"]

_FORMAT = b"hf_blend.object/1"
_PREFIX = "hf_blend:"
_DEADLINE_S = 1.0
_UNFINISHED_S = 600  # pieces of an object whose writer is gone vanish after this time
_PAGE = 1000
_DELETE_IF_SAME = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0"


class RedisTier(RemoteTier, Tier):
    """An object is one short value that names its pieces; the pieces are written before it, and deleted after it.

    Pieces have names of their own for each generation, so no reader ever sees pieces of two. A server that evicts
    pieces of an object makes it a miss. Eviction, and how much there may be, is the server's (`maxmemory`).
    """

    schemes = ("redis", "rediss", "valkey", "valkeys")

    def __init__(self, url: str, *, deadline_s: float | None = None) -> None:
        deadline_s = deadline_s or _DEADLINE_S
        super().__init__("redis", deadline_s)
        self._redis: Any = import_extra("redis", extra="redis", wanted_by="a redis:// tier")
        retry = import_extra("redis.retry", extra="redis", wanted_by="a redis:// tier")
        backoff = import_extra("redis.backoff", extra="redis", wanted_by="a redis:// tier")
        once = retry.Retry(backoff.NoBackoff(), 0)
        limits = {"socket_timeout": deadline_s, "socket_connect_timeout": deadline_s, "retry": once}
        try:
            scheme, rest = url.split("://", 1)
            self._client: Any = self._redis.Redis.from_url(
                f"{scheme.replace('valkey', 'redis')}://{rest}", **limits, decode_responses=False
            )
        except ValueError as error:
            raise ConfigError(
                "the URL of the redis tier cannot be read (it is not shown: it may hold a password). Write "
                "redis://host:6379/0."
            ) from error

    @classmethod
    def from_url(cls, url: str, deadline_s: float | None = None) -> "RedisTier":
        """Open the tier that a URL names; connects only when it is first used. Arguments as for the class."""
        return cls(url, deadline_s=deadline_s)

    def ask_ping(self) -> object:
        """PING."""
        with self._translated():
            return self._client.ping()

    def ask_stat(self, name: str) -> RemoteObject | None:
        """Read the value that names the pieces."""
        value = self._value(name)
        return None if value is None else _parse(value)

    def ask_bytes(self, name: str, entry: RemoteObject, start: int, stop: int) -> bytes:
        """Read parts of pieces."""
        parts = []
        for number in range(start // PIECE_BYTES, -(-stop // PIECE_BYTES)):
            at = number * PIECE_BYTES
            key = _piece(name, entry.identity, number)
            with self._translated():
                parts.append(self._client.getrange(key, max(start - at, 0), min(stop - at, PIECE_BYTES) - 1))
        return b"".join(parts)

    def ask_put(self, name: str, content: bytes) -> bool:
        """Write the pieces, then their names, and only then let the pieces stay."""
        value = b"%s %d %.6f %s" % (_FORMAT, len(content), time.time(), secrets.token_hex(8).encode())
        keys = [_piece(name, value, number) for number in range(-(-len(content) // PIECE_BYTES))]
        with self._translated():
            for number, key in enumerate(keys):
                piece = memoryview(content)[number * PIECE_BYTES : (number + 1) * PIECE_BYTES]
                self._client.set(key, piece, ex=_UNFINISHED_S)
            if not self._client.set(_PREFIX + name, value, nx=True):
                if self._is_there(name):
                    self._unlink(keys)
                    return False
                self._client.set(_PREFIX + name, value)  # what is no object of ours gives way, of whatever type
            persisted = [self._client.persist(key) for key in keys]
        if not all(persisted):
            self.ask_delete(name, value)
            raise RefusedError(errno.ENOSPC, "the server dropped pieces of an object while it was written")
        return True

    def ask_delete(self, name: str, identity: object) -> bool:
        """Take the names of the pieces away, then the pieces."""
        with self._translated():
            try:
                value = self._value(name)
            except EntryFault:  # of another type, which nobody reads
                return identity is None and bool(self._client.unlink(_PREFIX + name))
            if value is None or (identity is not None and identity != value):
                return False
            removed = bool(self._client.eval(_DELETE_IF_SAME, 1, _PREFIX + name, value))
            with contextlib.suppress(EntryFault):
                nbytes = _parse(value).stat.nbytes if removed else 0
                self._unlink([_piece(name, value, number) for number in range(-(-nbytes // PIECE_BYTES))])
        return removed

    def ask_all(self, space: str) -> Mapping[str, ObjectStat]:
        """Walk over the keys of a space, or over all."""
        stats = {}
        with self._translated():
            keys = self._client.scan_iter(match=f"{_PREFIX}{space}*", count=_PAGE)
            names = [name for key in keys if is_name(name := key.decode("ascii", "replace").removeprefix(_PREFIX))]
            for start in range(0, len(names), _PAGE):
                page = names[start : start + _PAGE]
                with self._client.pipeline(transaction=False) as pipeline:
                    for name in page:
                        pipeline.get(_PREFIX + name)  # a server in cluster mode refuses MGET of keys of several slots
                    for name, value in zip(page, pipeline.execute(raise_on_error=False), strict=True):
                        with contextlib.suppress(EntryFault), self._translated():
                            if isinstance(value, Exception):
                                raise value
                            stats[name] = _parse(value or b"").stat
        return stats

    def close(self) -> None:
        """Let go of the connections."""
        with contextlib.suppress(OSError), self._translated():
            self._client.close()

    def _value(self, name: str) -> Any:
        """What names the pieces, or None; raises EntryFault("foreign") for a key of another type."""
        with self._translated():
            return self._client.get(_PREFIX + name)

    def _is_there(self, name: str) -> bool:
        with contextlib.suppress(EntryFault):
            return self.ask_stat(name) is not None
        return False

    def _unlink(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._client.unlink(key)

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        """An answer that is an error costs only this call; all else is a fault of the way there."""
        try:
            yield
        except self._redis.exceptions.ResponseError as error:
            if str(error).startswith("WRONGTYPE"):
                raise EntryFault("foreign", f"a key has another type than an object of ours ({error})") from error
            raise RefusedError(errno.EIO, f"the server refuses: {error}") from error
        except self._redis.exceptions.RedisError as error:
            raise ConnectionError(errno.EIO, f"{type(error).__name__}: {error}") from error


def _parse(value: bytes) -> RemoteObject:
    try:
        form, nbytes, created, _ = value.split(b" ")
        stat = ObjectStat(int(nbytes), float(created))
    except ValueError:
        raise EntryFault("format", f"the value is not one of this library: {value!r:.40}") from None
    if form != _FORMAT or not 0 <= stat.nbytes < 1 << 40:
        raise EntryFault("format", f"the value is of the format {form!r:.40}")
    return RemoteObject(stat, value)


def _piece(name: str, value: object, number: int) -> str:
    """The key of a piece: the random end of the value keeps generations apart."""
    generation = value.rsplit(b" ", 1)[-1].decode("ascii", "replace") if isinstance(value, bytes) else ""
    return f"{_PREFIX}{name}:{generation}:{number}"
