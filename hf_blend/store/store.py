# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A store of chunk KV in memory and in tiers that keep bytes, verified where bytes enter. It knows no model.

A fault costs time, never correctness: whatever is missing, damaged, foreign or unreadable is a miss with a reason.
"""

import contextlib
import errno
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from ..errors import StoreError
from .capacity import Capacity
from .chunk import ChunkKey, ChunkKV, ChunkSpan, Layout
from .entry import EntryFormat, PackedChunk, hash_namespace, read_key
from .index import ChunkIndex, Listed
from .memory import MemoryCache, StoreStats
from .order import longest_chain
from .stream import LayerReader, StreamReader
from .tiers.base import BytesSource, EntryFault, Source, Tier
from .tiers.disk import DiskTier

logger = logging.getLogger(__name__)
_COUNTED = ("hits", "misses", "load_failures", "stored", "store_failures", "evicted", "removed")
_FULL = (errno.ENOSPC, errno.EDQUOT)
_PAGE = 500  # entries that are read before they are listed
_LIST_S = 0.2  # that one search spends on entries of tiers on other machines that are not in the index


@dataclass(frozen=True)
class EntryInfo:
    """One stored chunk, for lists."""

    digest: str
    fingerprint: str
    tokens: int
    nbytes: int
    tier: str
    created: float


@dataclass(frozen=True)
class EntryCheck:
    """What a check of one entry found."""

    digest: str
    tier: str
    nbytes: int
    reason: str = ""
    removed: bool = False


class OpenEntry(NamedTuple):
    """An entry of a tier that was opened to read a chunk."""

    tier: Tier
    key: ChunkKey
    source: Source
    deletions: int  # of the store before it was opened: after another one the chunk is not stored again
    content: bytearray | None  # all bytes of it, where there are nearer tiers to receive them


Decode = Callable[[OpenEntry], ChunkKV]  # makes a chunk of an entry, and closes its source once all of it was read


class Store:
    """KV of chunks, by the key that says what they were computed from; threads may share it, forked processes not.

    Chunks are ready to use in `memory`, and behind it in `tiers` that keep bytes, the nearest first. A fault never
    leaves here: it is a miss, counted, and warned of once a minute. A chunk that comes from a farther tier is kept
    in memory, and the bytes that were verified are written to the nearer ones. A chunk that is put goes to every
    tier, and is there when `put` returns.

    On disk a store is one folder:

        objects/<namespace>/<digest>.safetensors   one entry each; names are digests
        index/<namespace>.rows, .ids               a log of what is in them, made again when it is lost
    """

    def __init__(
        self,
        memory: MemoryCache | None = None,
        tiers: Sequence[Tier] = (),
        *,
        namespace: str = "",
        cap_bytes: int | None = None,
        codec: str = "raw",
    ) -> None:
        self.namespace = namespace
        self.format = EntryFormat(codec)
        self.layer_reader: LayerReader = StreamReader(self)
        self.counts = StoreStats()
        self.memory = memory or MemoryCache(0)
        self.memory.stats = self.counts
        self.tiers = tuple(tiers)
        self.capacities: dict[str, Capacity] = {}
        for tier in self.tiers:
            self.capacities[tier.name] = Capacity(tier, self.counts, cap_bytes if tier.is_local else None)
        self._space = hash_namespace(namespace)[:16]
        disk = next((tier for tier in self.tiers if isinstance(tier, DiskTier)), None)
        self.folder = disk.root if disk else None  # on this machine
        path = self.folder / "index" / self._space if self.folder else None
        self.index = ChunkIndex(namespace, path, disk.lock if disk else contextlib.nullcontext)
        self._deletions = 0
        self._pid = os.getpid()
        self._is_listed = False
        self._listed_s: dict[str, float] = {}  # by tier on another machine, the change up to which it is in the index
        for tier in self.tiers:
            self.counts.count("removed", "orphans", tier.remove_orphans())

    # Reading

    def get(self, key: ChunkKey, layout: Layout | None = None) -> ChunkKV | None:
        """Fetch a chunk. Its tensors are shared: never write to them.

        Args:
            key: which chunk.
            layout: of the model that will use it (`hf_blend.model.capture.layout_of`); a chunk of another shape or
                dtype is a miss. None accepts any.

        Returns:
            The chunk exactly as it was stored, or None. A fault is counted, never raised.
        """
        if not self._is_ours(key):
            return None
        chunk = self.memory.get([key], layout).get(key)
        return chunk or self.fetch(key, lambda entry: self.read(entry, layout))

    def at_hand(self, keys: Sequence[ChunkKey], layout: Layout | None = None) -> dict[ChunkKey, ChunkKV]:
        """Fetch those of some chunks that are in memory and can be used from there; `stream` fetches the others."""
        return self.memory.get(keys, layout) if self.layer_reader.uses_memory else {}

    def stream(self, key: ChunkKey, layout: Layout | None = None) -> ChunkKV | None:
        """Fetch a chunk as `get` does, but return before all layers were read.

        Its layers may be `LazyLayers`: a request gives these what computes the chunk after a fault.
        """
        if not self._is_ours(key):
            return None
        return self.layer_reader.stream(key, layout)

    def fetch(self, key: ChunkKey, decode: Decode) -> ChunkKV | None:
        """Ask one tier after the other for a chunk, and count the hit or the miss."""
        reasons = []
        for tier in self.tiers:
            chunk, reason = self.load(tier, key, decode)
            if chunk is not None:
                self.counts.count("hits", tier.name)
                return chunk
            if reason != "absent":
                reasons.append(reason)
        self.counts.count("misses", reasons[0] if reasons else "absent")
        return None

    def load(self, tier: Tier, key: ChunkKey, decode: Decode) -> tuple[ChunkKV | None, str]:
        """Open and decode an entry of one tier; returns a chunk and "", or None and the reason."""
        name, deletions = self.name(key.digest), self._deletions
        with contextlib.ExitStack() as opened:
            try:
                source = tier.open(name)
                if source is None:
                    return None, "absent"
                opened.callback(source.close)
                content: bytearray | None = None
                if self._nearer(tier):  # they receive its bytes
                    content = bytearray(source.stat.nbytes)
                    source.read_into(0, memoryview(content))
                    source.close()
                    source = BytesSource(content, source.stat)
                self.capacities[tier.name].use(name, source.stat)
                chunk = decode(OpenEntry(tier, key, source, deletions, content))
                opened.pop_all()  # now `decode` closes the source
                return chunk, ""
            except (EntryFault, OSError, MemoryError) as fault:
                reason = self.refuse_entry(tier, key, fault)
                return None, reason

    def read(self, entry: OpenEntry, layout: Layout | None) -> ChunkKV:
        """Read all of an entry; nothing of it is used, or written to a nearer tier, before all of it was verified."""
        chunk = self.format.open(entry.source, entry.key, layout).read()
        entry.source.close()
        return self.promote(chunk, entry)

    def promote(self, chunk: ChunkKV, entry: OpenEntry) -> ChunkKV:
        """Keep a chunk that was read and verified in memory, and write its bytes to the nearer tiers."""
        if self._deletions != entry.deletions:
            return chunk
        content = entry.content
        if content is not None:
            for tier in self._nearer(entry.tier):
                self._write(tier, entry.key, lambda: [memoryview(content)])
        return self._cache(chunk)

    def refuse_entry(self, tier: Tier, key: ChunkKey, fault: BaseException) -> str:
        """Count what is wrong with an entry, warn of it, and remove what can never become good; gives the reason."""
        reason = "io" if isinstance(fault, OSError) else "memory"
        if isinstance(fault, EntryFault):
            reason = fault.reason
        self.counts.count("load_failures", f"{tier.name}:{reason}")
        if isinstance(fault, OSError):
            self.counts.warn(tier.name, f"the {tier.name} tier cannot be read now, chunks are computed again: {fault}")
        else:
            self.counts.warn(key.digest, f"stored chunk {key.digest} is not used and will be computed again: {fault}")
        if isinstance(fault, EntryFault) and (fault.corrupt or reason == "kind"):  # our kind needs its name
            self._discard(tier, self.name(key.digest))
        return reason

    # Writing

    def put(self, chunk: ChunkKV) -> ChunkKV:
        """Store a chunk. If a tier fails, the chunk stays in memory and the failure is counted.

        Args:
            chunk: computed alone (`hf_blend.model.capture`); it is copied.

        Returns:
            The chunk as `get` will give it: a codec may round.

        Raises:
            StoreError: the chunk holds NaN or infinity, is malformed, or belongs to another namespace.
        """
        self._refuse_fork()
        key = chunk.key
        if key.namespace != self.namespace:
            raise StoreError(
                f"chunk {key.digest} belongs to another namespace than this store. Open a store with the chunk's "
                "namespace, or compute the chunk for the store's."
            )
        chunk.check()
        copy = chunk.dense_copy()
        packed = self.format.pack(copy)
        for tier in self.tiers:
            self._write(tier, key, lambda: packed.parts)
        self._cache(packed.chunk)
        if self.index.may_be_stale:
            self._list(thorough=True)
        return chunk if packed.chunk is copy else packed.chunk

    def replace(self, tier: Tier, packed: PackedChunk) -> None:
        """Write an entry in one step: a reader, or a process that is killed, finds the old one or the new one."""
        self._write(tier, packed.key, lambda: packed.parts, replaces=True)

    def contains(self, key: ChunkKey) -> bool:
        """Say whether a chunk is there, without reading it: `get` may still find it damaged."""
        return key.namespace == self.namespace and self.tier_of(key) is not None

    def delete(self, key: ChunkKey) -> bool:
        """Remove a chunk from every tier; False if there was none. Raises StoreError if a disk refuses."""
        return key.namespace == self.namespace and bool(self.remove([key.digest]))

    def remove(self, digests: Iterable[str]) -> int:
        """Remove chunks from memory and every tier by their digests, and count them.

        Raises StoreError if a tier refuses.
        """
        self._refuse_fork()
        count = 0
        for digest in digests:
            self._deletions += 1
            removed = [self.memory.delete(digest)]
            try:
                for tier in self.tiers:
                    removed.append(self._delete(tier, self.name(digest)))
            except OSError as error:
                raise StoreError(
                    f"chunk {digest} cannot be removed: {error}. Check who owns the files of the store."
                ) from error
            self.index.drop(digest)
            count += any(removed)
        return count

    def reject(self, key: ChunkKey, reason: str) -> None:
        """Count a chunk that was fetched as a miss after all, and make room for one that is right."""
        self.counts.count("misses", reason)
        with contextlib.suppress(StoreError):
            self.delete(key)

    # Finding

    def find(self, fingerprint: str, chunk_prefix_ids: Sequence[int], token_ids: Sequence[int]) -> list[ChunkSpan]:
        """Find stored chunks inside any tokens, by content and at any offset, also where a few tokens differ.

        A tokenizer makes other tokens where two texts are joined. A chunk of 16 tokens or more is found all the same
        if no more than its first 8 tokens differ; what of it agrees with the prompt is reported. So is the beginning
        of a chunk that is cut off, if it is at least a quarter of it.

        Args:
            fingerprint: of the model.
            chunk_prefix_ids: the tokens before the chunks when they were computed.
            token_ids: for example a whole prompt.

        Returns:
            From left to right, without overlap; of chunks that overlap the longest is whole.
        """
        self._refuse_fork()
        self._list()
        with contextlib.suppress(OSError):
            return self.index.find(fingerprint, chunk_prefix_ids, token_ids, self.contains)
        return []

    def sample(self, fingerprint: str, chunk_prefix_ids: Sequence[int]) -> ChunkKey | None:
        """Give any chunk of a model behind a chunk prefix, for looking at what is stored; None if there is none."""
        self._list()
        digests = self.index.groups().get((fingerprint, tuple(chunk_prefix_ids)), [])
        for digest in reversed(digests):
            listed = self.index.get(digest)
            if listed is not None and self.contains(listed.key):
                return listed.key
        return None

    def longest_prefix(self, fingerprint: str) -> tuple[int, ...]:
        """Give the most tokens that chunks of a fingerprint are behind; empty if there is no such chunk."""
        self._list()
        prefixes = [prefix for name, prefix in self.index.groups() if name == fingerprint]
        return max(prefixes, key=lambda ids: (len(ids), ids), default=())

    def order_of(self, fingerprint: str, documents: Sequence[Sequence[int]]) -> list[int]:
        """Give the numbers of documents, by their ids, in the order that continues a model's longest chain."""
        self._list()
        first = longest_chain(self.index.links(fingerprint), documents)
        return [*first, *(number for number in range(len(documents)) if number not in first)]

    def known(self, fingerprint: str) -> tuple[int, int]:
        """Count the chunks of a model that are known, and those of all models, in the store's namespace."""
        self._list()
        groups = self.index.groups()
        of_model = sum(len(digests) for (name, _), digests in groups.items() if name == fingerprint)
        return of_model, sum(map(len, groups.values()))

    def tier_of(self, key: ChunkKey) -> str | None:
        """Name the nearest tier that has a chunk, "memory" first; None if none has it, or says so now."""
        if self.memory.contains(key.digest):
            return "memory"
        name = self.name(key.digest)
        for tier in self.tiers:
            with contextlib.suppress(OSError):
                if tier.contains(name):
                    return tier.name
        return None

    # Administration

    def entries(self) -> Iterator[EntryInfo]:
        """Walk over what is stored in this namespace, in the order of digests."""
        names = {tier: set(listed) for tier, listed in self._list(thorough=True).items()}
        for digest in self.index.digests():
            listed = self.index.get(digest)
            levels = ["memory"] if self.memory.contains(digest) else []
            levels += [tier.name for tier in self.tiers if self.name(digest) in names[tier.name]]
            if listed is not None and levels:
                key, nbytes, created = listed
                yield EntryInfo(digest, key.fingerprint, len(key.token_ids), nbytes, "+".join(levels), created)

    def check(self, *, repair: bool = False) -> Iterator[EntryCheck]:
        """Read and verify every entry of this namespace; with `repair` damaged ones are removed."""
        for tier in self.tiers:
            try:
                names = sorted(tier.names(f"{self._space}/"))
            except OSError as error:
                self.counts.warn(tier.name, f"the {tier.name} tier cannot be listed now: {error}")
                continue
            for name in names:
                yield self._check_entry(tier, name, repair)

    def collect(self, target_bytes: int | None = None) -> dict[str, int]:
        """Remove leftovers of writers that died, and evict what is above the caps.

        Then evict until no more than `target_bytes` are left in each tier, all namespaces together.
        """
        removed = {"orphans": 0, "freed_bytes": 0}
        for tier in self.tiers:
            removed["orphans"] += tier.remove_orphans()
            with contextlib.suppress(OSError):
                capacity = self.capacities[tier.name]
                limits = [limit for limit in (target_bytes, capacity.cap_bytes) if limit is not None]
                removed["freed_bytes"] += capacity.shrink(min(limits)) if limits else 0
        return removed

    def stats(self) -> dict[str, Any]:
        """Count what happened since opening, and what is there now.

        Returns:
            `hits`, `stored` and `evicted` by tier, `misses` by reason, `load_failures` by tier and reason,
            `store_failures` by error, `removed` by cause (corrupt, orphans), `entries`, and `bytes` and
            `capacity_bytes` by tier; those of the disk are of every namespace.
        """
        stats: dict[str, Any] = {name: self.counts.group(name) for name in _COUNTED}
        stats["entries"] = len(self)
        levels: dict[str, MemoryCache | Capacity] = {"memory": self.memory, **self.capacities}
        stats["bytes"] = {name: level.nbytes for name, level in levels.items()}
        stats["capacity_bytes"] = {name: level.cap_bytes for name, level in levels.items()}
        return stats

    def close(self) -> None:
        """Let go of memory and connections; closing twice is allowed."""
        for tier in self.tiers:
            tier.close()
        self.memory.clear()

    def name(self, digest: str) -> str:
        """Name the entry of a chunk in a tier."""
        return f"{self._space}/{digest}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __bool__(self) -> bool:
        return True  # an empty store is a store: `store or other` must not drop it

    def __len__(self) -> int:
        digests = set(self.memory.digests())
        for tier in self.tiers:
            with contextlib.suppress(OSError):
                digests.update(name[-64:] for name in tier.names(f"{self._space}/"))
        return len(digests)

    def _refuse_fork(self) -> None:
        if os.getpid() != self._pid:
            raise StoreError(
                f"this store was opened by process {self._pid}, and {os.getpid()} is a fork of it: its locks and "
                "connections stay with the first. Open the store again in this process."
            )

    def _is_ours(self, key: ChunkKey) -> bool:
        self._refuse_fork()
        if key.namespace == self.namespace:
            return True
        self.counts.count("misses", "namespace")
        return False

    def _nearer(self, tier: Tier) -> list[Tier]:
        """Give the tiers on this machine that receive what was read from a farther one."""
        return [other for other in self.tiers[: self.tiers.index(tier)] if other.is_local]

    def _cache(self, chunk: ChunkKV) -> ChunkKV:
        """Keep a chunk in memory where there is room for it; returns it as it is kept."""
        if not self.memory.cap_bytes:
            return chunk
        try:
            chunk = self.memory.put(chunk)
        except (RuntimeError, MemoryError) as error:  # there is no room for the copy
            self.counts.count("store_failures", type(error).__name__)
            self.counts.warn("memory", f"chunks cannot be kept in memory ({error})")
            return chunk
        self.index.add([Listed(chunk.key, chunk.nbytes, time.time())])
        return chunk

    def _write(
        self, tier: Tier, key: ChunkKey, parts: Callable[[], Sequence[memoryview]], *, replaces: bool = False
    ) -> None:
        """Write an entry to a tier unless it is there, and list it."""
        name = self.name(key.digest)
        try:
            if replaces or not tier.contains(name):
                self._put(tier, key, parts())
                self.counts.count("stored", tier.name)
            elif key.digest not in self.index and (stat := tier.stat(name)):
                self.index.add([Listed(key, stat.nbytes, stat.created)])
        except (OSError, MemoryError, EntryFault) as error:
            reason = errno.errorcode.get(getattr(error, "errno", None) or 0, type(error).__name__)
            self.counts.count("store_failures", reason)
            text = f"chunks cannot be stored in the {tier.name} tier ({error}); other tiers may have them"
            self.counts.warn(f"writing to {tier.name}", text)

    def _put(self, tier: Tier, key: ChunkKey, parts: Sequence[memoryview]) -> None:
        """Make room, then write; on a full device once more, after as much was evicted as is needed."""
        capacity, nbytes = self.capacities[tier.name], sum(map(len, parts))
        name = self.name(key.digest)
        with capacity.room(nbytes):
            self.index.add([Listed(key, nbytes, time.time())])  # first: no entry is without a row
            try:
                tier.put(name, parts)
            except OSError as error:
                if error.errno not in _FULL or not capacity.shrink(max(0, capacity.nbytes - 2 * nbytes)):
                    raise
                tier.put(name, parts)
            self.index.touch()

    def _delete(self, tier: Tier, name: str) -> bool:
        stat = tier.stat(name) if tier.is_local else None
        removed = tier.delete(name)
        if removed:
            self.index.touch()
            self.capacities[tier.name].removed(stat.nbytes if stat else 0)
        return removed

    def _discard(self, tier: Tier, name: str) -> bool:
        """Remove a damaged entry. If another process has replaced it by a good one, that is computed again."""
        removed = False
        with contextlib.suppress(OSError):
            removed = self._delete(tier, name)
            self.counts.count("removed", "corrupt", int(removed))
        return removed

    def _check_entry(self, tier: Tier, name: str, repair: bool) -> EntryCheck:
        source: Source | None = None
        digest = name[-64:]
        try:
            source = tier.open(name)
            if source is None:
                return EntryCheck(digest, tier.name, 0, "absent")
            key = self._read_key(name, source)
            self.format.open(source, key, None).read()
            return EntryCheck(digest, tier.name, source.stat.nbytes)
        except EntryFault as fault:
            removed = repair and fault.corrupt and self._discard(tier, name)
            return EntryCheck(digest, tier.name, source.stat.nbytes if source else 0, fault.reason, removed)
        except (OSError, MemoryError) as error:
            return EntryCheck(digest, tier.name, 0, type(error).__name__)
        finally:
            if source is not None:
                source.close()

    def _read_key(self, name: str, source: Source) -> ChunkKey:
        """Read which chunk an entry holds, and refuse one that has another name."""
        key = read_key(source, self.namespace, self.format.kinds)
        if self.name(key.digest) != name:
            raise EntryFault("key", f"it is {key.digest}")
        return key

    def _list(self, thorough: bool = False) -> dict[str, list[str]]:
        """Bring the index in step with the tiers, and give the names that were listed, by tier.

        Other processes append to the log what they put. So a tier on this machine is listed only if the log is
        another one than before, or is older than the tier's last change; a tier on another machine, which has no log,
        if it was asked again since. With `thorough` all are listed.
        """
        is_current = self._is_log_current()
        names: dict[str, list[str]] = {tier.name: [] for tier in self.tiers}
        is_complete = True
        for tier in self.tiers:
            try:
                asked_s = 0.0 if tier.is_local else tier.changed_s(f"{self._space}/")
                is_known = tier.is_local or self._listed_s.get(tier.name) == asked_s
                if is_current and is_known and not thorough:
                    continue
                names[tier.name] = list(tier.names(f"{self._space}/"))
                most_s = math.inf if tier.is_local or thorough else _LIST_S
                if self._add_unknown(tier, names[tier.name], most_s):
                    self._listed_s[tier.name] = asked_s
            except OSError as error:
                is_complete = False
                logger.info("the %s tier cannot be listed now (%s)", tier.name, error)

        # Forget what no tier has any more
        if is_complete and (thorough or not is_current):
            kept = [name[-64:] for listed in names.values() for name in listed]
            kept += self.memory.digests()
            with contextlib.suppress(OSError):
                self.index.keep_only(kept)
                self.index.touch()
        self._is_listed = self._is_listed or is_complete
        return names

    def _is_log_current(self) -> bool:
        """Read what others appended to the log; say whether it has all that is in the tiers on this machine."""
        try:
            is_same = self.index.refresh()
            changes_s = [tier.changed_s(f"{self._space}/") for tier in self.tiers if tier.is_local]
        except OSError:
            return self._is_listed
        return is_same and (self._is_listed or self.index.is_current(max(changes_s, default=0.0)))

    def _add_unknown(self, tier: Tier, names: list[str], most_s: float) -> bool:
        """Add entries to the index whose chunks are not known, from their headers; skip those that cannot be read.

        False if the time was over before all were read.
        """
        is_over = False
        until_s = time.monotonic() + most_s
        page: list[Listed] = []
        for digest in sorted(self.index.unknown([name[-64:] for name in names])):
            name = self.name(digest)
            if time.monotonic() > until_s:
                is_over = True
                break
            try:
                source = tier.open(name)
                if source is None:
                    continue
                with contextlib.closing(source):
                    page.append(Listed(self._read_key(name, source), source.stat.nbytes, source.stat.created))
            except EntryFault as fault:
                logger.info("%s is not listed (%s)", name, fault)
            except OSError as error:
                logger.info("%s cannot be read now (%s)", name, error)
            if len(page) == _PAGE:
                self.index.add(page)
                page = []
        self.index.add(page)
        return not is_over
