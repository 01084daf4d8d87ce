# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What tiers on other machines have in common: few requests, and some seconds of peace after one that failed."""

import errno
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from . import base
from .base import EntryFault, ObjectStat, Source, check_name

__all__ = ["AWAY_S", "RemoteTier"]

Answer = TypeVar("Answer")
AWAY_S = 5.0  # after a call that failed on its way the server is not asked for so long
PIECE_BYTES = 4 << 20  # read at once from a large object
HEAD_BYTES = 256 << 10  # read with the first request
_LIST_EVERY_S = 10.0  # at most, and at most a twentieth of the time


# The server answered, and said no: only this call failed, and the way there is fine
_ANSWERS = (FileNotFoundError, FileExistsError, IsADirectoryError, PermissionError)
_ANSWER_CODES = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.ELOOP, errno.ENOTDIR, errno.ENAMETOOLONG)


class RemoteSource:
    """An opened object, of which a piece is in memory."""

    def __init__(self, stat: ObjectStat, fetch: Callable[[int, int], bytes]) -> None:
        self.stat = stat
        self._fetch = fetch
        self._start = 0  # of the piece
        self._piece = fetch(0, min(HEAD_BYTES, stat.nbytes)) if stat.nbytes else b""

    def read_into(self, start: int, target: memoryview) -> None:
        """Fill `target` with the bytes from `start` on; raises EntryFault("truncated") if there are fewer."""
        missing = start + len(target) - self.stat.nbytes
        if missing > 0:
            raise EntryFault("truncated", f"the object ends {missing} bytes too early")
        while target:
            if not self._start <= start < self._start + len(self._piece):
                self._read_piece(start)
            first = start - self._start
            piece = memoryview(self._piece)[first : first + len(target)]
            target[: len(piece)] = piece
            start += len(piece)
            target = target[len(piece) :]

    def close(self) -> None:
        """Let go of the piece in memory; closing twice is allowed."""
        self._piece = b""

    def _read_piece(self, start: int) -> None:
        stop = min(start + PIECE_BYTES, self.stat.nbytes)
        self._piece = self._fetch(start, stop)
        self._start = start
        if len(self._piece) != stop - start:
            raise EntryFault("truncated", f"{stop - start - len(self._piece)} bytes from byte {start} on are gone")


class RemoteTier(base.Tier):  # no plugin: that is what imports `Tier` itself
    """A tier that is asked over a network. Only the methods that begin with `ask_` talk to the server.

    They may raise whatever the client raises, and wait as long as the client's own limits say.
    """

    is_local = False

    def __init__(self, name: str) -> None:
        self.name = name
        self._away_until_s = 0.0
        self._listed: dict[str, ObjectStat] = {}
        self._listed_s = 0.0
        self._list_again_s = 0.0
        self._lock = threading.RLock()

    def open(self, name: str) -> Source | None:
        """Open an object and read its first bytes, or give None if there is none."""
        check_name(name)
        found = self._ask(lambda: self.ask_stat(name))
        if found is None:
            return None
        return RemoteSource(found, lambda start, stop: self._ask(lambda: self.ask_bytes(name, start, stop)))

    def put(self, name: str, parts: Sequence[memoryview]) -> None:
        """Store the parts one after the other."""
        check_name(name)
        content = b"".join(parts)
        self._ask(lambda: self.ask_put(name, content))
        now_s = time.time()
        self._listed[name] = ObjectStat(len(content), now_s, now_s)

    def delete(self, name: str) -> bool:
        """Remove an object; False if there was nothing to remove."""
        check_name(name)
        self._listed.pop(name, None)
        return self._ask(lambda: self.ask_delete(name))

    def stat(self, name: str) -> ObjectStat | None:
        """Look an object up; what is no object of ours is none."""
        check_name(name)
        try:
            return self._ask(lambda: self.ask_stat(name))
        except EntryFault:
            return None

    def contains(self, name: str) -> bool:
        """Say whether an object is there, as of some seconds ago."""
        self._refresh()
        return name in self._listed

    def changed_s(self, prefix: str) -> float:
        """Say when the server was listed last."""
        self._refresh()
        return self._listed_s

    def listing(self, prefix: str = "") -> Iterator[tuple[str, ObjectStat]]:
        """Walk over every object whose name begins so, as of some seconds ago."""
        self._refresh()
        for name, found in sorted(self._listed.copy().items()):
            if name.startswith(prefix):
                yield name, found

    @abstractmethod
    def ask_stat(self, name: str) -> ObjectStat | None:
        """Look an object up; raises EntryFault("foreign") for something else in its place."""

    @abstractmethod
    def ask_bytes(self, name: str, start: int, stop: int) -> bytes:
        """Read the bytes from `start` to `stop` of an object; fewer if there are fewer."""

    @abstractmethod
    def ask_put(self, name: str, content: bytes) -> None:
        """Store an object, visible only when complete."""

    @abstractmethod
    def ask_delete(self, name: str) -> bool:
        """Remove an object; False if there was nothing to remove."""

    @abstractmethod
    def ask_all(self) -> Mapping[str, ObjectStat]:
        """Size and age of every object by its name."""

    def _refresh(self) -> None:
        """List what the server has, if that was done some seconds ago."""
        with self._lock:
            if time.monotonic() >= self._list_again_s:
                began_s = time.monotonic()
                self._listed = dict(self._ask(self.ask_all))
                self._listed_s = time.time()
                took_s = time.monotonic() - began_s
                self._list_again_s = time.monotonic() + max(_LIST_EVERY_S, 20 * took_s)

    def _ask(self, act: Callable[[], Answer]) -> Answer:
        """Ask the server something, unless it did not answer a moment ago."""
        if time.monotonic() < self._away_until_s:
            raise ConnectionError(errno.EHOSTDOWN, f"the {self.name} tier did not answer, and is asked again later")
        try:
            return act()
        except (EntryFault, *_ANSWERS):
            raise
        except NotImplementedError as error:
            raise OSError(errno.ENOTSUP, f"the {self.name} tier cannot do this: {error}") from error
        except Exception as error:
            if not isinstance(error, OSError) or error.errno not in _ANSWER_CODES:
                self._away_until_s = time.monotonic() + AWAY_S
            if isinstance(error, OSError):
                raise
            raise OSError(errno.EIO, f"{type(error).__name__} of the {self.name} tier: {error}") from error
