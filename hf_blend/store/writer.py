# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Writes chunks: into memory, into the tiers on this machine at once, and into the queues of the others."""

import functools
from collections.abc import Callable, Sequence
from functools import partial

from ..errors import StoreError
from .budget import BoundedTier
from .chunk import ChunkKV
from .entry import encode_entry, stored_as
from .guard import Guard
from .storage import PendingWrite, Storage
from .tiers.base import EntryFault

__all__ = ["Writer"]

Encode = Callable[[ChunkKV], Sequence[memoryview]]
Encoded = Callable[[], Sequence[memoryview]]  # the bytes of an entry, made when they are needed


class Writer:
    """Writes the chunks of one store. A tier that refuses a chunk is counted and raises nothing."""

    def __init__(self, storage: Storage, codec: str) -> None:
        self._storage, self.codec = storage, codec
        self.encode: Encode = lambda chunk: encode_entry(chunk, codec)  # gives the bytes of its entry

    def put(self, chunk: ChunkKV, wait_s: float = 0.0) -> ChunkKV:
        """Store a chunk in memory and in every tier, as `BaseStore.put` says; a full queue is waited for."""
        key = chunk.key
        if key.namespace != self._storage.namespace:
            raise StoreError(
                f"chunk {key.digest} belongs to another namespace than this store. Open a store with the chunk's "
                "namespace, or compute the chunk for the store's."
            )
        chunk.check()
        cached = (memory.peek(key.digest) for memory in self._storage.memories if memory.device is None)
        mine = next((copy for copy in cached if copy and copy.key == key), None) or chunk.own_copy()
        stored = stored_as(mine, self.codec)
        self.hold(stored)
        encoded = functools.cache(partial(self.encode, mine))
        for tier in self._storage.tiers:
            if tier.is_local:
                self._write(tier, stored, encoded)
            else:
                self.send(tier, stored, encoded, wait_s)
        return chunk if stored is mine else stored

    def hold(self, chunk: ChunkKV) -> ChunkKV:
        """Take a chunk into memory where there is room for it; gives it as the nearest memory has it."""
        digest, stats = chunk.key.digest, self._storage.stats
        for memory in self._storage.memories:
            try:
                memory.put(chunk)
                self._storage.restore_importance(memory, digest, digest)
            except (RuntimeError, MemoryError) as error:  # of a device that is full
                stats.count("store_failures", type(error).__name__)
                stats.warn_once(f"chunks cannot be held in the {memory.name} tier ({error})")
        cached = (memory.peek(digest) for memory in self._storage.memories)
        return next(filter(None, cached), chunk)

    def send(self, tier: BoundedTier, chunk: ChunkKV, encoded: Encoded, wait_s: float = 0.0) -> None:
        """Queue an entry for a tier, or write it now if there are no queues.

        Its digests are computed now: what is written to the tensors while they wait is noticed when they are read.
        """
        if not self._storage.queues:
            return self._write(tier, chunk, encoded)
        try:
            digest, parts = chunk.key.digest, encoded()
            guard = Guard(tensor for _, tensor in chunk.named_tensors())
            pending = PendingWrite(chunk, guard, partial(self._write_pending, tier, chunk, guard, parts))
            self._storage.queues[tier.name].put(digest, pending, sum(map(len, parts)), wait_s, chunk.key)
        except (OSError, MemoryError) as error:
            self._storage.refuse_write(tier, error)

    def replace(self, tier: BoundedTier, chunk: ChunkKV, parts: Sequence[memoryview]) -> None:
        """Write an entry in one step: a reader, or a process that is killed, finds the old one or the new one."""
        name = self._storage.catalog.name(chunk.key.digest)
        try:
            tier.replace(name, parts)
            self._storage.catalog.add(tier, chunk.key)
        except OSError as error:
            return self._storage.refuse_write(tier, error)
        self._storage.restore_importance(tier, name, chunk.key.digest)

    def _write_pending(self, tier: BoundedTier, chunk: ChunkKV, guard: Guard, parts: Sequence[memoryview]) -> None:
        if guard.is_intact():
            self._write(tier, chunk, lambda: parts)
        else:
            self._storage.count_dropped(tier.name, "changed")

    def _write(self, tier: BoundedTier, chunk: ChunkKV, encoded: Encoded) -> None:
        """Write an entry to a tier unless it is there, and list it in the catalog."""
        storage, digest = self._storage, chunk.key.digest
        name = storage.catalog.name(digest)
        try:
            if not tier.contains(name):
                with storage.stats.timed("store_seconds", tier.name):
                    stored = tier.put_if_absent(name, encoded())
                storage.stats.count("stored", tier.name, int(stored))
                storage.restore_importance(tier, name, digest)
            storage.catalog.add(tier, chunk.key)
        except (OSError, MemoryError, EntryFault) as error:
            storage.refuse_write(tier, error)
