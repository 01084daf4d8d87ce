# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The tiers of a store one behind the other: ask memory first, then disk, and believe neither."""

import contextlib
import errno
import time

from torch import Tensor

from .catalog import Catalog
from .chunk import ChunkKey, ChunkKV
from .entry import EntryReader, encode_entry
from .tally import Tally
from .tiers.base import EntryFault, ObjectStat, Source, Tier
from .tiers.memory import MemoryTier

__all__ = ["TierStack"]


class TierStack:
    """Memory, and the tier behind it. A fault never leaves here: it is a miss, counted, and warned of once.

    Args:
        memory: the tier that is asked first.
        behind: the tier that keeps bytes, or None.
        catalog: is told of what came and went.
        tally: counts what happened.
    """

    def __init__(self, memory: MemoryTier, behind: Tier | None, catalog: Catalog, tally: Tally) -> None:
        self._memory = memory
        self._behind = behind
        self._catalog = catalog
        self._tally = tally

    def get(self, key: ChunkKey) -> ChunkKV | None:
        """Fetch a chunk, and hold it in memory from then on."""
        chunk = self._memory.get(key.digest)
        if chunk is not None and chunk.key == key:
            self._tally.count("hits", "memory")
            return chunk
        chunk = self._load(key)
        if chunk is not None:
            self._hold(chunk)
        return chunk

    def put(self, chunk: ChunkKV) -> None:
        """Hold a chunk, write it behind, and tell the catalog.

        Args:
            chunk: to be copied, unless memory has it.
        """
        held = self._memory.get(chunk.key.digest)
        if held is None or held.key != chunk.key:
            held = chunk.map(_own_copy)
        self._hold(held)
        stat = self._write(held)
        if stat or self._memory.contains(chunk.key.digest):
            self._catalog.add(chunk.key, stat or ObjectStat(held.nbytes, time.time()), listed=stat is not None)

    def contains(self, digest: str) -> bool:
        """Say whether a tier has a chunk, without reading it."""
        if self._memory.contains(digest):
            return True
        with contextlib.suppress(OSError):
            return self._behind is not None and self._behind.contains(self._catalog.name(digest))
        return False

    def delete(self, digest: str) -> bool:
        """Remove a chunk from every tier; raises OSError if the tier behind refuses."""
        removed = self._behind is not None and self._behind.delete(self._catalog.name(digest))
        removed = self._memory.delete(digest) or removed
        self._catalog.forget(digest)
        return removed

    def miss(self, reason: str) -> None:
        """Count a miss."""
        self._tally.count("misses", reason)

    def _hold(self, chunk: ChunkKV) -> None:
        gone = self._memory.put(chunk)
        self._tally.count("evicted", "memory", len(gone))
        for digest in gone:
            self._catalog.forget_unlisted(digest)

    def _write(self, chunk: ChunkKV) -> ObjectStat | None:
        if self._behind is None:
            return None
        name = self._catalog.name(chunk.key.digest)
        try:
            if not self._behind.contains(name):
                stored = self._behind.put_if_absent(name, encode_entry(chunk))
                self._tally.count("stored", self._behind.name, int(stored))
            return self._behind.stat(name)
        except OSError as error:
            reason = errno.errorcode.get(error.errno or 0, type(error).__name__)
            self._tally.count("store_failures", reason)
            self._tally.warn_once(
                f"chunks cannot be stored in the {self._behind.name} tier ({error}); they are kept in memory only"
            )
            return None

    def _load(self, key: ChunkKey) -> ChunkKV | None:
        if self._behind is None:
            self.miss("absent")
            return None
        source = None
        try:
            source = self._behind.open(self._catalog.name(key.digest))
            if source is None:
                self._catalog.forget(key.digest)
                self.miss("absent")
                return None
            chunk = EntryReader(source, key).read()
            self._tally.count("hits", self._behind.name)
            return chunk
        except EntryFault as fault:
            self._refuse(key, fault.reason, fault)
            if fault.corrupt:
                self._remove(self._behind, key, source)
        except (OSError, MemoryError) as error:
            self._refuse(key, "io" if isinstance(error, OSError) else "memory", error)
        finally:
            if source is not None:
                source.close()
        return None

    def _refuse(self, key: ChunkKey, reason: str, fault: BaseException) -> None:
        self.miss(reason)
        self._tally.warn_once(f"stored chunk {key.digest} is not used and will be computed again: {fault}")

    def _remove(self, behind: Tier, key: ChunkKey, source: Source | None) -> None:
        """Make room for a good entry, unless another process already put one there."""
        with contextlib.suppress(OSError):
            removed = behind.delete(self._catalog.name(key.digest), source)
            self._tally.count("removed", "corrupt", int(removed))
        self._catalog.forget(key.digest)


def _own_copy(tensor: Tensor) -> Tensor:
    """A dense copy on the CPU: what the caller does with the original later cannot reach the store."""
    copy = tensor.detach().to("cpu", copy=True)
    return copy.contiguous()
