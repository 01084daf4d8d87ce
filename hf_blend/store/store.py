# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A store of chunk KV in memory and in tiers that keep bytes, verified on every load. It knows no model.

A fault costs time, never correctness: whatever is missing, damaged, foreign or unreadable is a miss with a reason.
"""

import contextlib
import errno
import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self
from weakref import WeakValueDictionary, finalize

from torch import Tensor

from ..errors import StoreError
from .budget import BoundedTier
from .catalog import Catalog, owner_of
from .chunk import ChunkKey, ChunkKV, Found, Layout
from .content import unpack_tokens
from .entry import EntryReader, encode_entry, read_key, stored_as
from .guard import Guard
from .importance import TokenImportance
from .memory import MemoryCache
from .opening import Limits
from .seal import check_secret
from .slow import ComputeTimes, LateLoads, RecordedSource, WriteQueue
from .stats import StoreStats
from .stream import StreamedLayers
from .tiers.base import EntryFault, ObjectStat, Source, Tier

__all__ = ["BaseStore", "CheckResult", "EntryInfo", "Recompute"]

Encoded = Callable[[], Sequence[memoryview]]  # the bytes of an entry, made when they are needed
Take = Callable[[BoundedTier, ChunkKey, Source], ChunkKV]  # makes a chunk of an opened entry, and closes it
Recompute = Callable[[], ChunkKV]
READ_BYTES = 1 << 20  # layers that are smaller come several at a time: each read stops the thread that computes
READ_S = 4e-3  # but from a slow tier no more at a time than come in so many seconds: the model waits for the first
FLUSH_S = 30.0
DELETE_S = 60.0  # how long a delete waits for a write of the same chunk that is under way
_COUNTED = (
    *("hits", "misses", "loaded_bytes", "load_failures", "stored", "store_failures", "dropped_writes", "evicted"),
    *("removed", "skipped"),
)
_TIMED = ("load_seconds", "store_seconds")


class PendingWrite(NamedTuple):
    """An entry that is not written yet."""

    chunk: ChunkKV
    parts: Sequence[memoryview]
    guard: Guard  # notices what is written to the chunk while it waits


@dataclass(frozen=True)
class EntryInfo:
    """One stored chunk, for lists."""

    digest: str
    fingerprint: str
    tokens: int
    nbytes: int
    tier: str
    created: float
    pinned: bool = False


@dataclass(frozen=True)
class CheckResult:
    """What a check of one entry found."""

    digest: str
    tier: str
    nbytes: int
    reason: str = ""
    removed: bool = False


class BaseStore:
    """KV of chunks by what they were computed from; threads may share it.

    Chunks are ready to use in `memories`, and behind them in `tiers` that keep bytes, the nearest first. A fault never
    leaves here: it is a miss, counted, and warned of once. A chunk that comes from a farther tier is taken into
    memory, and the bytes that were verified are written to the nearer ones. A chunk that is put goes to every tier:
    when `put` returns, it is in those on this machine, and in the queue of the others. What is in a queue is found
    there.

    `index` is a folder for copies of the index and of the order of eviction. The secret signs entries, hides their
    names, and refuses what is not signed with it.
    """

    loads_in_part = False  # True where each request loads only the part of a chunk that matters to it
    reads_importance = False  # True where a tier reads which tokens were important (`note`, `record_importance`)
    patience_s = 10.0  # for a layer that a request waits for

    def __init__(
        self,
        memories: Sequence[MemoryCache],
        tiers: Sequence[Tier] = (),
        *,
        namespace: str = "",
        index: Path | None = None,
        limits: Limits = Limits(),  # noqa: B008 (frozen)
        secret: bytes | None = None,
        codec: str = "raw",
    ) -> None:
        self.namespace = namespace
        # layers that a request reads ahead of their use; 0 reads chunks whole before it begins. Without a bound by
        # default: what was read is held until the request ends, and the first layers, all tokens' own, hide the most
        self.pipeline_depth: float = math.inf
        self.controller: Any = None  # a `LoadingController` decides for each request what is worth loading
        self.ttl_s = limits.ttl_s
        self.secret = check_secret(secret)
        self._codec = codec
        self._stats = StoreStats()
        self._memories = tuple(memories)
        owner, folder = owner_of(secret, namespace), index.parent if index else None
        self.importance = TokenImportance(index / f"{owner}.importance" if index else None, secret)
        skipped = partial(self._stats.count, "skipped")
        self._tiers = tuple(limits.bound(tier, folder, owner, skipped) for tier in tiers)
        for one in (*self._memories, *self._tiers):
            one.stats = self._stats
            self.reads_importance |= one.policy.reads_importance
        queued = self._tiers if limits.queue_bytes else ()
        self._queues = {tier.name: self._new_queue(tier, limits.queue_bytes) for tier in queued}
        self._at_hand: tuple[MemoryCache | WriteQueue[PendingWrite], ...]  # where a chunk is found without reading
        self._at_hand = (*self._memories, *self._queues.values())
        at_hand = [one.index for one in self._at_hand]
        self._catalog = Catalog(namespace, self._tiers, at_hand, secret=secret, stats=self._stats)
        self._compute_times, self._late = ComputeTimes(), LateLoads()
        self._deleted = 0  # deletes so far: what was read before one is not stored after it
        self._flying: WeakValueDictionary[str, ChunkKV] = WeakValueDictionary()  # being read; two requests share it
        for tier in tiers:
            self._stats.count("removed", "orphans", tier.remove_orphans())

    def get(self, key: ChunkKey, budget_s: float = math.inf, layout: Layout | None = None) -> ChunkKV | None:
        """Fetch a chunk. Its tensors are shared: never write to them. One that was written to is not handed out again.

        Args:
            key: which chunk.
            budget_s: how long a tier on another machine is waited for, in seconds. A chunk that takes longer is a miss
                (reason "slow"), and is in memory later.
            layout: of the model that will use it (`hf_blend.prefill.layout.layout_of`); a chunk of another shape or
                dtype is a miss. None takes the entry at its word.

        Returns:
            The chunk exactly as it was stored, or None; a fault never raises, it is counted and is a miss.
        """
        if key.namespace != self.namespace:
            self._stats.count("misses", "namespace")
            return None
        return self._ready(key, layout) or self._fetch(key, partial(self._read, layout=layout), budget_s)

    def at_hand(self, keys: Sequence[ChunkKey], layout: Layout | None = None) -> dict[ChunkKey, ChunkKV]:
        """Fetch those of some chunks that are ready to use in memory; the others are for `stream`."""
        chunks: dict[ChunkKey, ChunkKV] = {}
        for memory in self._memories:
            chunks |= memory.get([key for key in keys if key not in chunks] if chunks else keys, layout)
        return chunks

    def stream(
        self, key: ChunkKey, recompute: Recompute, budget_s: float | None = None, layout: Layout | None = None
    ) -> ChunkKV | None:
        """Fetch a chunk as `get` does; its layers may still be on their way, and after a fault it is recomputed.

        A tier on another machine is waited for as long as computing the chunk takes, as far as `timed` blocks of the
        same model have shown, or for `budget_s`.
        """
        budget_s = self._compute_times.expect_s(key) if budget_s is None else budget_s
        if key.namespace != self.namespace or not self.pipeline_depth:
            return self.get(key, budget_s, layout)
        flying = self._flying.get(key.digest)
        if flying is not None and flying.key == key and flying.fits(layout):
            return flying
        if ready := self._ready(key, layout):
            return ready
        open_stream = partial(StreamingRead, self, recompute=recompute, layout=layout)
        stop_s = time.monotonic() + budget_s
        chunk = self._fetch(key, lambda *opened: open_stream(*opened).start(stop_s), budget_s)
        if chunk is not None and type(chunk.layers) is StreamedLayers:
            self._flying[key.digest] = chunk
        return chunk

    def timed(self, *keys: ChunkKey) -> contextlib.AbstractContextManager[None]:
        """Measure a block that computes and puts missing chunks: later requests wait no longer than that for one."""
        return self._compute_times.timed(*keys)

    def put(self, chunk: ChunkKV) -> ChunkKV:
        """Store a chunk. If the disk fails, the chunk stays in memory and the failure is counted.

        When this returns, the chunk is in memory and on disk, and waits in a queue for a tier on another machine
        (`flush`); `get` finds it from now on.

        Args:
            chunk: computed alone (`hf_blend.model.capture`); it is copied.

        Returns:
            The chunk as `get` will give it: a codec may round.

        Raises:
            StoreError: the chunk holds NaN or infinity, is malformed, or belongs to another namespace.
        """
        return self._put(chunk)

    def _put(self, chunk: ChunkKV, wait_s: float = 0.0) -> ChunkKV:
        """Take a chunk into memory, and write it to every tier or into its queue, which is waited for."""
        key = chunk.key
        if key.namespace != self.namespace:
            raise StoreError(
                f"chunk {key.digest} belongs to another namespace than this store. Open a store with the chunk's "
                "namespace, or compute the chunk for the store's."
            )
        chunk.check()
        here = (memory.peek(key.digest) for memory in self._memories if memory.device is None)
        mine = next((one for one in here if one and one.key == key), None) or chunk.own_copy()
        stored = stored_as(mine, self._codec)
        self._hold(stored)
        encoded = functools.cache(partial(self._encode, mine))
        for tier in self._tiers:
            if tier.is_local:
                self._write(tier, stored, encoded)
            else:
                self._send(tier, stored, encoded, wait_s)
        return chunk if stored is mine else stored

    def find(self, fingerprint: str, chunk_prefix_ids: Sequence[int], token_ids: Sequence[int]) -> list[Found]:
        """Find stored chunks inside any tokens, by content and at any offset, also where a few tokens differ.

        A tokenizer makes other tokens where two texts are joined. A chunk of 16 tokens or more is found all the same
        if no more than its first 8 tokens differ; what of it agrees with the prompt is reported. So is the beginning
        of a chunk that is cut off, if it is at least a quarter of it.

        Args:
            fingerprint: of the model.
            chunk_prefix_ids: tokens that stood before the chunks when they were computed.
            token_ids: for example a whole prompt.

        Returns:
            From left to right, without overlap; of chunks that overlap the longest is whole.
        """
        sink, runs = tuple(chunk_prefix_ids), self._catalog.match(fingerprint, chunk_prefix_ids, token_ids)
        keys = (ChunkKey(fingerprint, sink, unpack_tokens(run.packed), self.namespace) for run in runs)
        return [Found(run.start, key, run.first, run.tokens) for run, key in zip(runs, keys, strict=True)]

    def sample(self, fingerprint: str, chunk_prefix_ids: Sequence[int]) -> ChunkKey | None:
        """Give any chunk of a model behind a sink, for looking at what is stored; None if there is none."""
        packed = self._catalog.sample(fingerprint, chunk_prefix_ids)
        return (
            ChunkKey(fingerprint, tuple(chunk_prefix_ids), unpack_tokens(packed), self.namespace) if packed else None
        )

    def longest_prefix(self, fingerprint: str) -> tuple[int, ...]:
        """Give the most tokens that chunks of a fingerprint are behind; empty if there is no such chunk."""
        prefixes = map(unpack_tokens, self._catalog.prefixes(fingerprint))
        return max(prefixes, key=lambda ids: (len(ids), ids), default=())

    def counts(self, fingerprint: str) -> tuple[int, int]:
        """Count the chunks of a model that are known, and those of all models, in the store's namespace."""
        return self._catalog.counts(fingerprint)

    def contains(self, key: ChunkKey) -> bool:
        """Say whether a chunk is there, without reading it: `get` may still find it damaged."""
        return key.namespace == self.namespace and self.tier_of(key) is not None

    def delete(self, key: ChunkKey) -> bool:
        """Remove a chunk from every tier.

        Args:
            key: which chunk.

        Returns:
            False if there was nothing to remove.

        Raises:
            StoreError: the disk refuses.
        """
        if key.namespace != self.namespace:
            return False
        return bool(self.remove([key.digest]))

    def reject(self, key: ChunkKey, reason: str) -> None:
        """Count a chunk that was fetched as a miss after all, and make room for one that is right."""
        self._stats.count("misses", reason)
        with contextlib.suppress(StoreError):
            self.delete(key)

    def note(self, key: ChunkKey, scores: Tensor, important_ratio: float) -> None:
        """Say how much attention a chunk's tokens got in a request; kept as a moving average, over restarts too.

        Shapes: scores `[tokens]`, as multiples of what a stored token of the prompt got on average.
        """
        self.importance.note(key.digest, scores, min(1.0, max(0.0, important_ratio)))
        self.record_importance(key, important_ratio)

    def record_importance(self, key: ChunkKey, important_ratio: float) -> None:
        """Say which share of a chunk's tokens turned out to be important, for the policy "importance"."""
        important_ratio = min(1.0, max(0.0, important_ratio))
        for memory in self._memories:
            memory.use(key.digest, important_ratio)
        for tier in self._tiers:
            tier.use(self._catalog.name(key.digest), important_ratio)

    def protect(self, keys: Iterable[ChunkKey], owner: object) -> Callable[[], object]:
        """Keep the chunks of a request from being evicted from memory while it runs.

        Memory that is smaller than the request then holds its first chunks, and a further request finds them. Without
        it each chunk would push out the one that the next request asks for first.
        """
        digests = [key.digest for key in keys]
        protected = contextlib.ExitStack()
        for memory in self._memories:
            memory.protect(digests)
            protected.callback(memory.release, digests)
        release = finalize(owner, protected.close)
        release.atexit = False
        return release

    def pin(self, key: ChunkKey) -> None:
        """Keep a chunk from being evicted, also after a restart if it is on disk; it still counts against caps."""
        self.set_pins([key.digest], True)

    def unpin(self, key: ChunkKey) -> None:
        """Let a chunk be evicted again; arguments and errors as in `pin`."""
        self.set_pins([key.digest], False)

    def set_pins(self, digests: Iterable[str], pinned: bool) -> None:
        """Pin chunks, or let them go, by their digests."""
        for digest in digests:
            try:
                for memory in self._memories:
                    memory.set_pin(digest, pinned)
                for tier in self._tiers:
                    tier.set_pin(self._catalog.name(digest), pinned)
            except OSError as error:
                raise _refused(f"the pin of chunk {digest} cannot be noted", error) from error

    def flush(self, wait_s: float = FLUSH_S) -> bool:
        """Wait until what was put is written to every tier, or was refused by it; False if something still waits."""
        stop_s = time.monotonic() + wait_s
        return all(queue.flush(max(0.0, stop_s - time.monotonic())) for queue in self._queues.values())

    def remove(self, digests: Iterable[str]) -> int:
        """Remove chunks from every queue and tier by their digests, and count them.

        Raises StoreError if a tier refuses, or takes too long to write a chunk.
        """
        count = 0
        for digest in digests:
            self._deleted += 1
            try:
                removed = [queue.cancel(digest, DELETE_S) for queue in self._queues.values()]
                removed += [tier.delete(self._catalog.name(digest)) for tier in self._tiers]
                removed += [memory.delete(digest) for memory in self._memories]
            except OSError as error:
                raise _refused(f"chunk {digest} cannot be removed", error) from error
            count += any(removed)
        return count

    def check(self, *, repair: bool = False) -> Iterator[CheckResult]:
        """Read and verify every entry of this namespace; with `repair` what can never become good is removed."""
        self.flush()
        for tier in self._tiers:
            for name in self._catalog.names(tier):
                yield self._verify(tier, name, repair)

    def collect(self, target_bytes: int | None = None) -> dict[str, int]:
        """Remove what writers that are gone left behind, what is too old, and what is above the caps.

        Then evict until no more than `target_bytes` are left in each tier, all namespaces together.
        """
        counts = {"orphans": 0, "expired": 0, "freed_bytes": 0}
        self.flush()
        for tier in self._tiers:
            counts["orphans"] += tier.remove_orphans()
            self._catalog.refresh(thorough=True)
            for name in list(tier.index.owned(self._catalog.owner)):
                with contextlib.suppress(OSError):
                    is_old = self._is_old(tier.stat(name))
                    counts["expired"] += is_old and self._remove(tier, name, None, "expired")
            limits = [value for value in (target_bytes, tier.cap_bytes) if value is not None]
            counts["freed_bytes"] += tier.shrink(min(limits)) if limits else 0
        return counts

    def tiers(self) -> list[Tier]:
        """The tiers that keep bytes, the nearest first."""
        return [bounded.tier for bounded in self._tiers]

    def tier_of(self, key: ChunkKey) -> str | None:
        """Name the nearest tier that has a chunk; None if none has it, or says so now."""
        for memory in self._at_hand:
            if memory.contains(key.digest):
                return memory.name
        for tier in self._tiers:
            with contextlib.suppress(OSError):
                if tier.contains(self._catalog.name(key.digest)):
                    return tier.name
        return None

    def loader(self, cache: Any) -> Any:
        """What loads chunks in part for the request of a cache; None where they are loaded whole."""
        return None

    def entries(self) -> Iterator[EntryInfo]:
        """Walk over what is stored in this namespace, in the order of digests."""
        pins = {name for tier in self._tiers for name in tier.pins()}
        for digest, record in self._catalog.items().items():
            names = [memory.name for memory in self._at_hand if memory.contains(digest)]
            yield EntryInfo(
                digest,
                record.key.fingerprint,
                len(record.key.token_ids),
                record.nbytes,
                "+".join([*names, *record.tiers]),
                record.created,
                self._catalog.name(digest) in pins,
            )

    def stats(self) -> dict[str, Any]:
        """Count what happened since opening, and what is held now.

        Returns:
            `hits`, `stored`, `evicted` and `loaded_bytes` (of K and V that were read) by tier, `misses` by reason,
            `load_failures` by tier and reason, `store_failures` by error, `dropped_writes` by tier and reason (full,
            closed, exit, thread, changed), `removed` by cause (corrupt, expired, orphans), `skipped` by tier (or
            index, order) and reason: what listing passed over, `seconds` by stage and tier, `entries`, and `bytes`,
            `pinned_bytes` and `capacity_bytes` by tier; those of the disk hold every namespace; `queued_bytes` by
            tier: what waits to be written; `healthy` by tier: whether it answers.
        """
        tiers: list[Any] = [*self._memories, *self._tiers]
        return {
            **{group: self._stats.group(group) for group in _COUNTED},
            "seconds": {stage: seconds for stage in _TIMED if (seconds := self._stats.group(stage))},
            "entries": len(self._catalog),
            "bytes": {tier.name: tier.nbytes for tier in tiers},
            "pinned_bytes": {tier.name: tier.pinned_bytes for tier in tiers},
            "capacity_bytes": {tier.name: tier.cap_bytes for tier in tiers},
            "queued_bytes": {name: queue.nbytes for name, queue in self._queues.items()},
            "healthy": {tier.name: tier.is_healthy for tier in self._tiers},
        }

    def traffic(self) -> dict[str, tuple[int, float]]:
        """Bytes of K and V that were read since opening, and the seconds that took, by tier."""
        seconds = self._stats.group("load_seconds")
        return {tier: (nbytes, seconds.get(tier, 0.0)) for tier, nbytes in self._stats.group("loaded_bytes").items()}

    def close(self) -> None:
        """Flush for 30 s at most, save the index, and let go of memory and connections; closing twice is allowed."""
        if not self.flush(FLUSH_S):
            for queue in self._queues.values():
                queue.clear("closed")
        for tier in self._tiers:
            tier.close()
        for memory in self._memories:
            memory.clear()
        self.importance.save()

    def _verify(self, tier: BoundedTier, name: str, repair: bool) -> CheckResult:
        source, digest = None, self._catalog.digest(name)
        with contextlib.ExitStack() as opened:
            try:
                source = tier.tier.open(name)
                if source is None:
                    return CheckResult(digest, tier.name, 0, "absent")
                opened.callback(source.close)
                return CheckResult(self._verified(name, source).digest, tier.name, source.stat.nbytes)
            except EntryFault as fault:
                removed = repair and fault.corrupt and self._remove(tier, name, source, "corrupt")
                return CheckResult(digest, tier.name, source.stat.nbytes if source else 0, fault.reason, removed)
            except (OSError, MemoryError) as error:
                return CheckResult(digest, tier.name, 0, type(error).__name__)

    def _is_old(self, stat: ObjectStat | None) -> bool:
        """Return True for an entry that is too old; one from the future is as old as it is far off: clocks differ."""
        return self.ttl_s is not None and stat is not None and abs(time.time() - stat.created) > self.ttl_s

    def _store_read(self, chunk: ChunkKV, tier: BoundedTier, source: Source, deleted: int) -> ChunkKV:
        """Take a chunk that was read into memory, and write the verified bytes to the nearer tiers of this machine."""
        if deleted != self._deleted:
            return chunk
        cached = self._hold(chunk)
        content = source.release() if isinstance(source, RecordedSource) else None
        if content is not None:
            for other in self._nearer(tier):
                self._send(other, chunk, lambda: [content])
        return cached

    def _refuse(self, tier: BoundedTier, key: ChunkKey, source: Source | None, fault: BaseException) -> str:
        """Count what was wrong with an entry, warn of it once, and remove what can never become good.

        What is not sealed as this store seals (reason secret) goes too: it is under a name that only a holder of the
        store's secret can compute, or, without a secret, that no signed entry has.
        """
        reason = fault.reason if isinstance(fault, EntryFault) else type(fault).__name__
        self._stats.count("load_failures", f"{tier.name}:{reason}")
        self._stats.warn_once(f"stored chunk {key.digest} is not used and will be computed again: {fault}")
        if isinstance(fault, EntryFault) and (fault.corrupt or reason == "secret"):
            cause = "expired" if reason == "expired" else "corrupt"
            self._remove(tier, self._catalog.name(key.digest), source, cause)
        return reason

    def _ready(self, key: ChunkKey, layout: Layout | None) -> ChunkKV | None:
        """Find a chunk in memory, or on its way to a tier."""
        if cached := BaseStore.at_hand(self, (key,), layout).get(key):
            return cached
        for queue in self._queues.values():
            waits = queue.get(key.digest)
            if waits and waits.chunk.key == key and waits.chunk.fits(layout) and waits.guard.is_intact():
                self._stats.count("hits", "queue")
                return waits.chunk
        return None

    def _fetch(self, key: ChunkKey, take: Take, budget_s: float) -> ChunkKV | None:
        """Ask the tiers that keep bytes, and count the hit or the miss."""
        reasons = []
        for tier in self._tiers:
            if tier.is_local or math.isinf(budget_s):
                loaded = self._load(tier, key, take)
            else:
                loaded = self._late.run(partial(self._load, tier, key, take), budget_s) or (None, "slow")
            chunk, reason = loaded
            if chunk is not None:
                self._stats.count("hits", tier.name)
                return chunk
            if reason == "slow":
                self._stats.count("load_failures", f"{tier.name}:slow")
                self._stats.warn_once(
                    f"chunks of the {tier.name} tier are computed where that is faster than loading them"
                )
            reasons.append(reason)
        self._stats.count("misses", next((reason for reason in reasons if reason != "absent"), "absent"))
        return None

    def _hold(self, chunk: ChunkKV) -> ChunkKV:
        """Take a chunk into memory where there is room for it; gives it as the nearest memory has it."""
        digest = chunk.key.digest
        for memory in self._memories:
            try:
                memory.put(chunk)
                if memory.policy.reads_importance and (share := self.importance.share(digest)) is not None:
                    memory.use(digest, share)
            except (RuntimeError, MemoryError) as error:  # of a device that is full
                self._stats.count("store_failures", type(error).__name__)
                self._stats.warn_once(f"chunks cannot be held in the {memory.name} tier ({error})")
        return next((cached for cached in (memory.peek(digest) for memory in self._memories) if cached), chunk)

    def _new_queue(self, tier: BoundedTier, queue_bytes: int) -> WriteQueue[PendingWrite]:
        def write(pending: PendingWrite) -> None:
            if not pending.guard.is_intact():
                return drop("changed")
            self._write(tier, pending.chunk, lambda: pending.parts)

        def drop(reason: str) -> None:
            self._stats.count("dropped_writes", f"{tier.name}:{reason}")
            self._stats.warn_once(f"chunks are not written to the {tier.name} tier ({reason}); see dropped_writes")

        return WriteQueue(queue_bytes, write, drop)

    def _send(self, tier: BoundedTier, chunk: ChunkKV, encoded: Encoded, wait_s: float = 0.0) -> None:
        """Queue an entry for a tier, or write it now if there are no queues.

        Its digests are computed now: what is written to the tensors while they wait is noticed when they are read.
        """
        if not self._queues:
            return self._write(tier, chunk, encoded)
        try:
            digest, parts = chunk.key.digest, encoded()
            nbytes, guard = sum(map(len, parts)), Guard(tensor for _, tensor in chunk.named_tensors())
            self._queues[tier.name].put(digest, PendingWrite(chunk, parts, guard), nbytes, wait_s, chunk.key)
        except (OSError, MemoryError) as error:
            self._refuse_write(tier, error)

    def _write(self, tier: BoundedTier, chunk: ChunkKV, encoded: Encoded) -> None:
        """Write an entry to a tier, and take it up in the catalog."""
        name = self._catalog.name(chunk.key.digest)
        try:
            if not tier.contains(name):
                with self._stats.timed("store_seconds", tier.name):
                    stored = tier.put_if_absent(name, encoded())
                self._stats.count("stored", tier.name, int(stored))
                if tier.policy.reads_importance and (share := self.importance.share(chunk.key.digest)) is not None:
                    tier.use(name, share)
            self._catalog.add(tier, chunk.key)
        except (OSError, MemoryError, EntryFault) as error:
            self._refuse_write(tier, error)

    def _refuse_write(self, tier: BoundedTier, error: Exception) -> None:
        reason = errno.errorcode.get(getattr(error, "errno", None) or 0, type(error).__name__)
        self._stats.count("store_failures", reason)
        self._stats.warn_once(f"chunks cannot be stored in the {tier.name} tier ({error}); other tiers may have them")

    def _nearer(self, tier: BoundedTier) -> list[BoundedTier]:
        """The tiers that will have what was read from one."""
        return [other for other in self._tiers[: self._tiers.index(tier)] if other.is_local]

    def _load(self, tier: BoundedTier, key: ChunkKey, take: Take) -> tuple[ChunkKV | None, str]:
        """Give a chunk and "", or None and why not; bytes are recorded if nearer tiers will have them too."""
        name = self._catalog.name(key.digest)
        with self._stats.timed("load_seconds", tier.name), contextlib.ExitStack() as opened:
            source: Source | None = None
            try:
                source = tier.open(name)
                if source is None:
                    tier.forget(name)
                    return None, "absent"
                if self._nearer(tier):
                    with contextlib.suppress(MemoryError):
                        source = RecordedSource(source)
                opened.callback(source.close)
                if self._is_old(source.stat):
                    raise EntryFault("expired", f"it was stored more than {self.ttl_s} s ago")
                chunk = take(tier, key, source)
                opened.pop_all()
                return chunk, ""
            except (EntryFault, OSError, MemoryError) as fault:
                self._refuse(tier, key, source, fault)
                reason = "io" if isinstance(fault, OSError) else "memory"
                return None, fault.reason if isinstance(fault, EntryFault) else reason

    def _read(self, tier: BoundedTier, key: ChunkKey, source: Source, *, layout: Layout | None) -> ChunkKV:
        """Nothing that is read is used, or written to a nearer tier, before all of it was checked."""
        deleted, reader = self._deleted, EntryReader(source, key, self.secret, layout)
        with contextlib.ExitStack() as reserved:
            for memory in self._memories[-1:]:
                reserved.enter_context(memory.reserve(reader.nbytes))
            chunk = reader.read()
        self._stats.count("loaded_bytes", tier.name, chunk.nbytes)
        stored = self._store_read(chunk, tier, source, deleted)
        source.close()
        return stored

    def _verified(self, name: str, source: Source) -> ChunkKey:
        """Read all of an entry that should have a name; gives its key, or raises what is wrong."""
        key = read_key(source, self.namespace, self.secret)
        if self._catalog.name(key.digest) != name:
            raise EntryFault("key", f"it is {key.digest}")
        EntryReader(source, key, self.secret).read()
        return key

    def _remove(self, tier: BoundedTier, name: str, source: Source | None, cause: str) -> bool:
        """Make room for a good entry, unless another process already put one there."""
        removed = False
        with contextlib.suppress(OSError):
            removed = tier.delete(name, source)
            self._stats.count("removed", cause, int(removed))
        return removed

    def _is_held(self, digest: str) -> bool:
        return any(memory.contains(digest) for memory in self._at_hand)

    def _encode(self, chunk: ChunkKV) -> Sequence[memoryview]:
        return encode_entry(chunk, self.secret, self._codec)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __bool__(self) -> bool:
        return True  # an empty store is a store: `store or other` must not drop it

    def __len__(self) -> int:
        return len(self._catalog)


def _refused(what: str, error: OSError) -> StoreError:
    return StoreError(f"{what}: {error}. Check who owns the files of the store.")


class StreamingRead:
    """An entry that is read layer by layer while a request computes; its file stays open until the last."""

    def __init__(
        self,
        store: BaseStore,
        tier: BoundedTier,
        key: ChunkKey,
        source: Source,
        *,
        recompute: Recompute,
        layout: Layout | None,
    ) -> None:
        self._store, self._tier, self._source, self._recompute = store, tier, source, recompute
        self._deleted, self._reader = store._deleted, EntryReader(source, key, store.secret, layout)
        self._tables = self._reader.tables()
        self._guards = [Guard(tensor for pair in self._tables for tensor in pair)]  # used before all of it is stored
        self._least_bytes = 0 if tier.is_local else READ_BYTES  # what is far away costs a round trip for each read

    def start(self, stop_s: float) -> ChunkKV:
        """Give the chunk, whose layers are read when they are needed, and waited for until some time at most."""
        patience_s = self._store.patience_s
        budget_s = math.inf if self._tier.is_local else max(0.0, stop_s - time.monotonic())
        layers = StreamedLayers(
            len(self._reader.layer_table), self._read, self._replace, self._complete, patience_s, budget_s
        )
        finalize(layers, self._source.close).atexit = False  # also after a fault, or where a request ended early
        return self._reader.chunk(layers, self._tables)

    def _read(self, index: int) -> Sequence[tuple[Tensor, ...]]:
        """Read a layer, and as many behind it as make a read worth its while."""
        began_s, stats = time.perf_counter(), self._store._stats
        with stats.timed("load_seconds", self._tier.name):
            layers = self._reader.layers(index, self._least_bytes)
        nbytes = sum(tensor.nbytes for states in layers for tensor in states)
        stats.count("loaded_bytes", self._tier.name, nbytes)
        if self._tier.is_local:
            rate = nbytes / max(time.perf_counter() - began_s, 1e-6)
            self._least_bytes = min(READ_BYTES, 2 * nbytes, int(rate * READ_S))
        self._guards.append(Guard(tensor for states in layers for tensor in states))
        return layers

    def _complete(self, layers: tuple[tuple[Tensor, ...], ...]) -> None:
        """Store the chunk as one that was read at once, unless something was written to it since."""
        self._source.close()
        if all(guard.is_intact() for guard in self._guards):
            chunk = self._reader.chunk(layers, self._tables)
            self._store._store_read(chunk, self._tier, self._source, self._deleted)

    def _replace(self, fault: BaseException) -> ChunkKV:
        """Compute and store the chunk again after a fault."""
        store, key = self._store, self._reader.key
        store._stats.count("misses", store._refuse(self._tier, key, self._source, fault))
        with store._compute_times.timed(key):
            return store.put(self._recompute())
