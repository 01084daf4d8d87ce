# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What tiers on other machines have in common: deadlines, few requests, and a circuit that opens after a failure."""

import errno
import logging
import os
import random
import secrets
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ...threads import start
from . import base
from .base import EntryFault, ObjectStat, Source, check_name

__all__ = ["PIECE_BYTES", "Circuit", "RefusedError", "RemoteObject", "RemoteTier"]

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
SLOWEST_BYTES_PER_S = 20e6  # a transfer that is slower is not worth waiting for
PIECE_BYTES = 4 << 20  # read at once from a large object, so that a stall is noticed soon
HEAD_BYTES = 256 << 10  # read with the first request
_LIST_EVERY_S = 10.0  # at most, and at most a twentieth of the time
_LISTING_DEADLINES = 20  # a listing comes in pages, each of which may take its time


class RefusedError(OSError):
    """The server answered, and said no: only this call failed, and the way there is fine."""


_ANSWERS = (FileNotFoundError, FileExistsError, IsADirectoryError, PermissionError, RefusedError)
_ANSWER_CODES = (  # no room, or none for writing; or what is wrong with one object alone: answers too
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS),
    *(errno.ELOOP, errno.ENOTDIR, errno.ENAMETOOLONG),
)


class Circuit:
    """Runs calls, each in a thread of its own, so that none keeps its caller longer than its deadline.

    After a call that failed on the way the circuit is open: every call fails at once, and nobody waits. The server is
    asked again in the background, after pauses that double, and the circuit closes when it answers.
    """

    def __init__(self, name: str, ping: Callable[[], object], deadline_s: float) -> None:
        self.name, self.deadline_s, self._ping = name, deadline_s, ping
        self.is_open = False  # calls fail at once
        self._pause_s = FIRST_PAUSE_S
        self._ask_again_s = 0.0
        self._asking_pid = -1  # of the process that asks in the background: a forked child has no such thread
        self._lock = threading.RLock()

    def call(self, act: Callable[[], Answer], nbytes: int = 0, limit_s: float | None = None) -> Answer:
        """Do something that needs the server."""
        if self.is_open:
            self._refuse()
        try:
            return _within(limit_s or self.deadline_s + nbytes / SLOWEST_BYTES_PER_S, act)
        except (EntryFault, *_ANSWERS):
            raise
        except NotImplementedError as error:
            raise RefusedError(errno.ENOTSUP, f"the {self.name} tier cannot do this: {error}") from error
        except Exception as error:
            is_answer = isinstance(error, OSError) and error.errno in _ANSWER_CODES
            if not is_answer:
                self._open(error)
            if isinstance(error, OSError):
                raise
            raise OSError(errno.EIO, f"{type(error).__name__} of the {self.name} tier: {error}") from error

    def _open(self, error: Exception) -> None:
        with self._lock:
            if not self.is_open:
                logger.warning("the %s tier is left alone until it answers again (%r)", self.name, error)
            self.is_open = True
            self._ask_again_s = time.monotonic() + self._pause_s * random.uniform(0.75, 1.25)

    def _refuse(self) -> None:
        with self._lock:
            if self._asking_pid != os.getpid() and time.monotonic() >= self._ask_again_s:
                self._asking_pid = os.getpid()
                threading.Thread(target=self._ask_again, name="hf_blend-ping", daemon=True).start()
        raise ConnectionError(errno.EHOSTDOWN, f"the {self.name} tier did not answer, and is asked again later")

    def _ask_again(self) -> None:
        """In the background; whatever goes wrong is one more reason to wait."""
        answered = False
        try:
            _within(self.deadline_s, self._ping)
            answered = True
        except (OSError, EntryFault) as error:
            logger.debug("the %s tier still does not answer (%s)", self.name, error)
        finally:
            with self._lock:
                self._pause_s = FIRST_PAUSE_S if answered else min(2 * self._pause_s, LONGEST_PAUSE_S)
                self._ask_again_s = time.monotonic() + self._pause_s * random.uniform(0.75, 1.25)
                self._asking_pid, self.is_open = -1, not answered


def _within(limit_s: float, act: Callable[[], Answer]) -> Answer:
    """Run `act` in a thread; TimeoutError if it takes longer, whatever it waits for."""
    future = start(act, "hf_blend-remote")
    try:
        return future.result(limit_s)
    except TimeoutError as error:
        if error.errno is not None:
            raise
        raise TimeoutError(errno.ETIMEDOUT, f"no answer within {limit_s:.3g} s") from None
    finally:
        del future  # an exception holds this frame, and would hold itself


@dataclass(frozen=True)
class RemoteObject:
    """An object as the server describes it; `identity` differs between two versions of it, and only then."""

    stat: ObjectStat
    identity: object


class RemoteSource:
    """An opened object, of which a piece is in memory."""

    def __init__(self, entry: RemoteObject, head: bytes, fetch: Callable[[int, int], bytes]) -> None:
        self.stat, self.identity = entry.stat, entry.identity
        self._piece, self._fetch = (0, head), fetch

    def read_into(self, start: int, target: memoryview) -> None:
        """Fill `target` with the bytes from `start` on; raises EntryFault("truncated") if there are fewer."""
        missing = start + len(target) - self.stat.nbytes
        if missing > 0:
            raise EntryFault("truncated", f"the object ends {missing} bytes too early")
        while target:
            piece = self._around(start)[: len(target)]
            target[: len(piece)] = piece
            start, target = start + len(piece), target[len(piece) :]

    def close(self) -> None:
        """Let go of the piece in memory; closing twice is allowed."""
        self._piece = (0, b"")

    def _around(self, start: int) -> memoryview:
        """The bytes in memory from `start` on, at least one."""
        first, piece = self._piece
        if not first <= start < first + len(piece):
            first, stop = start, min(start + PIECE_BYTES, self.stat.nbytes)
            piece = self._fetch(first, stop)
            if len(piece) != stop - first:
                raise EntryFault("truncated", f"{stop - first - len(piece)} bytes from byte {first} on are gone")
            self._piece = (first, piece)
        return memoryview(piece)[start - first :]


class RemoteTier(base.Tier):
    """A tier that is asked over a network. Only the methods that begin with `ask_` talk to the server.

    They run in other threads, several at once, and may raise whatever the client raises. An object that is larger than
    the piece that was read with it, and is deleted while it is read, cannot be read to its end; what is read never
    comes from another object.
    """

    is_local = False

    def __init__(self, name: str, deadline_s: float) -> None:
        self.name = name
        self.circuit = Circuit(name, self.ask_ping, deadline_s)
        self._listed: dict[str, tuple[float, str]] = {}  # until when it is new, and its stamp
        self._lock = threading.RLock()

    @property
    def is_healthy(self) -> bool:
        """Whether the server answered when it was last asked."""
        return not self.circuit.is_open

    def open(self, name: str) -> Source | None:
        """Open an object and read its first bytes, or give None if there is none."""
        check_name(name)
        return self.circuit.call(lambda: self._opened(name), HEAD_BYTES)

    def put_if_absent(self, name: str, parts: Sequence[memoryview]) -> bool:
        """Store the parts one after the other; False if the object was there already."""
        check_name(name)
        content = b"".join(parts)
        return self.circuit.call(lambda: self.ask_put(name, content), len(content))

    def delete(self, name: str, source: Source | None = None) -> bool:
        """Remove an object; with `source`, only if it is still that one. False if there was nothing to remove."""
        check_name(name)
        identity = None if source is None else source.identity
        return self.circuit.call(lambda: self.ask_delete(name, identity))

    def shards(self, space: str = "") -> Mapping[str, str]:
        """The space itself; it may have changed when some seconds have passed since it was listed."""
        prefix = f"{space}/" if space else ""
        with self._lock:
            until_s, _ = self._listed.get(prefix, (0.0, ""))
            if time.monotonic() >= until_s:
                self._listed[prefix] = (0.0, secrets.token_hex(8))
            return {prefix: self._listed[prefix][1]}

    def stat(self, name: str) -> ObjectStat | None:
        """Size and age of an object, or None if there is none that could be read."""
        check_name(name)
        try:
            entry = self.circuit.call(lambda: self.ask_stat(name))
        except EntryFault:
            return None
        return entry.stat if entry else None

    def listing(self, prefix: str = "", listed: Container[str] = ()) -> Iterator[tuple[str, ObjectStat | None]]:
        """Walk over every object whose name begins so, with its size and age, once a short question was answered."""
        began_s = time.monotonic()
        self.circuit.call(self.ask_ping)
        limit_s = _LISTING_DEADLINES * self.circuit.deadline_s
        objects = self.circuit.call(lambda: self.ask_all(prefix[:2]), limit_s=limit_s)
        with self._lock:
            took_s, stamp = time.monotonic() - began_s, self._listed.get(prefix, (0.0, ""))[1]
            self._listed[prefix] = (time.monotonic() + max(_LIST_EVERY_S, 20 * took_s), stamp)
        yield from sorted(objects.items())

    @abstractmethod
    def ask_ping(self) -> object:
        """Ask the server anything; raises OSError if it does not answer."""

    @abstractmethod
    def ask_stat(self, name: str) -> RemoteObject | None:
        """Look an object up."""

    @abstractmethod
    def ask_bytes(self, name: str, entry: RemoteObject, start: int, stop: int) -> bytes:
        """Read the bytes from `start` to `stop` of an object that was looked up; fewer if there are fewer."""

    @abstractmethod
    def ask_put(self, name: str, content: bytes) -> bool:
        """Store an object, visible only when complete; False if there is one already."""

    @abstractmethod
    def ask_delete(self, name: str, identity: object) -> bool:
        """Remove an object, with `identity` only if it is still that one; False if there was nothing to remove."""

    @abstractmethod
    def ask_all(self, space: str) -> Mapping[str, ObjectStat]:
        """Size and age of every object of a space, or of all, by its name."""

    def _opened(self, name: str) -> RemoteSource | None:
        entry = self.ask_stat(name)
        if entry is None:
            return None
        head = self.ask_bytes(name, entry, 0, min(HEAD_BYTES, entry.stat.nbytes)) if entry.stat.nbytes else b""

        def fetch(start: int, stop: int) -> bytes:
            return self.circuit.call(lambda: self.ask_bytes(name, entry, start, stop), stop - start)

        return RemoteSource(entry, head, fetch)
