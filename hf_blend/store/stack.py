# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The tiers of a store one behind the other: ask the nearest first, and believe none."""

import contextlib
import errno
import time
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from .bounded import BoundedTier
from .catalog import Catalog
from .chunk import ChunkKey, ChunkKV
from .entry import EntryReader, encode_entry, read_key
from .held import HeldChunks
from .packing import kept_as
from .tally import Tally
from .tiers.base import EntryFault, ObjectStat, Source

__all__ = ["Finding", "TierStack"]


@dataclass(frozen=True)
class Finding:
    """What a check of one entry found.

    Attributes:
        digest: of its key, as its name says.
        tier: where it is.
        nbytes: its size in bytes.
        reason: why it cannot be used, or "" if it is whole; "namespace" for one of another tenant.
        removed: whether it was.
    """

    digest: str
    tier: str
    nbytes: int
    reason: str = ""
    removed: bool = False


class TierStack:
    """Chunks held ready to use, and behind them tiers that keep bytes, the nearest first.

    A fault never leaves here: it is a miss, counted, and warned of once. A chunk that comes from a farther tier is
    held, and copied to the nearer ones. A chunk that is put goes to every tier.

    Args:
        held: the places asked first.
        tiers: the tiers that keep bytes, each under its cap.
        catalog: is told of what came and went.
        tally: counts what happened.
        secret: proves who wrote an entry; None accepts every writer.
        ttl_s: age in seconds at which an entry is no longer used; None is never.
        codec: how K and V are packed in the tiers that keep bytes; entries of other codecs are read all the same.
    """

    def __init__(
        self,
        held: Sequence[HeldChunks],
        tiers: Sequence[BoundedTier],
        catalog: Catalog,
        tally: Tally,
        *,
        secret: bytes | None = None,
        ttl_s: float | None = None,
        codec: str = "raw",
    ) -> None:
        self.held = tuple(held)
        self.tiers = tuple(tiers)
        self._catalog = catalog
        self._tally = tally
        self._secret = secret
        self._ttl_s = ttl_s
        self._codec = codec

    def get(self, key: ChunkKey) -> ChunkKV | None:
        """Fetch a chunk, and hold it from then on."""
        for place in self.held:
            chunk = place.get(key.digest)
            if chunk is not None and chunk.key == key:
                self._tally.count("hits", place.name)
                return chunk
        reasons = []
        for distance, tier in enumerate(self.tiers):
            with self._tally.timed("load_seconds", tier.name):
                chunk, reason = self._load(tier, key, self.tiers[:distance])
            if chunk is not None:
                self._tally.count("hits", tier.name)
                return self._hold(chunk)
            reasons.append(reason)
        self.miss(next((reason for reason in reasons if reason != "absent"), "absent"))
        return None

    def put(self, chunk: ChunkKV) -> ChunkKV:
        """Hold a chunk, write it to every tier, and tell the catalog.

        Args:
            chunk: to be copied, unless it is held already.

        Returns:
            The chunk as it will be found from now on.
        """
        digest = chunk.key.digest
        mine = next((one for one in (place.get(digest) for place in self.held) if one and one.key == chunk.key), None)
        if mine is None:
            mine = chunk.map(_own_copy)
        kept = kept_as(mine, self._codec)
        self._hold(kept)
        stats = {tier.name: self._write(tier, mine) for tier in self.tiers}
        known = next((stat for stat in stats.values() if stat), None)
        if known or self.is_held(digest):
            where = [name for name, stat in stats.items() if stat]
            self._catalog.add(chunk.key, known or ObjectStat(mine.nbytes, time.time()), where)
        return chunk if kept is mine else kept

    def contains(self, digest: str) -> bool:
        """Say whether a tier has a chunk, without reading it."""
        if self.is_held(digest):
            return True
        for tier in self.tiers:
            with contextlib.suppress(OSError):
                if tier.contains(self._catalog.name(digest)):
                    return True
        return False

    def is_held(self, digest: str) -> bool:
        """Say whether a chunk is ready to use."""
        return any(place.contains(digest) for place in self.held)

    def delete(self, digest: str) -> bool:
        """Remove a chunk from every tier; raises OSError if one refuses."""
        removed = [tier.delete(self._catalog.name(digest)) for tier in self.tiers]
        removed += [place.delete(digest) for place in self.held]
        self._catalog.forget(digest)
        return any(removed)

    def set_pin(self, digest: str, pinned: bool) -> None:
        """Keep a chunk from being evicted from any tier, or let it; raises OSError if a tier cannot note it."""
        for place in self.held:
            place.set_pin(digest, pinned)
        for tier in self.tiers:
            tier.set_pin(self._catalog.name(digest), pinned)

    def pins(self) -> frozenset[str]:
        """Digests of the chunks that some tier was told not to evict."""
        return frozenset(name[-64:] for tier in self.tiers for name in tier.pins())

    def examine(self, tier: BoundedTier, name: str, repair: bool) -> Finding:
        """Read and verify one entry.

        Args:
            tier: where it is.
            name: of the entry.
            repair: remove it if it can never become good.

        Returns:
            What was found.
        """
        source, digest = None, name[-64:]
        try:
            source = tier.tier.open(name)
            if source is None:
                return Finding(digest, tier.name, 0, "absent")
            key = read_key(source, self._catalog.namespace)
            if self._catalog.name(key.digest) != name:
                raise EntryFault("key", f"it is {key.digest}")
            EntryReader(source, key, self._secret).read()
            return Finding(digest, tier.name, source.stat.nbytes)
        except EntryFault as fault:
            removed = repair and fault.corrupt and self._remove(tier, digest, source, "corrupt")
            return Finding(digest, tier.name, source.stat.nbytes if source else 0, fault.reason, removed)
        except (OSError, MemoryError) as error:
            return Finding(digest, tier.name, 0, type(error).__name__)
        finally:
            if source is not None:
                source.close()

    def expire(self, tier: BoundedTier) -> int:
        """Remove the entries of this namespace that are too old from a tier, and say how many there were."""
        old = [name for name in self._catalog.names(tier.name) if self._is_old(tier.tier.stat(name))]
        return sum(self._remove(tier, name[-64:], None, "expired") for name in old)

    def weigh(self, digest: str, important_ratio: float) -> None:
        """Tell every tier which share of a chunk's tokens turned out to be important."""
        for place in self.held:
            place.weigh(digest, important_ratio)
        for tier in self.tiers:
            tier.use(self._catalog.name(digest), important_ratio)

    def miss(self, reason: str) -> None:
        """Count a miss."""
        self._tally.count("misses", reason)

    def _hold(self, chunk: ChunkKV) -> ChunkKV:
        for place in self.held:
            self._forget(place, place.put(chunk))
        return next((one for one in (place.get(chunk.key.digest) for place in self.held) if one), chunk)

    def _forget(self, place: HeldChunks, gone: Sequence[str]) -> None:
        self._tally.count("evicted", place.name, len(gone))
        for digest in gone:
            self._catalog.forget_unlisted(digest)

    def _write(self, tier: BoundedTier, chunk: ChunkKV) -> ObjectStat | None:
        name = self._catalog.name(chunk.key.digest)
        try:
            if not tier.contains(name):
                with self._tally.timed("store_seconds", tier.name):
                    stored = tier.put_if_absent(name, encode_entry(chunk, self._secret, self._codec))
                self._tally.count("stored", tier.name, int(stored))
            return tier.stat(name)
        except OSError as error:
            self._refuse_write(tier, error)
            return None

    def _copy(self, source: Source, key: ChunkKey, tier: BoundedTier) -> None:
        name, content = self._catalog.name(key.digest), bytearray(source.stat.nbytes)
        try:
            source.read_into(0, memoryview(content))
            if tier.put_if_absent(name, [memoryview(content)]):
                self._tally.count("stored", tier.name)
            self._catalog.add(key, source.stat, [tier.name])
        except OSError as error:
            self._refuse_write(tier, error)

    def _refuse_write(self, tier: BoundedTier, error: OSError) -> None:
        reason = errno.errorcode.get(error.errno or 0, type(error).__name__)
        self._tally.count("store_failures", reason)
        self._tally.warn_once(f"chunks cannot be stored in the {tier.name} tier ({error}); other tiers may have them")

    def _load(self, tier: BoundedTier, key: ChunkKey, nearer: Sequence[BoundedTier]) -> tuple[ChunkKV | None, str]:
        """The chunk and "", or None and why not."""
        source = None
        try:
            source = tier.open(self._catalog.name(key.digest))
            if source is None:
                self._catalog.forget(key.digest, tier.name)
                return None, "absent"
            return self._read(tier, key, source, nearer), ""
        except EntryFault as fault:
            self._warn(key, tier, fault)
            if fault.corrupt:
                self._remove(tier, key.digest, source, "expired" if fault.reason == "expired" else "corrupt")
            return None, fault.reason
        except (OSError, MemoryError) as error:
            self._warn(key, tier, error)
            return None, "io" if isinstance(error, OSError) else "memory"
        finally:
            if source is not None:
                source.close()

    def _read(self, tier: BoundedTier, key: ChunkKey, source: Source, nearer: Sequence[BoundedTier]) -> ChunkKV:
        """Nothing that is read is used, or copied to a nearer tier, before all of it was checked."""
        if self._is_old(source.stat):
            raise EntryFault("expired", f"it was stored more than {self._ttl_s} s ago")
        reader = EntryReader(source, key, self._secret)
        with contextlib.ExitStack() as reserved:
            for place in self.held[-1:]:
                self._forget(place, reserved.enter_context(place.reserve(reader.nbytes)))
            chunk = reader.read()
        for other in nearer:
            if other.is_local:
                self._copy(source, key, other)
        return chunk

    def _warn(self, key: ChunkKey, tier: BoundedTier, fault: BaseException) -> None:
        reason = fault.reason if isinstance(fault, EntryFault) else type(fault).__name__
        self._tally.count("load_failures", f"{tier.name}:{reason}")
        self._tally.warn_once(f"stored chunk {key.digest} is not used and will be computed again: {fault}")

    def _is_old(self, stat: ObjectStat | None) -> bool:
        """An entry from the future is as old as it is far off: clocks differ, and nothing lives for ever."""
        return self._ttl_s is not None and stat is not None and abs(time.time() - stat.created) > self._ttl_s

    def _remove(self, tier: BoundedTier, digest: str, source: Source | None, cause: str) -> bool:
        """Make room for a good entry, unless another process already put one there."""
        removed = False
        with contextlib.suppress(OSError):
            removed = tier.delete(self._catalog.name(digest), source)
            self._tally.count("removed", cause, int(removed))
        self._catalog.forget(digest, tier.name)
        return removed


def _own_copy(tensor: Tensor) -> Tensor:
    """A dense copy on the CPU: what the caller does with the original later cannot reach the store."""
    copy = tensor.detach().to("cpu", copy=True)
    return copy.contiguous()
