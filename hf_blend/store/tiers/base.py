# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What a tier promises, whether it is a disk, a server or a bucket.

A tier knows names and bytes, nothing of chunks. Names are `<16 hex digits of a namespace>/<64 hex digits>`: nothing
that a user typed. Two writers of a name write the same content, and every reader sees all of one of them.
"""

import contextlib
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar, NamedTuple, Protocol

from ...errors import ConfigError, HfBlendError

__all__ = ["BytesSource", "EntryFault", "ObjectStat", "Source", "Tier", "as_fault", "check_name", "is_name"]

_NAME = re.compile(r"[0-9a-f]{16}/[0-9a-f]{64}")


class EntryFault(Exception):
    """Why stored bytes were refused. It never leaves the store: there it becomes a miss.

    `reason` is one word for counters: format, kind (another format of ours), truncated, digest, fingerprint, key,
    namespace, codec, layout (another shape than the model's), foreign (no regular file), late.
    `corrupt` bytes can never become good: they go.
    """

    def __init__(self, reason: str, detail: str, *, corrupt: bool = True) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.corrupt = corrupt


@contextlib.contextmanager
def as_fault(what: str) -> Iterator[None]:
    """Turn whatever goes wrong with bytes that others wrote into an EntryFault; OSError and MemoryError pass."""
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


class ObjectStat(NamedTuple):
    """Size in bytes, and the times of writing and of the last use in seconds since 1970."""

    nbytes: int
    created: float
    used: float = 0.0


class Source(Protocol):
    """One opened object. It stays the same, and readable, even if the object is deleted meanwhile.

    Behind a network the rest of a large object may become unreadable then: OSError, or EntryFault("truncated").
    """

    stat: ObjectStat

    def read_into(self, start: int, target: memoryview) -> None:
        """Fill `target` with the bytes from `start` on; raises EntryFault("truncated") if there are fewer."""

    def close(self) -> None:
        """Let go of it; closing twice is allowed."""


class BytesSource:
    """An opened object that is bytes."""

    def __init__(self, content: bytes | bytearray, stat: ObjectStat | None = None) -> None:
        self.content = content
        self.stat = stat or ObjectStat(len(content), 0.0)

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

    Threads share a tier, so every method may run in several at once. No two tiers of a store have the same `name`;
    `schemes` are those of the URLs of `from_url`, such as ("s3", "s3a").
    """

    name: str
    schemes: ClassVar[tuple[str, ...]] = ()
    is_local: bool = True

    @classmethod
    def from_url(cls, url: str) -> "Tier":
        """Open the tier that a URL names; must not fail, nor wait long, because a server is away."""
        raise NotImplementedError(f"{cls.__name__} has no URLs")

    @abstractmethod
    def open(self, name: str) -> Source | None:
        """Open an object, or None if there is none; raises EntryFault("foreign") for something else in its place."""

    @abstractmethod
    def put(self, name: str, parts: Sequence[memoryview]) -> None:
        """Store the parts one after the other, in place of what is there; visible only when complete."""

    @abstractmethod
    def delete(self, name: str) -> bool:
        """Remove an object; False if there was nothing to remove."""

    @abstractmethod
    def stat(self, name: str) -> ObjectStat | None:
        """Look an object up; None if there is none."""

    @abstractmethod
    def listing(self, prefix: str = "") -> Iterator[tuple[str, ObjectStat]]:
        """Walk over every object whose name begins so."""

    def names(self, prefix: str = "") -> Iterator[str]:
        """Walk over the names that begin so."""
        for name, _ in self.listing(prefix):
            yield name

    def changed_s(self, prefix: str) -> float:
        """Say when objects whose names begin so came or went last, in seconds since 1970; infinite if unknown."""
        return math.inf

    def contains(self, name: str) -> bool:
        """Say whether an object is there; a tier behind a network may answer as of some seconds ago."""
        return self.stat(name) is not None

    def set_used(self, name: str, stat: ObjectStat, used_s: float) -> None:  # noqa: B027 (may do nothing)
        """Record when an object was used last, for eviction; also over restarts where the tier can."""

    def lock(self) -> contextlib.AbstractContextManager[object]:
        """Keep other processes from evicting, and from writing beside the objects, while a block runs."""
        return contextlib.nullcontext()

    def remove_orphans(self) -> int:
        """Remove what writers that are gone left half-written; gives how many."""
        return 0

    def close(self) -> None:  # noqa: B027 (may do nothing)
        """Let go of connections; it may be used again."""


def check_name(name: str) -> str:
    """Refuse a name that has not the form of an object's name, so that no path or key is made of a user's text."""
    if not is_name(name):
        raise ConfigError(f"object name {name!r:.90} is not <16 hex digits>/<64 hex digits>. Use ChunkKey.digest.")
    return name


def is_name(name: str) -> bool:
    """Say whether a text has the form of an object's name."""
    return _NAME.fullmatch(name) is not None
