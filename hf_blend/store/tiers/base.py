# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What a tier promises, whether it is a disk, a server or a bucket.

A tier knows names and bytes, nothing of chunks. Names are `xx/yy/<64 hex digits>`: nothing that a user typed. Stored
bytes never change under their name, so every reader sees one generation, and two writers of a name write the same.
"""

import contextlib
import re
from abc import ABC, abstractmethod
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from ...errors import ConfigError, HfBlendError

__all__ = [
    "BytesSource",
    "EntryFault",
    "ObjectStat",
    "Source",
    "Tier",
    "as_fault",
    "check_name",
    "is_name",
]

_NAME = re.compile(r"[0-9a-f]{2}/[0-9a-f]{2}/[0-9a-f]{64}")


class EntryFault(Exception):
    """Why stored bytes were refused. It never leaves the store: there it becomes a miss.

    `reason` is one word for counters: format, truncated, digest, fingerprint, key, namespace, codec, layout (another
    shape than the model's), values (NaN, infinity or absurd), foreign (no regular file), expired, late.
    `corrupt` bytes can never become good: they go.
    """

    def __init__(self, reason: str, detail: str, *, corrupt: bool = True) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.corrupt = corrupt


@contextlib.contextmanager
def as_fault(what: str) -> Iterator[None]:
    """Make reading total: what goes wrong with bytes that others wrote is their fault; but OSError and MemoryError."""
    try:
        yield
    except (EntryFault, MemoryError):
        raise
    except Exception as error:
        if isinstance(error, OSError) and not isinstance(error, HfBlendError):
            raise
        if isinstance(error, RuntimeError) and "alloc" in str(error):  # so torch says that memory is short
            raise MemoryError(str(error)) from error
        raise EntryFault("format", f"{what} cannot be read ({type(error).__name__}: {error!s:.120})") from error


@dataclass(frozen=True)
class ObjectStat:
    """Size in bytes and time of writing (seconds since 1970) of one object."""

    nbytes: int
    created: float


class Source(Protocol):
    """One opened object. It stays the same, and readable, even if the object is deleted meanwhile.

    Behind a network the rest of a large object may become unreadable then: OSError, or EntryFault("truncated").
    """

    stat: ObjectStat
    identity: object  # equal for two sources of one object, different once the object was replaced

    def read_into(self, start: int, target: memoryview) -> None:
        """Fill `target` with the bytes from `start` on; raises EntryFault("truncated") if there are fewer."""

    def close(self) -> None:
        """Let go of it; closing twice is allowed."""


class BytesSource:
    """An opened object that is bytes."""

    def __init__(self, content: bytes, created: float = 0.0) -> None:
        self.content = content
        self.stat = ObjectStat(len(content), created)
        self.identity: object = id(content)

    def read_into(self, start: int, target: memoryview) -> None:
        """Fill `target` with the bytes from `start` on; raises EntryFault("truncated") if there are fewer."""
        content = memoryview(self.content)[start : start + len(target)]
        if len(content) < len(target):
            raise EntryFault("truncated", f"the bytes end {len(target) - len(content)} too early")
        target[:] = content

    def close(self) -> None:
        """Nothing is held open."""


class Tier(ABC):
    """A place for immutable objects. Every method may raise OSError: that is a transient fault, not an absence.

    Threads share a tier, so every method may run in several at once. Nothing waits longer than a deadline of its own:
    a tier whose server is gone says so by OSError, and soon. No two tiers of a store have the same `name`; `schemes`
    are those of the URLs of `from_url`, such as ("redis", "rediss").
    """

    name: str
    schemes: ClassVar[tuple[str, ...]] = ()
    is_local: bool = True

    @property
    def is_healthy(self) -> bool:
        """Whether the tier answers; one that does not fails at once."""
        return True

    @classmethod
    def from_url(cls, url: str, deadline_s: float | None = None) -> "Tier":
        """Open the tier that a URL names; must not fail, nor wait long, because a server is away.

        `deadline_s` is how long a call may take besides its transfer; None is what the tier thinks right.
        """
        raise NotImplementedError(f"{cls.__name__} has no URLs")

    @abstractmethod
    def open(self, name: str) -> Source | None:
        """Open an object, or None if there is none; raises EntryFault("foreign") for something else in its place."""

    @abstractmethod
    def put_if_absent(self, name: str, parts: Sequence[memoryview]) -> bool:
        """Store the parts one after the other; visible only when complete. False if the object was there already."""

    def replace(self, name: str, parts: Sequence[memoryview]) -> None:
        """Store other bytes of the same content under a name, such as its blocks in another order.

        Sources that are open keep what they opened. A tier that cannot replace at once removes first: a process that
        is killed in between leaves no object, never a torn one.
        """
        self.delete(name)
        self.put_if_absent(name, parts)

    @abstractmethod
    def delete(self, name: str, source: Source | None = None) -> bool:
        """Remove an object; with `source`, only if it is still that one. False if there was nothing to remove."""

    def shards(self, space: str = "") -> Mapping[str, str]:
        """Give beginnings of names by which the objects of a space, or of all, are listed in parts, with stamps.

        A space is the first two digits of names. Equal stamps, also in other processes, mean that nothing changed; ""
        that it may have.
        """
        return {f"{space}/" if space else "": ""}

    @abstractmethod
    def listing(self, prefix: str = "", listed: Container[str] = ()) -> Iterator[tuple[str, ObjectStat | None]]:
        """Walk over every object whose name begins so, with its size and age, or None for one that is `listed`."""

    @abstractmethod
    def stat(self, name: str) -> ObjectStat | None:
        """Size and age of an object, or None if there is none."""

    def contains(self, name: str) -> bool:
        """Say whether the object is there, without reading it."""
        return self.stat(name) is not None

    def set_pin(self, name: str, pinned: bool) -> None:  # noqa: B027 (may do nothing)
        """Remember that an object must not be evicted, or that it may; tiers that cannot remember do nothing."""

    def pins(self) -> frozenset[str]:
        """Names of the objects that must not be evicted, as far as the tier remembers."""
        return frozenset()

    def remove_orphans(self) -> int:
        """Remove what writers that are gone left half-written."""
        return 0

    def close(self) -> None:  # noqa: B027 (may do nothing)
        """Let go of connections and threads; what was stored stays. Closing twice is allowed."""


def check_name(name: str) -> str:
    """Refuse a name that is not `xx/yy/<64 hex digits>`, so that no path or key is ever made of a user's text."""
    if not is_name(name):
        raise ConfigError(f"object name {name!r:.90} is not of the form xx/yy/<64 hex digits>. Use ChunkKey.digest.")
    return name


def is_name(name: str) -> bool:
    """Say whether a text has the form of an object's name."""
    return _NAME.fullmatch(name) is not None
