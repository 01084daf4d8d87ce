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
from .format import hash_namespace
from .index import ContentIndex, IndexRecord, Run, pack_tokens
from .locks import new_lock
from .seal import keyed
from .snapshot import load_snapshot, save_snapshot
from .stats import StoreStats
from .tiers.base import EntryFault, ObjectStat, Tier

__all__ = ["Catalog", "entry_name"]

logger = logging.getLogger(__name__)

_SAVE_EVERY = 1024  # entries that were read one by one since the index was saved
_LEARN_S = 0.2  # at most, of one request, for entries of tiers on other machines that are not known yet


class Catalog:
    """The chunks of one namespace, in memory and in tiers that other processes may write to."""

    def __init__(
        self,
        namespace: str,
        tiers: Sequence[Tier],
        snapshot: Path | None,
        is_held: Callable[[str], bool],
        *,
        secret: bytes | None = None,
        stats: StoreStats | None = None,
    ) -> None:
        self.namespace = namespace
        self._secret = secret
        self._stats = stats or StoreStats()
        self._space = self.name("")[:2]
        self._digests: dict[str, str] = {}  # of known entries whose names do not say them, by name
        self._tiers = tuple(tiers)
        self._snapshot = snapshot
        self._saved: dict[str, tuple[str, IndexRecord]] | None = None
        self._is_held = is_held
        self._index = ContentIndex()
        self._seen: dict[str, frozenset[str]] = {}
        self._listed: dict[str, set[str]] = {tier.name: set() for tier in tiers}
        self._skipped: set[tuple[str, str]] = set()
        self._unsaved = 0
        self._lock = new_lock()

    def name(self, digest: str) -> str:
        """What an entry is called in the tier: by its digest, or by the HMAC of that where there is a secret."""
        return entry_name(self._secret, self.namespace, digest)

    def digest(self, name: str) -> str:
        """The digest of an entry; of one that is not known what its name says, which may be another's HMAC."""
        return self._digests.get(name, name[-64:])

    def add(self, key: ChunkKey, stat: ObjectStat, where: Sequence[str]) -> None:
        """Take up a chunk that was just stored."""
        with self._lock:
            name = self._know(key.digest, _record(key, stat))
            for tier in where:
                self._list(tier, name)

    def take_up(self, name: str, tier: str) -> None:
        """List an entry that is known in a tier that has it now, too."""
        with self._lock:
            if self.owns(name):
                self._list(tier, name)

    def forget(self, digest: str, tier: str | None = None) -> None:
        """Drop a chunk that turned out to be gone from a tier, or from all; it stays known while some tier has it."""
        with self._lock:
            for name in self._listed if tier is None else [tier]:
                self._listed[name].discard(self.name(digest))
            self.forget_unlisted(digest)

    def forget_unlisted(self, digest: str) -> None:
        """Drop a chunk that left memory, unless a tier has it."""
        with self._lock:
            if not self.tiers_of(digest) and not self._is_held(digest):
                self._index.discard(digest)
                self._digests.pop(self.name(digest), None)

    def match(self, fingerprint: str, chunk_prefix_ids: Sequence[int], token_ids: Sequence[int]) -> list[Run]:
        """As `ContentIndex.match`, over what is stored now."""
        with self._lock:
            self.refresh()
            return self._index.match(fingerprint, chunk_prefix_ids, token_ids)

    def sample(self, fingerprint: str, chunk_prefix_ids: Sequence[int]) -> bytes:
        """As `ContentIndex.sample`."""
        with self._lock:
            return self._index.sample(fingerprint, chunk_prefix_ids)

    def counts(self, fingerprint: str) -> tuple[int, int]:
        """How many chunks of a model are known, and how many of all models."""
        with self._lock:
            return self._index.count(fingerprint), len(self._index)

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

    def tiers_of(self, digest: str) -> list[str]:
        """Names of the tiers that had a chunk when they were last looked at."""
        return [tier for tier, names in self._listed.items() if self.name(digest) in names]

    def owns(self, name: str) -> bool:
        """Say whether an object of a tier is a chunk of this namespace that is known."""
        return self.digest(name) in self._index and (name in self._digests or self.name(name[-64:]) == name)

    def refresh(self, everything: bool = False) -> None:
        """Take up what other processes stored or removed; costs next to nothing if they did not."""
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
                rows = [row for row in self._index.items() if self.tiers_of(row[0])]
                save_snapshot(self._snapshot, rows, self._secret)
                self._unsaved = 0

    def _take_up(self, tier: Tier, names: frozenset[str], stop_s: float) -> None:
        listed = self._listed[tier.name]
        for name in listed - names:
            self.forget(self.digest(name), tier.name)
        new = names - listed
        if new and self._saved is None:
            self._saved = self._load()
        for name in new:
            saved = (self._saved or {}).get(name)
            if saved is not None and saved[0] not in self._index:
                self._know(*saved)
            if self.owns(name):
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
            self._stats.count("skipped", f"{tier.name}:{fault.reason}")
        except OSError as error:
            logger.info("%s cannot be read now (%s)", name, error)
            self._seen.pop(tier.name, None)

    def _read(self, tier: Tier, name: str) -> None:
        source = tier.open(name)
        if source is None:
            return
        with contextlib.closing(source):
            key = read_key(source, self.namespace, self._secret)
            if self.name(key.digest) != name:
                raise EntryFault("key", f"it is {key.digest}")
            self.add(key, source.stat, [tier.name])

    def _load(self) -> dict[str, tuple[str, IndexRecord]]:
        """What the saved index says, by name of the entry."""
        if self._snapshot is None:
            return {}
        saved = load_snapshot(self._snapshot, self._secret, lambda reason: self._stats.count("skipped", reason))
        return {self.name(digest): (digest, record) for digest, record in saved.items()}

    def _know(self, digest: str, record: IndexRecord) -> str:
        """Index a chunk; gives the name of its entry."""
        self._index.add(digest, record)
        name = self.name(digest)
        if not name.endswith(digest):
            self._digests[name] = digest
        return name

    def _list(self, tier: str, name: str) -> None:
        if name not in self._listed[tier]:
            self._listed[tier].add(name)
            self._skipped.discard((tier, name))
            self._unsaved += 1


def entry_name(secret: bytes | None, namespace: str, digest: str) -> str:
    """Name the entry of a chunk in a tier; two hex digits of the namespace come first."""
    called = keyed(secret, "name", digest)
    return f"{keyed(secret, 'space', hash_namespace(namespace))[:2]}/{called[:2]}/{called}"


def _record(key: ChunkKey, stat: ObjectStat) -> IndexRecord:
    return IndexRecord(key.fingerprint, key.chunk_prefix_ids, pack_tokens(key.token_ids), stat.nbytes, stat.created)
