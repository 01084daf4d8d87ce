# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What an operator does with a store: list, count, pin, check and clean it."""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import StoreError
from .catalog import Catalog
from .chunk import ChunkKey
from .stack import Finding, TierStack
from .tally import Tally
from .tiers.base import Tier

__all__ = ["FLUSH_S", "EntryInfo", "Finding", "Upkeep"]

FLUSH_S = 30.0


@dataclass(frozen=True)
class EntryInfo:
    """One stored chunk, for lists.

    Attributes:
        digest: of its key.
        fingerprint: of its model.
        tokens: its length in tokens.
        nbytes: its size in bytes.
        tier: where it is: memory, disk, or memory+disk; queue if it is not written yet.
        created: when it was stored, seconds since 1970.
        pinned: whether it may not be evicted.
    """

    digest: str
    fingerprint: str
    tokens: int
    nbytes: int
    tier: str
    created: float
    pinned: bool = False


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
        self.set_pins([key.digest], True)

    def unpin(self, key: ChunkKey) -> None:
        """Let a chunk be evicted again; arguments and errors as in `pin`."""
        self.set_pins([key.digest], False)

    def set_pins(self, digests: Iterable[str], pinned: bool) -> None:
        """Pin chunks, or let them go, by their digests.

        Args:
            digests: as `entries` names them.
            pinned: whether they may no longer be evicted.

        Raises:
            StoreError: the disk refuses.
        """
        for digest in digests:
            try:
                self._stack.set_pin(digest, pinned)
            except OSError as error:
                raise _refused(f"the pin of chunk {digest} cannot be noted", error) from error

    def flush(self, wait_s: float = FLUSH_S) -> bool:
        """Wait until what was put is written to every tier, or was refused by it.

        Args:
            wait_s: how long at most, in seconds.

        Returns:
            False if something still waits.
        """
        return self._stack.flush(wait_s)

    def remove(self, digests: Iterable[str]) -> int:
        """Remove chunks from every tier by their digests.

        Args:
            digests: as `entries` names them.

        Returns:
            How many there were.

        Raises:
            StoreError: a tier refuses.
        """
        removed = 0
        for digest in digests:
            try:
                removed += self._stack.delete(digest)
            except OSError as error:
                raise _refused(f"chunk {digest} cannot be removed", error) from error
        return removed

    def check(self, *, repair: bool = False) -> Iterator[Finding]:
        """Read every entry of this namespace in every tier and verify all of it.

        Args:
            repair: remove what can never become good.

        Yields:
            One finding for each entry, whole or not.
        """
        self.flush()
        for tier in self._stack.tiers:
            for name in sorted(self._catalog.names(tier.name)):
                yield self._stack.examine(tier, name, repair)

    def collect(self, wanted_bytes: int | None = None) -> dict[str, int]:
        """Remove what writers that are gone left behind, what is too old, and what is above the caps.

        Args:
            wanted_bytes: evict until no more than this is left in each tier, all namespaces together.

        Returns:
            `orphans` and `expired` removed, and `freed_bytes` by eviction.
        """
        found = {"orphans": 0, "expired": 0, "freed_bytes": 0}
        self.flush()
        for tier in self._stack.tiers:
            found["orphans"] += tier.reclaim()
            found["expired"] += self._stack.expire(tier)
            limits = [value for value in (wanted_bytes, tier.cap_bytes) if value is not None]
            found["freed_bytes"] += tier.shrink(min(limits)) if limits else 0
        return found

    def tiers(self) -> list[Tier]:
        """The tiers that keep bytes, the nearest first."""
        return [bounded.tier for bounded in self._stack.tiers]

    def place(self, key: ChunkKey) -> str | None:
        """The name of the nearest place that has a chunk; None if none has it, or says so now."""
        for name, place in self._stack.at_hand():
            if place.contains(key.digest):
                return name
        for tier in self._stack.tiers:
            with contextlib.suppress(OSError):
                if tier.contains(self._catalog.name(key.digest)):
                    return tier.name
        return None

    def files(self) -> Iterator[tuple[str, Path]]:
        """Verify every entry in a folder of this store, and walk over those that are whole: digest and file."""
        for tier in self._stack.tiers:
            for name in sorted(self._catalog.names(tier.name)):
                path = tier.tier.file(name)
                if path is not None and not self._stack.examine(tier, name, repair=False).reason:
                    yield self._catalog.digest(name), path

    def entries(self) -> Iterator[EntryInfo]:
        """Walk over what is stored in this namespace, in the order of digests."""
        pins = self._stack.pins()  # by name
        for digest, record in self._catalog.items():
            held = [name for name, place in self._stack.at_hand() if place.contains(digest)]
            where = "+".join([*held, *self._catalog.places(digest)])
            about = (record.fingerprint, record.tokens, record.nbytes)
            yield EntryInfo(digest, *about, where, record.created, self._catalog.name(digest) in pins)

    def stats(self) -> dict[str, Any]:
        """Count what happened since opening, and what is held now.

        Returns:
            `hits`, `stored` and `evicted` by tier, `misses` by reason, `load_failures` by tier and reason,
            `store_failures` by error, `dropped_writes` by tier and reason (full, closed, exit, thread, changed),
            `removed` by cause (corrupt, expired, orphans), `skipped` by tier (or index, order) and reason: what
            listing passed over, `seconds` by stage and tier, `entries`, and `bytes`, `pinned_bytes` and
            `capacity_bytes` by tier;
            those of the disk hold every namespace; `queued_bytes` by tier: what waits to be written; `healthy` by
            tier: whether it answers.
        """
        happened = ("hits", "misses", "load_failures", "stored", "store_failures", "dropped_writes")
        all_places: list[Any] = [*self._stack.held, *self._stack.tiers]
        places = {place.name: place for place in all_places}
        return {
            **{group: self._tally.group(group) for group in (*happened, "evicted", "removed", "skipped")},
            "seconds": self._tally.seconds(),
            "entries": len(self._catalog.items()),
            "bytes": {name: place.nbytes for name, place in places.items()},
            "pinned_bytes": {name: place.pinned_bytes for name, place in places.items()},
            "capacity_bytes": {name: place.cap_bytes for name, place in places.items()},
            "queued_bytes": {name: queue.nbytes for name, queue in self._stack.queues.items()},
            "healthy": {tier.name: tier.is_healthy for tier in self._stack.tiers},
        }


def _refused(what: str, error: OSError) -> StoreError:
    return StoreError(f"{what}: {error}. Check who owns the files of the store.")
