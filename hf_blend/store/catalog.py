# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Which chunks there are: the index in memory, kept in step with the directory that is the truth."""

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from .chunk import ChunkKey
from .entry import read_key
from .header import hash_namespace
from .index import ContentIndex, IndexRecord, pack_tokens
from .snapshot import load_snapshot, save_snapshot
from .tiers.base import EntryFault, ObjectStat, Tier

__all__ = ["Catalog"]

logger = logging.getLogger(__name__)

_SAVE_EVERY = 1024  # entries that were read one by one since the index was saved


class Catalog:
    """The chunks of one namespace, in memory and in a tier that other processes may write to.

    Args:
        namespace: whose chunks.
        tier: where they are kept, or None.
        snapshot: where the index itself is kept, or None.
        is_held: says whether a chunk is in memory.
    """

    def __init__(
        self, namespace: str, tier: Tier | None, snapshot: Path | None, is_held: Callable[[str], bool]
    ) -> None:
        self._namespace = namespace
        self._space = hash_namespace(namespace)[:2]
        self._tier = tier
        self._snapshot = snapshot
        self._is_held = is_held
        self._index = ContentIndex()
        self._seen: frozenset[str] | None = None
        self._listed: set[str] = set()
        self._skipped: set[str] = set()
        self._unsaved = 0
        self._lock = threading.RLock()

    def name(self, digest: str) -> str:
        """What an entry is called in the tier."""
        return f"{self._space}/{digest[:2]}/{digest}"

    def add(self, key: ChunkKey, stat: ObjectStat, *, listed: bool) -> None:
        """Take up a chunk that was just stored.

        Args:
            key: of the chunk.
            stat: its size and time.
            listed: whether it reached the tier.
        """
        with self._lock:
            self._index.add(key.digest, _record(key, stat))
            if listed:
                self._list(self.name(key.digest))

    def forget(self, digest: str) -> None:
        """Drop a chunk that turned out to be gone, unless it is held in memory."""
        with self._lock:
            self._listed.discard(self.name(digest))
            if not self._is_held(digest):
                self._index.discard(digest)

    def forget_unlisted(self, digest: str) -> None:
        """Drop a chunk that left memory, unless the tier has it."""
        with self._lock:
            if self.name(digest) not in self._listed:
                self.forget(digest)

    def find(self, fingerprint: str, sink_ids: Sequence[int], token_ids: Sequence[int]) -> list[tuple[int, int]]:
        """As `ContentIndex.find`, over what is stored now."""
        with self._lock:
            self.refresh()
            return self._index.find(fingerprint, sink_ids, token_ids)

    def items(self) -> list[tuple[str, IndexRecord]]:
        """Digest and record of every chunk that is stored now."""
        with self._lock:
            self.refresh()
            return self._index.items()

    def is_listed(self, digest: str) -> bool:
        """Say whether the tier had a chunk when it was last looked at."""
        return self.name(digest) in self._listed

    def refresh(self) -> None:
        """Take up what other processes stored or removed; costs next to nothing if they did not."""
        if self._tier is None:
            return
        try:
            names = self._tier.names(self._space)
        except OSError as error:
            logger.info("the entries cannot be listed now (%s)", error)
            return
        if names is self._seen:
            return
        first, self._seen = self._seen is None, names
        for name in self._listed - names:
            self.forget(name[-64:])
        self._learn_all(names - self._listed - self._skipped, use_snapshot=first)

    def save(self) -> None:
        """Keep the index for the next opening, if it changed."""
        with self._lock:
            if self._snapshot is not None and self._unsaved:
                save_snapshot(self._snapshot, [row for row in self._index.items() if self.is_listed(row[0])])
                self._unsaved = 0

    def _learn_all(self, names: frozenset[str], *, use_snapshot: bool) -> None:
        if not names:
            return
        saved = load_snapshot(self._snapshot) if use_snapshot and self._snapshot is not None else {}
        for name in names:
            digest = name[-64:]
            if digest in saved:
                self._index.add(digest, saved[digest])
                self._listed.add(name)
            else:
                self._learn(name)
        if self._unsaved >= _SAVE_EVERY:
            self.save()

    def _learn(self, name: str) -> None:
        """Read which chunk an entry holds; what is not a readable chunk of ours is passed over."""
        try:
            self._read(name)
        except EntryFault as fault:
            logger.info("%s is not listed (%s)", name, fault)
            self._skipped.add(name)
        except OSError as error:
            logger.info("%s cannot be read now (%s)", name, error)
            self._seen = None

    def _read(self, name: str) -> None:
        source = self._tier.open(name) if self._tier else None
        if source is None:
            return
        with contextlib.closing(source):
            key = read_key(source, self._namespace)
            if self.name(key.digest) != name:
                raise EntryFault("key", f"it is {key.digest}")
            self.add(key, source.stat, listed=True)

    def _list(self, name: str) -> None:
        if name not in self._listed:
            self._listed.add(name)
            self._skipped.discard(name)
            self._unsaved += 1


def _record(key: ChunkKey, stat: ObjectStat) -> IndexRecord:
    return IndexRecord(key.fingerprint, key.sink_ids, pack_tokens(key.token_ids), stat.nbytes, stat.created)
