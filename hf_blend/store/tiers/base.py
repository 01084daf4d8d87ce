# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What a tier promises, whether it is a disk, a server or a bucket.

A tier knows names and bytes, nothing of chunks. Names are `xx/yy/<64 hex digits>`: nothing that a user typed. Stored
bytes never change under their name, so every reader sees one generation, and two writers of a name write the same.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ...errors import ConfigError

__all__ = ["EntryFault", "ObjectStat", "Source", "Tier", "check_name"]

_NAME = re.compile(r"[0-9a-f]{2}/[0-9a-f]{2}/[0-9a-f]{64}")


class EntryFault(Exception):
    """Why stored bytes were refused. It never leaves the store: there it becomes a miss.

    Attributes:
        reason: one word for counters: format, truncated, digest, fingerprint, key, codec, foreign.
        corrupt: true if the bytes can never become good, so that the entry should go.
    """

    def __init__(self, reason: str, detail: str, *, corrupt: bool = True) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.corrupt = corrupt


@dataclass(frozen=True)
class ObjectStat:
    """Size in bytes and time of writing (seconds since 1970) of one object."""

    nbytes: int
    created: float


class Source(Protocol):
    """One opened object. It stays readable, and the same, even if the object is deleted meanwhile."""

    stat: ObjectStat
    identity: object  # equal for two sources of one object, different once the object was replaced

    def read_into(self, start: int, target: memoryview) -> None:
        """Fill `target` with the bytes from `start` on; raises EntryFault("truncated") if there are fewer."""

    def close(self) -> None:
        """Let go of it; closing twice is allowed."""


class Tier(Protocol):
    """A place for immutable objects. Every method may raise OSError: that is a transient fault, not an absence."""

    name: str

    def open(self, name: str) -> Source | None:
        """Open an object, or None if there is none; raises EntryFault("foreign") for something else in its place."""

    def contains(self, name: str) -> bool:
        """Say whether the object is there, without reading it."""

    def put_if_absent(self, name: str, parts: Sequence[memoryview]) -> bool:
        """Store the parts one after the other; visible only when complete. False if the object was there already."""

    def delete(self, name: str, source: Source | None = None) -> bool:
        """Remove an object; with `source`, only if it is still that one. False if there was nothing to remove."""

    def names(self, space: str) -> frozenset[str]:
        """All names that begin with `space/`; the same frozenset as last time if nothing changed."""

    def stat(self, name: str) -> ObjectStat | None:
        """Size and age of an object, or None if there is none."""

    def close(self) -> None:
        """Let go of connections; what was stored stays."""


def check_name(name: str) -> str:
    """Refuse a name that is not hex digits, so that no path or key is ever made of a user's text.

    Args:
        name: `xx/yy/<64 hex digits>`.

    Returns:
        The name.

    Raises:
        ConfigError: the name has another form.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(f"object name {name!r:.90} is not of the form xx/yy/<64 hex digits>. Use ChunkKey.digest.")
    return name
