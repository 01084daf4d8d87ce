# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What an operator does with a store: list, count, pin, check and clean it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..errors import StoreError
from .catalog import Catalog
from .chunk import ChunkKey
from .stack import TierStack
from .tally import Tally

__all__ = ["EntryInfo", "Upkeep"]


@dataclass(frozen=True)
class EntryInfo:
    """One stored chunk, for lists.

    Attributes:
        digest: of its key.
        fingerprint: of its model.
        tokens: its length in tokens.
        nbytes: its size in bytes.
        tier: where it is: memory, disk, or memory+disk.
        created: when it was stored, seconds since 1970.
    """

    digest: str
    fingerprint: str
    tokens: int
    nbytes: int
    tier: str
    created: float


class Upkeep:
    """The part of a `ChunkStore` that no request needs."""

    _catalog: Catalog
    _stack: TierStack
    _tally: Tally

    def pin(self, key: ChunkKey) -> None:
        """Keep a chunk from being evicted, also after a restart if it is on disk; it still counts against caps.

        Args:
            key: which chunk; it need not be stored yet.

        Raises:
            StoreError: the disk refuses.
        """
        self._set_pin(key, True)

    def unpin(self, key: ChunkKey) -> None:
        """Let a chunk be evicted again; arguments and errors as in `pin`."""
        self._set_pin(key, False)

    def entries(self) -> Iterator[EntryInfo]:
        """Walk over what is stored in this namespace, in the order of digests."""
        for digest, record in self._catalog.items():
            held = [place.name for place in self._stack.held if place.contains(digest)]
            where = "+".join([*held, *self._catalog.places(digest)])
            yield EntryInfo(digest, record.fingerprint, record.tokens, record.nbytes, where, record.created)

    def stats(self) -> dict[str, Any]:
        """Count what happened since opening, and what is held now.

        Returns:
            `hits`, `stored` and `evicted` by tier, `misses` by reason, `load_failures` by tier and reason,
            `store_failures` by error, `removed` by cause (corrupt, expired, orphans), `seconds` by stage and tier,
            `entries`, and `bytes`, `pinned_bytes` and `capacity_bytes` by tier; those of the disk hold every
            namespace.
        """
        groups = ("hits", "misses", "load_failures", "stored", "store_failures", "evicted", "removed")
        places = {place.name: place for place in (*self._stack.held, *self._stack.tiers)}
        return {
            **{group: self._tally.group(group) for group in groups},
            "seconds": self._tally.seconds(),
            "entries": len(self._catalog.items()),
            "bytes": {name: place.nbytes for name, place in places.items()},
            "pinned_bytes": {name: place.pinned_bytes for name, place in places.items()},
            "capacity_bytes": {name: place.cap_bytes for name, place in places.items()},
        }

    def _set_pin(self, key: ChunkKey, pinned: bool) -> None:
        try:
            self._stack.set_pin(key.digest, pinned)
        except OSError as error:
            raise StoreError(
                f"the pin of chunk {key.digest} cannot be noted: {error}. Check who owns the folder of the store."
            ) from error
