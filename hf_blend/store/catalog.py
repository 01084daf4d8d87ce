# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Which chunks there are: the index in memory, kept in step with the directory that is the truth."""

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from .chunk import ChunkKey
from .entry import read_key
from .header import hash_namespace
from .index import ContentIndex, IndexRecord, pack_tokens
from .locks import new_lock
from .snapshot import load_snapshot, save_snapshot
from .tiers.base import EntryFault, ObjectStat, Tier

__all__ = ["Catalog"]

logger = logging.getLogger(__name__)

_SAVE_EVERY = 1024  # entries that were read one by one since the index was saved
_LEARN_S = 0.2  # at most, of one request, for entries of tiers on other machines that are not known yet


class Catalog:
    """The chunks of one namespace, in memory and in tiers that other processes may write to.

    Args:
        namespace: whose chunks.
        tiers: where they are kept.
        snapshot: where the index itself is kept, or None.
        is_held: says whether a chunk is in memory.
    """

    def __init__(
        self, namespace: str, tiers: Sequence[Tier], snapshot: Path | None, is_held: Callable[[str], bool]
    ) -> None:
        self.namespace = namespace
        self._space = hash_namespace(namespace)[:2]
        self._tiers = tuple(tiers)
        self._snapshot = snapshot
        self._saved: dict[str, IndexRecord] | None = None
        self._is_held = is_held
        self._index = ContentIndex()
        self._seen: dict[str, frozenset[str]] = {}
        self._listed: dict[str, set[str]] = {tier.name: set() for tier in tiers}
        self._skipped: set[tuple[str, str]] = set()
        self._unsaved = 0
        self._lock = new_lock()

    def name(self, digest: str) -> str:
        """What an entry is called in the tier."""
        return f"{self._space}/{digest[:2]}/{digest}"

    def add(self, key: ChunkKey, stat: ObjectStat, where: Sequence[str]) -> None:
        """Take up a chunk that was just stored.

        Args:
            key: of the chunk.
            stat: its size and time.
            where: names of the tiers that have it.
        """
        with self._lock:
            self._index.add(key.digest, _record(key, stat))
            for tier in where:
                self._list(tier, self.name(key.digest))

    def forget(self, digest: str, tier: str | None = None) -> None:
        """Drop a chunk that turned out to be gone from a tier, or from all; it stays known while some place has it."""
        with self._lock:
            for name in self._listed if tier is None else [tier]:
                self._listed[name].discard(self.name(digest))
            self.forget_unlisted(digest)

    def forget_unlisted(self, digest: str) -> None:
        """Drop a chunk that left memory, unless a tier has it."""
        with self._lock:
            if not self.places(digest) and not self._is_held(digest):
                self._index.discard(digest)

    def find(self, fingerprint: str, sink_ids: Sequence[int], token_ids: Sequence[int]) -> list[tuple[int, int]]:
        """As `ContentIndex.find`, over what is stored now."""
        with self._lock:
            self.refresh()
            return self._index.find(fingerprint, sink_ids, token_ids)

    def items(self) -> list[tuple[str, IndexRecord]]:
        """Digest and record of every chunk that is stored now."""
        with self._lock:
            self.refresh(everything=True)
            return self._index.items()

    def names(self, tier: str) -> frozenset[str]:
        """Names of all objects in the space of this namespace in a tier, readable or not."""
        with self._lock:
            self.refresh()
            return self._seen.get(tier, frozenset())

    def places(self, digest: str) -> list[str]:
        """Names of the tiers that had a chunk when they were last looked at."""
        return [tier for tier, names in self._listed.items() if self.name(digest) in names]

    def owns(self, name: str) -> bool:
        """Say whether an object of a tier is a chunk of this namespace that is known."""
        return name[-64:] in self._index and self.name(name[-64:]) == name

    def refresh(self, everything: bool = False) -> None:
        """Take up what other processes stored or removed; costs next to nothing if they did not.

        Args:
            everything: read all entries that are not known yet; otherwise, of those on other machines, as many as
                there is time for in a request, and the next ones next time.
        """
        known = True
        for tier in self._tiers:
            try:
                names = tier.names(self._space)
            except OSError as error:
                logger.info("the entries of the %s tier cannot be listed now (%s)", tier.name, error)
                known = False
                continue
            if names is not self._seen.get(tier.name):
                self._seen[tier.name] = names
                self._take_up(tier, names, time.monotonic() + (_LEARN_S if not (tier.is_local or everything) else 1e9))
            known = known and tier.name in self._seen
        if known:
            self._saved = {}  # what appears later is newer than the snapshot

    def save(self) -> None:
        """Keep the index for the next opening, if it changed."""
        with self._lock:
            if self._snapshot is not None and self._unsaved:
                save_snapshot(self._snapshot, [row for row in self._index.items() if self.places(row[0])])
                self._unsaved = 0

    def _take_up(self, tier: Tier, names: frozenset[str], stop_s: float) -> None:
        listed = self._listed[tier.name]
        for name in listed - names:
            self.forget(name[-64:], tier.name)
        new = names - listed
        if new and self._saved is None:
            self._saved = load_snapshot(self._snapshot) if self._snapshot is not None else {}
        for name in new:
            digest = name[-64:]
            record = (self._saved or {}).get(digest)
            if digest not in self._index and record is not None:
                self._index.add(digest, record)
            if digest in self._index:
                listed.add(name)
            elif time.monotonic() > stop_s:
                self._seen.pop(tier.name, None)
            elif (tier.name, name) not in self._skipped:
                self._learn(tier, name)
        if self._unsaved >= _SAVE_EVERY:
            self.save()

    def _learn(self, tier: Tier, name: str) -> None:
        """Read which chunk an entry holds; what is not a readable chunk of ours is passed over."""
        try:
            self._read(tier, name)
        except EntryFault as fault:
            logger.info("%s is not listed (%s)", name, fault)
            self._skipped.add((tier.name, name))
        except OSError as error:
            logger.info("%s cannot be read now (%s)", name, error)
            self._seen.pop(tier.name, None)

    def _read(self, tier: Tier, name: str) -> None:
        source = tier.open(name)
        if source is None:
            return
        with contextlib.closing(source):
            key = read_key(source, self.namespace)
            if self.name(key.digest) != name:
                raise EntryFault("key", f"it is {key.digest}")
            self.add(key, source.stat, [tier.name])

    def _list(self, tier: str, name: str) -> None:
        if name not in self._listed[tier]:
            self._listed[tier].add(name)
            self._skipped.discard((tier, name))
            self._unsaved += 1


def _record(key: ChunkKey, stat: ObjectStat) -> IndexRecord:
    return IndexRecord(key.fingerprint, key.sink_ids, pack_tokens(key.token_ids), stat.nbytes, stat.created)
