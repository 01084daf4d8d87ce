# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Which chunks of a namespace are stored, from the indexes of memories, queues and tiers."""

import contextlib
import functools
import heapq
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from .budget import BoundedTier
from .chunk import ChunkKey, ChunkSpan
from .content import Run, pack_tokens, unpack_tokens, without_overlap
from .entry import read_key
from .format import hash_namespace
from .index import Index
from .stats import StoreStats
from .tiers.base import EntryFault

__all__ = ["Catalog", "Listed", "entry_name"]

Answer = TypeVar("Answer")
logger = logging.getLogger(__name__)

_PAGE = 500  # entries that are read before they are entered in an index
_LEARN_S = 0.2  # at most, of one request, for entries of tiers on other machines that are not known yet


@dataclass
class Listed:
    """A chunk that is stored."""

    key: ChunkKey
    nbytes: int
    created: float
    tiers: list[str]


class Catalog:
    """The chunks of one namespace in memories and queues (`at_hand`), and in tiers that other processes write to."""

    def __init__(
        self,
        namespace: str,
        tiers: Sequence[BoundedTier],
        at_hand: Sequence[Index],
        *,
        stats: StoreStats | None = None,
    ) -> None:
        self.namespace = namespace
        self._stats = stats or StoreStats()
        self._tiers, self._at_hand = tuple(tiers), tuple(at_hand)
        self.space = self.name("")[:2]
        self.owner = owner_of(namespace)
        # every index, the nearest first, and what this namespace is called there
        self._indexes = [*((index, "") for index in at_hand), *((tier.index, self.owner) for tier in tiers)]
        self._skipped: set[tuple[str, str]] = set()

    def name(self, digest: str) -> str:
        """Name the entry of a chunk in a tier."""
        return entry_name(self.namespace, digest)

    def digest(self, name: str) -> str:
        """The digest of the chunk in an entry."""
        return name[-64:]

    def add(self, tier: BoundedTier, key: ChunkKey) -> None:
        """List a chunk that was written to a tier, if it is there."""
        name = self.name(key.digest)
        stat = tier.stat(name)
        if stat is not None:
            self._skipped.discard((tier.name, name))
            tier.know(name, stat, key)

    def key(self, tier: BoundedTier, name: str) -> ChunkKey | None:
        """The key of an object in a tier's index, if the name of the object proves it."""
        key = tier.index.key(name, self.namespace)
        return key if key is not None and self.name(key.digest) == name else None

    def find(self, fingerprint: str, chunk_prefix_ids: Sequence[int], token_ids: Sequence[int]) -> list[ChunkSpan]:
        """Find the stored chunks of one model and prefix, from left to right, also where first or last tokens differ.

        Of chunks that overlap the longest is whole.
        """
        ids, prefix = np.frombuffer(pack_tokens(token_ids), np.int32), tuple(chunk_prefix_ids)
        runs = self._settled(lambda: self._match(fingerprint, prefix, ids), thorough=False)
        return [
            ChunkSpan(run.start, self._key(fingerprint, prefix, run.packed), run.first, run.tokens) for run in runs
        ]

    def _key(self, fingerprint: str, chunk_prefix_ids: Sequence[int], packed: bytes) -> ChunkKey:
        return ChunkKey(fingerprint, tuple(chunk_prefix_ids), unpack_tokens(packed), self.namespace)

    def _match(self, fingerprint: str, chunk_prefix_ids: tuple[int, ...], ids: np.ndarray) -> list[Run]:
        starts, runs = set[tuple[int, int]](), set[Run]()
        is_stored = functools.cache(functools.partial(self._is_stored, fingerprint, chunk_prefix_ids))
        for index, owner in self._indexes:
            group = (owner, fingerprint, chunk_prefix_ids)
            with contextlib.suppress(OSError):
                starts |= {(start, -tokens) for start, tokens in index.starts(group, ids)}
                runs.update(index.inside(group, ids))
        complete, stop = list[Run](), 0
        for start, tokens in sorted(starts):
            run = Run(start, ids[start : start - tokens].tobytes(), 0, -tokens)
            if start >= stop and run.stop <= len(ids) and is_stored(run.packed):
                stop = run.stop
                complete.append(run)
        return without_overlap(complete, (run for run in runs if is_stored(run.packed)))

    def sample(self, fingerprint: str, chunk_prefix_ids: Sequence[int]) -> ChunkKey | None:
        """Give any chunk of a model and prefix; None if there is none."""
        samples = (index.sample((owner, fingerprint, chunk_prefix_ids)) for index, owner in self._indexes)
        packed = next(filter(None, samples), b"")
        return self._key(fingerprint, chunk_prefix_ids, packed) if packed else None

    def longest_prefix(self, fingerprint: str) -> tuple[int, ...]:
        """Give the most tokens that chunks of a fingerprint are behind; empty if there is no such chunk."""
        packed = {ids for index, owner in self._indexes for ids in index.prefixes(owner, fingerprint)}
        return max(map(unpack_tokens, packed), key=lambda ids: (len(ids), ids), default=())

    def counts(self, fingerprint: str) -> tuple[int, int]:
        """How many chunks of a model are known, and how many of all models."""
        here, everywhere = zip(
            *((index.count(owner, fingerprint), index.count(owner)) for index, owner in self._indexes), strict=True
        )
        return max(here), max(everywhere)

    def items(self) -> dict[str, Listed]:
        """Every chunk that is stored now, by digest, in the order of digests."""
        return self._settled(self._items)

    def __len__(self) -> int:
        return self._settled(self._count)

    def _settled(self, count: Callable[[], Answer], thorough: bool = True) -> Answer:
        """Read the indexes in step with their tiers, and again if one was started again meanwhile."""
        for _ in range(3):
            doubts = sum(tier.index.doubts for tier in self._tiers)
            self.refresh(thorough)
            result = count()
            if doubts == sum(tier.index.doubts for tier in self._tiers):
                break
        return result

    def _items(self) -> dict[str, Listed]:
        items = dict[str, Listed]()
        for tier in self._tiers:
            for name, key, nbytes, created in tier.index.records(self.owner, self.namespace):
                if key is None or self.name(key.digest) != name:
                    tier.index.remake()
                    break
                items.setdefault(key.digest, Listed(key, nbytes, created, [])).tiers.append(tier.name)
        for index in self._at_hand:
            for digest, key, nbytes, created in index.records("", self.namespace):
                if key is not None:
                    items.setdefault(digest, Listed(key, nbytes, created, []))
        return dict(sorted(items.items()))

    def _count(self) -> int:
        names = [sorted(map(self.name, index.owned(""))) for index in self._at_hand]
        tiers = [tier.index for tier in self._tiers]
        if len(tiers) == 1 and not any(names):
            return tiers[0].count(self.owner)
        last, count = "", 0
        for name in heapq.merge(*names, *(index.owned(self.owner) for index in tiers)):
            count, last = count + (name != last), name
        return count

    def names(self, tier: BoundedTier) -> list[str]:
        """Names of all objects in the space of this namespace in a tier, readable or not."""
        self.refresh(thorough=True)
        return tier.index.names(self.space)

    def refresh(self, thorough: bool = False) -> None:
        """List what other processes stored or removed; costs next to nothing if they did not."""
        for tier in self._tiers:
            stop_s = time.monotonic() + (1e9 if tier.is_local or thorough else _LEARN_S)
            try:
                tier.sync(self.space, thorough)
                names = [name for name in tier.index.unread(self.space) if (tier.name, name) not in self._skipped]
                for start in range(0, len(names), _PAGE):
                    self._learn(tier, names[start : start + _PAGE], stop_s)
            except OSError as error:
                logger.info("the entries of the %s tier cannot be listed now (%s)", tier.name, error)

    def _is_stored(self, fingerprint: str, chunk_prefix_ids: tuple[int, ...], packed: bytes) -> bool:
        """Whether an object has the name of the chunk of these tokens, which proves what its row says."""
        with contextlib.suppress(ValueError):
            key = self._key(fingerprint, chunk_prefix_ids, packed)
            is_held = any(key.digest in index for index in self._at_hand)
            return is_held or any(self.name(key.digest) in tier.index for tier in self._tiers)
        return False

    def _learn(self, tier: BoundedTier, names: Sequence[str], stop_s: float) -> None:
        """Read which chunks entries hold, and list them; entries that are no readable chunk of ours are skipped."""
        records = []
        for name in names:
            if time.monotonic() >= stop_s:
                break
            try:
                source = tier.tier.open(name)
                if source is None:
                    continue
                with contextlib.closing(source):
                    key, row = read_key(source, self.namespace), tier.index.row(name)
                if self.name(key.digest) != name:
                    raise EntryFault("key", f"it is {key.digest}")
                if row is None or row[0] != source.stat.nbytes:
                    tier.know(name, source.stat)
                records.append((name, key))
            except EntryFault as fault:
                logger.info("%s is not listed (%s)", name, fault)
                self._skipped.add((tier.name, name))
                self._stats.count("skipped", f"{tier.name}:{fault.reason}")
            except OSError as error:
                logger.info("%s cannot be read now (%s)", name, error)
        if records:
            tier.describe(records)


def entry_name(namespace: str, digest: str) -> str:
    """Name the entry of a chunk in a tier; two hex digits of the namespace come first."""
    return f"{hash_namespace(namespace)[:2]}/{digest[:2]}/{digest}"


def owner_of(namespace: str) -> str:
    """What an index calls a namespace."""
    return hash_namespace(namespace)[:32]
