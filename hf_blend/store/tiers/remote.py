# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What tiers on other machines have in common: deadlines, an open circuit, few requests."""

import secrets
import time
from abc import abstractmethod
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..locks import new_lock
from . import base
from .base import EntryFault, ObjectStat, Source, check_name
from .circuit import Circuit

__all__ = ["PIECE_BYTES", "Found", "RemoteTier"]

PIECE_BYTES = 4 << 20  # read at once from a large object, so that a stall is noticed soon
HEAD_BYTES = 256 << 10  # read with the first request
_LIST_EVERY_S = 10.0  # at most, and at most a twentieth of the time
_LISTING_DEADLINES = 20  # a listing comes in pages, each of which may take its time


@dataclass(frozen=True)
class Found:
    """One object as the server knows it; `identity` is equal for equal generations of it, never for different ones."""

    stat: ObjectStat
    identity: object


class RemoteSource:
    """An opened object, of which a piece is in memory."""

    def __init__(self, found: Found, head: bytes, fetch: Callable[[int, int], bytes]) -> None:
        self.stat = found.stat
        self.identity = found.identity
        self._piece = (0, head)
        self._fetch = fetch

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
        self._lock = new_lock()

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
            found = self.circuit.call(lambda: self.ask_stat(name))
        except EntryFault:
            return None
        return found.stat if found else None

    def listing(self, prefix: str = "", known: Container[str] = ()) -> Iterator[tuple[str, ObjectStat | None]]:
        """Walk over every object whose name begins so, with its size and age, once a short question was answered."""
        began_s = time.monotonic()
        self.circuit.call(self.ask_ping)
        found = self.circuit.call(
            lambda: self.ask_all(prefix[:2]), limit_s=_LISTING_DEADLINES * self.circuit.deadline_s
        )
        with self._lock:
            took_s, stamp = time.monotonic() - began_s, self._listed.get(prefix, (0.0, ""))[1]
            self._listed[prefix] = (time.monotonic() + max(_LIST_EVERY_S, 20 * took_s), stamp)
        yield from sorted(found.items())

    @abstractmethod
    def ask_ping(self) -> object:
        """Ask the server anything; raises OSError if it does not answer."""

    @abstractmethod
    def ask_stat(self, name: str) -> Found | None:
        """Look an object up."""

    @abstractmethod
    def ask_bytes(self, name: str, found: Found, start: int, stop: int) -> bytes:
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
        found = self.ask_stat(name)
        if found is None:
            return None
        head = self.ask_bytes(name, found, 0, min(HEAD_BYTES, found.stat.nbytes)) if found.stat.nbytes else b""

        def fetch(start: int, stop: int) -> bytes:
            return self.circuit.call(lambda: self.ask_bytes(name, found, start, stop), stop - start)

        return RemoteSource(found, head, fetch)
