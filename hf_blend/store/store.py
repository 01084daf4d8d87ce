# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A store of chunk KV in memory and in tiers that keep bytes, verified on every load. It knows no model.

A fault costs time, never correctness: whatever is missing, damaged, foreign or unreadable is a miss with a reason.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self
from weakref import finalize

from torch import Tensor

from .. import plugins
from ..errors import ConfigError, StoreError, suggest
from .catalog import Catalog, entry_name, owner_of
from .chunk import ChunkKey, ChunkKV, Found, Layout
from .content import unpack_tokens
from .importance import TokenImportance
from .index import Index
from .limits import Limits
from .memory import MemoryCache
from .seal import check_secret
from .stack import CheckResult, Recompute, TierStack
from .stats import StoreStats
from .tiers.base import Tier

__all__ = ["BaseStore", "EntryInfo"]

FLUSH_S = 30.0
_COUNTED = ("hits", "misses", "loaded_bytes", "load_failures", "stored", "store_failures", "dropped_writes", "evicted")


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


class BaseStore:
    """KV of chunks by what they were computed from; threads may share it.

    Args:
        memories: the caches of chunks ready to use, which are asked first, the nearest first.
        tiers: the tiers behind them that keep bytes, the nearest first.
        namespace: only chunks of this namespace are seen.
        index: folder for copies of the index and of the order of eviction, or None.
        limits: caps, quotas and ages.
        secret: signs entries, hides their names, and refuses what is not signed with it; None signs nothing.
        codec: how K and V are packed in tiers that keep bytes.
        placement: name of the tier that keeps each chunk alone; "remote" is the first on another machine.
    """

    loads_in_part = False  # True where each request loads only the part of a chunk that matters to it

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
        placement: str | None = None,
    ) -> None:
        self.namespace = namespace
        self.placement = _check_placement(placement, tiers, limits)
        # layers that a request reads ahead of their use; 0 reads chunks whole before it begins. Without a bound by
        # default: what was read is held until the request ends, and the first layers, all tokens' own, hide the most
        self.pipeline_depth: float = math.inf
        self.controller: Any = None  # a `LoadingController` decides for each request what is worth loading
        self.ttl_s = limits.ttl_s
        self.secret = check_secret(secret)
        self._stats = StoreStats()
        self._memories = tuple(memories)
        for memory in memories:
            memory.stats = self._stats
        self._blocks: Path | None = None  # where stores that load in part keep blocks; this one only removes them
        owner, folder = owner_of(secret, namespace), index.parent if index else None
        self.importance = TokenImportance(index / f"{owner}.importance" if index else None, secret)
        skipped = partial(self._stats.count, "skipped")
        bounded = [limits.bound(tier, folder, owner, partial(self._was_evicted, tier.name), skipped) for tier in tiers]
        queued = Index()
        at_hand = [*(memory.index for memory in memories), queued]
        self._catalog = Catalog(namespace, bounded, at_hand, secret=secret, stats=self._stats)
        self._stack = TierStack(
            memories,
            bounded,
            self._catalog,
            self._stats,
            queued,
            secret=secret,
            ttl_s=limits.ttl_s,
            codec=codec,
            queue_bytes=limits.queue_bytes,
            known_share=self.importance.share,
            home=self.placement,
        )
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
        for memory in self._memories:
            chunk = memory.get(key, layout)
            if chunk is not None:
                return chunk
        return self._stack.load(key, budget_s, layout)

    def stream(
        self, key: ChunkKey, recompute: Recompute, budget_s: float | None = None, layout: Layout | None = None
    ) -> ChunkKV | None:
        """Fetch a chunk whose layers may still be on their way; see `StreamingRead`.

        Args:
            key: which chunk.
            recompute: computes it again after a fault.
            budget_s: how long a tier on another machine is waited for, in seconds. None is as long as computing the
                chunk takes, as far as `timed` blocks of the same model have shown.
            layout: as in `get`.

        Returns:
            The chunk, or None for a miss.
        """
        if key.namespace == self.namespace and self.pipeline_depth:
            return self._stack.stream(key, recompute, budget_s, layout)
        return self.get(key, self._stack.compute_times.expect_s(key) if budget_s is None else budget_s, layout)

    def timed(self, *keys: ChunkKey) -> contextlib.AbstractContextManager[None]:
        """Measure a block that computes missing chunks and puts them: later requests wait no longer than that for one.

        Args:
            *keys: of the chunks, all of one model.

        Returns:
            A context manager.
        """
        return self._stack.compute_times.timed(*keys)

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
        key = chunk.key
        if key.namespace != self.namespace:
            raise StoreError(
                f"chunk {key.digest} belongs to another namespace than this store. Open a store with the chunk's "
                "namespace, or compute the chunk for the store's."
            )
        chunk.check()
        return self._stack.put(chunk, wait_s)

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
        """Any chunk of a model behind a sink, for looking at what is stored; None if there is none.

        Args:
            fingerprint: of the model.
            chunk_prefix_ids: tokens that stood before the chunk when it was computed.
        """
        packed = self._catalog.sample(fingerprint, chunk_prefix_ids)
        return (
            ChunkKey(fingerprint, tuple(chunk_prefix_ids), unpack_tokens(packed), self.namespace) if packed else None
        )

    def counts(self, fingerprint: str) -> tuple[int, int]:
        """How many chunks the store is known to hold.

        Args:
            fingerprint: of a model.

        Returns:
            Those of this model, and those of all models, in the store's namespace.
        """
        return self._catalog.counts(fingerprint)

    def contains(self, key: ChunkKey) -> bool:
        """Say whether a chunk is there, without reading it: `get` may still find it damaged."""
        return key.namespace == self.namespace and self._stack.contains(key.digest)

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
        """Count a chunk that was fetched as a miss after all, and make room for one that is right.

        Args:
            key: which chunk.
            reason: one word for `misses`, such as "canary".
        """
        self._stats.count("misses", reason)
        with contextlib.suppress(StoreError):
            self.delete(key)

    @property
    def reads_importance(self) -> bool:
        """Whether a tier reads which tokens were important (`note`, `record_importance`)."""
        return any(tier.reads_importance for tier in (*self._memories, *self._stack.tiers))

    def note(self, key: ChunkKey, scores: Tensor, important_ratio: float) -> None:
        """Say how much attention a chunk's tokens got in a request; kept as a moving average, over restarts too.

        Args:
            key: which chunk.
            scores: `[tokens]`, attention as a multiple of what a stored token of the prompt got on average.
            important_ratio: share of the tokens that were among the important ones of the prompt, 0 to 1.
        """
        self.importance.note(key.digest, scores, min(1.0, max(0.0, important_ratio)))
        self.record_importance(key, important_ratio)

    def record_importance(self, key: ChunkKey, important_ratio: float) -> None:
        """Say which share of a chunk's tokens turned out to be important, for the policy "importance".

        Args:
            key: which chunk.
            important_ratio: 0 to 1.
        """
        self._stack.record_importance(key.digest, min(1.0, max(0.0, important_ratio)))

    def move(self, keys: Iterable[ChunkKey], tier: str) -> int:
        """Keep chunks in one tier that keeps bytes, such as "disk", and no longer in the others.

        A chunk is written to its tier, as durably as that one writes, before it leaves another: a process that is
        killed meanwhile leaves it in one of them, or in both. What memory holds stays.

        Args:
            keys: of the chunks.
            tier: name of the tier, as `stats()["healthy"]` lists them.

        Returns:
            How many are there now; those that no tier has whole are not.

        Raises:
            ConfigError: the store has no such tier.
            StoreError: a tier refuses.
        """
        names = [one.name for one in self._stack.tiers]
        if tier not in names:
            raise ConfigError(f"no tier named {tier!r} keeps bytes in this store. {suggest(str(tier), names)}")
        moved = 0
        for key in keys:
            try:
                moved += key.namespace == self.namespace and self._stack.move(key.digest, tier)
            except OSError as error:
                raise _refused(f"chunk {key.digest} cannot be moved to the {tier} tier", error) from error
        return moved

    def rebalance(self) -> dict[str, int]:
        """Move what is stored to the tier that `placement` names, as far as there is room, the newest first.

        Copies in other tiers that a process left when it was killed in a move are removed, too.

        Returns:
            `moved` chunks, those that `stay` where they were for want of room or since no tier has them whole, and
            those that were `placed` already.

        Raises:
            ConfigError: the store has no placement.
            StoreError: a tier refuses.
        """
        if self.placement is None:
            raise ConfigError(
                "the store keeps chunks in every tier, expected one opened with a placement. Give ChunkStore.open "
                'placement="disk" or placement="remote".'
            )
        found = {"moved": 0, "stay": 0, "placed": 0}
        target = next(tier for tier in self._stack.tiers if tier.name == self.placement)
        self.flush()
        for digest, record in sorted(self._catalog.items().items(), key=lambda one: one[1].created, reverse=True):
            if record.tiers == [self.placement]:
                found["placed"] += 1
                continue
            fits = self.placement in record.tiers or target.has_room(record.nbytes)
            try:
                moved = fits and self._stack.move(digest, self.placement)
            except OSError as error:
                raise _refused(f"chunk {digest} cannot be moved to the {self.placement} tier", error) from error
            found["moved" if moved else "stay"] += 1
        return found

    def protect(self, keys: Iterable[ChunkKey], owner: object) -> Callable[[], object]:
        """Keep the chunks of a request from being evicted from memory while it runs.

        Memory that is smaller than the request then holds its first chunks, and a further request finds them. Without
        it each chunk would push out the one that the next request asks for first.

        Args:
            keys: of the chunks, stored already or not.
            owner: the chunks may be evicted when it is gone, at the latest.

        Returns:
            Ends it; may be called again.
        """
        digests = [key.digest for key in keys]
        self._stack.protect(digests)
        release = finalize(owner, self._stack.release, digests)
        release.atexit = False
        return release

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
        removed, blocks = 0, self._block_tier()
        for digest in digests:
            if blocks is not None:
                with contextlib.suppress(OSError):
                    blocks.delete(self.block_name(digest))
            try:
                removed += self._stack.delete(digest)
            except OSError as error:
                raise _refused(f"chunk {digest} cannot be removed", error) from error
        return removed

    def check(self, *, repair: bool = False) -> Iterator[CheckResult]:
        """Read every entry of this namespace in every tier and verify all of it.

        Args:
            repair: remove what can never become good.

        Yields:
            One finding for each entry, good or not.
        """
        self.flush()
        for tier in self._stack.tiers:
            for name in self._catalog.names(tier):
                yield self._stack.verify(tier, name, repair)

    def collect(self, target_bytes: int | None = None) -> dict[str, int]:
        """Remove what writers that are gone left behind, what is too old, and what is above the caps.

        Args:
            target_bytes: evict until no more than this is left in each tier, all namespaces together.

        Returns:
            `orphans` and `expired` removed, and `freed_bytes` by eviction.
        """
        found = {"orphans": 0, "expired": 0, "freed_bytes": 0}
        self.flush()
        for tier in self._stack.tiers:
            found["orphans"] += tier.remove_orphans(everywhere=True)
            found["expired"] += self._stack.expire(tier)
            limits = [value for value in (target_bytes, tier.cap_bytes) if value is not None]
            found["freed_bytes"] += self._stack.shrink(tier, min(limits)) if limits else 0
        return found

    def tiers(self) -> list[Tier]:
        """The tiers that keep bytes, the nearest first."""
        return [bounded.tier for bounded in self._stack.tiers]

    def tier_of(self, key: ChunkKey) -> str | None:
        """Name the nearest tier that has a chunk; None if none has it, or says so now."""
        return self._stack.tier_of(key.digest)

    def loader(self, cache: Any) -> Any:
        """What loads chunks in part for the request of a cache; None where they are loaded whole."""
        return None

    def entries(self) -> Iterator[EntryInfo]:
        """Walk over what is stored in this namespace, in the order of digests."""
        pins = self._stack.pins()  # by name
        for digest, record in self._catalog.items().items():
            held = [name for name, tier in self._stack.at_hand() if tier.contains(digest)]
            yield EntryInfo(
                digest,
                record.key.fingerprint,
                len(record.key.token_ids),
                record.nbytes,
                "+".join([*held, *record.tiers]),
                record.created,
                self._catalog.name(digest) in pins,
            )

    def stats(self) -> dict[str, Any]:
        """Count what happened since opening, and what is held now.

        Returns:
            `hits`, `stored`, `evicted` and `loaded_bytes` (of K and V that were read) by tier, `misses` by reason,
            `load_failures` by tier and reason, `store_failures` by error, `dropped_writes` by tier and reason (full,
            closed, exit, thread, changed), `removed` by cause (corrupt, expired, orphans), `moved` by the tier that
            chunks left another one for, `skipped` by tier (or index, order) and reason: what listing passed over,
            `seconds` by stage and tier, `entries`, and `bytes`, `pinned_bytes` and `capacity_bytes` by tier; those of
            the disk hold every namespace; `queued_bytes` by tier: what waits to be written; `healthy` by tier:
            whether it answers.
        """
        tiers: list[Any] = [*self._memories, *self._stack.tiers]
        return {
            **{group: self._stats.group(group) for group in (*_COUNTED, "moved", "removed", "skipped")},
            "seconds": self._stats.seconds(),
            "entries": len(self._catalog),
            "bytes": {tier.name: tier.nbytes for tier in tiers},
            "pinned_bytes": {tier.name: tier.pinned_bytes for tier in tiers},
            "capacity_bytes": {tier.name: tier.cap_bytes for tier in tiers},
            "queued_bytes": {name: queue.nbytes for name, queue in self._stack.queues.items()},
            "healthy": {tier.name: tier.is_healthy for tier in self._stack.tiers},
        }

    def traffic(self) -> dict[str, tuple[int, float]]:
        """Bytes of K and V that were read since opening, and the seconds that took, by tier."""
        seconds = self._stats.seconds().get("load_seconds", {})
        return {tier: (nbytes, seconds.get(tier, 0.0)) for tier, nbytes in self._stats.group("loaded_bytes").items()}

    def close(self) -> None:
        """Flush for 30 s at most, save the index, and let go of memory and connections; closing twice is allowed."""
        self._stack.close(FLUSH_S)
        self.importance.save()

    def count_eviction(self, tier: str) -> None:
        """Count an entry of another kind that had to leave a tier."""
        self._stats.count("evicted", tier)

    def block_name(self, digest: str) -> str:
        """Name the entry of a chunk in blocks."""
        return entry_name(self.secret, f"{self.namespace}\0blocks", digest)

    def _block_tier(self) -> Tier | None:
        """Where an earlier store that loads in part has left blocks, which must go with their chunks."""
        if self._blocks is None or not self._blocks.is_dir():
            return None
        tier: Tier = plugins.load("store.tiers", "disk")(self._blocks)
        return tier

    def _was_evicted(self, tier: str, _: str) -> None:
        self._stats.count("evicted", tier)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __bool__(self) -> bool:
        return True  # an empty store is a store: `store or other` must not drop it

    def __len__(self) -> int:
        return len(self._catalog)


def _check_placement(placement: str | None, tiers: Sequence[Tier], limits: Limits) -> str | None:
    """The name of the tier that is meant."""
    if placement is None:
        return None
    far = [tier.name for tier in tiers if not tier.is_local]
    names = [tier.name for tier in tiers] + (["remote"] if far else [])
    if placement not in names:
        raise ConfigError(f"no tier named {placement!r} keeps bytes in this store. {suggest(str(placement), names)}")
    if limits.ttl_s is not None:
        raise ConfigError(
            f"placement={placement!r} came with ttl_s={limits.ttl_s}, expected one of them: an entry that moves looks "
            "as young as its last move. Leave one out."
        )
    return far[0] if placement == "remote" else placement


def _refused(what: str, error: OSError) -> StoreError:
    return StoreError(f"{what}: {error}. Check who owns the files of the store.")
