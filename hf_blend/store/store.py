# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The chunk store that users open: chunk KV in memory and on disk, verified on every load.

A fault costs time, never correctness: whatever is missing, damaged, foreign or unreadable is a miss with a reason.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self
from weakref import finalize

from torch import Tensor, nn

from .. import plugins
from ..errors import ConfigError, PromptError, StoreError, suggest
from ..model.anatomy import default_sink
from .catalog import Catalog
from .chunk import ChunkKey, ChunkKV, Found, Layout
from .header import hash_namespace
from .held import HeldChunks
from .importance import TokenImportance
from .index import unpack_tokens
from .limits import Limits
from .location import open_tiers
from .seal import check_secret, keyed
from .stack import CheckResult, Recompute, TierStack
from .tally import StoreStats
from .tiers.base import Tier

__all__ = ["ChunkStore", "EntryInfo"]

FLUSH_S = 30.0
ADD_S = 3600.0  # `add` waits for tiers as long as they take; each call to one has a deadline of its own
_DURABILITIES = ("full", "none")


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


class ChunkStore:
    """KV of chunks by what they were computed from. Open one with `ChunkStore.open`; threads may share it.

    Args:
        held: the places in memory that are asked first, the nearest first.
        tiers: the tiers behind them that keep bytes, the nearest first.
        namespace: only chunks of this namespace are seen.
        index: folder for copies of the index and of the order of eviction, or None.
        limits: caps, quotas and ages.
        secret: signs entries, hides their names, and refuses what is not signed with it; None signs nothing.
        codec: how K and V are packed in tiers that keep bytes.
        placement: as in `open`.
    """

    def __init__(
        self,
        held: Sequence[HeldChunks],
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
        self.placement = _check_placement(placement, tiers, limits)  # name of the tier that keeps each chunk alone
        # layers that a request reads ahead of their use; 0 reads chunks whole before it begins. Without a bound by
        # default: what was read is held until the request ends, and the first layers, all tokens' own, hide the most
        self.pipeline_depth: float = math.inf
        self.controller: Any = None  # a `LoadingController` decides for each request what is worth loading
        self._tally = StoreStats()
        self._blocks: Path | None = None  # where stores that load in part keep blocks; this one only removes them
        self.ttl_s = limits.ttl_s
        self._prefetcher: ThreadPoolExecutor | None = None
        self.secret = check_secret(secret)
        named = keyed(secret, "index", hash_namespace(namespace))[:32]
        self.importance = TokenImportance(index / f"{named}.importance" if index else None, secret)
        snapshot = index / f"{named}.index" if index else None
        given_catalog = (namespace, tiers, snapshot, lambda digest: self._stack.is_held(digest))
        self._catalog = Catalog(*given_catalog, secret=secret, tally=self._tally)
        skip = partial(self._tally.count, "skipped")
        bounded = [limits.bound(tier, index, self._catalog.owns, self._was_evicted, skip) for tier in tiers]
        given = (held, bounded, self._catalog, self._tally)
        settings: dict[str, Any] = {"secret": secret, "ttl_s": limits.ttl_s, "codec": codec}
        settings |= {"queue_bytes": limits.queue_bytes, "known_share": self.importance.share}
        settings |= {"home": self.placement}
        self._stack: TierStack = TierStack(*given, **settings)
        for tier in tiers:
            self._tally.count("removed", "orphans", tier.remove_orphans())

    @classmethod
    def open(
        cls,
        location: str | Path | None = None,
        *,
        memory_bytes: int | None = None,
        disk_bytes: int | None = None,
        device: str | None = None,
        device_bytes: int = 0,
        remote: str | None = None,
        remote_deadline_s: float | None = None,
        remote_queue_bytes: int = 1 << 30,
        eviction: str = "lru",
        namespace: str = "",
        quota_bytes: int | None = None,
        ttl_s: float | None = None,
        durability: str = "full",
        secret: bytes | None = None,
        codec: str = "raw",
        partial: float | Mapping[str, float] | None = None,
        placement: str | None = None,
    ) -> Self:
        """Open a store, making it if it does not exist.

        Args:
            location: a directory; "memory://" keeps nothing on disk; a URL such as "s3://bucket/folder" or
                "redis://host" keeps chunks there and in memory; None is `$HF_BLEND_HOME`, or else the assets folder
                of the Hugging Face cache.
            memory_bytes: most that the memory tier may hold; None is a quarter of what is available.
            disk_bytes: most that the directory may hold, all namespaces together; None is what it holds now and half
                of what is free.
            device: where `device_bytes` are held, such as "cuda".
            device_bytes: most that is held on the device.
            remote: URL of a tier behind the disk, shared with other machines.
            remote_deadline_s: how long a call to it may take besides its transfer, before it is left alone until it
                answers again; None is 1 for Redis and 5 for others.
            remote_queue_bytes: most that may wait to be written to it; what does not fit is dropped and counted. With
                0 nothing waits there: `put` returns when the remote tier has the chunk, or has refused it.
            eviction: name of the policy that says which chunk leaves a full tier.
            namespace: keeps tenants apart: no chunk is seen from another namespace.
            quota_bytes: most that this namespace may hold in each tier; None is up to the cap.
            ttl_s: age in seconds at which a chunk is no longer used; None is never.
            durability: "full" makes a stored chunk survive a power loss, "none" is for scratch; neither ever gives
                wrong KV.
            secret: where others may write to the store, bytes such as `secrets.token_bytes(32)`: signs what is
                stored, hides its names, and refuses what is not signed so; see docs/security.md.
            codec: "raw" keeps K and V bit for bit; "bf16" takes half the bytes of float32, "int8" half of bfloat16,
                "int4" less than a third, and a chunk is then used as it was rounded, from memory too. Entries of any
                are read.
            partial: share of a chunk's blocks that a request loads, chosen by its question (IMPRESS); the columns of
                the others are seen by nobody. A mapping sets `share` (0.25), `alpha` (0.6, the exponent of the
                threshold above which probe heads agree), `fallback` ("whole" loads all of a layer whose heads do not
                agree; "values" the keys of all heads, and of each head the values of the blocks that it looks at),
                `block_tokens` (16) and `reorder` (True: tokens that get attention are written into blocks together,
                beside requests). Blocks are kept beside the chunks, each in half of `disk_bytes`; None loads chunks
                whole.
            placement: "disk" or "remote" keeps each chunk in one of the tiers that keep bytes instead of in all of
                them: new chunks go to this one, what a full disk evicts moves to the remote tier, and what is read
                from there moves back where the disk is the placement. Every move writes before it deletes. What is
                held in memory is a copy for this process. A chunk that moves to this machine's disk leaves the
                others', and a full disk waits for the remote tier. What a remote tier refuses, as where it is full,
                is kept on the disk; `rebalance` moves it later. None keeps a copy in every tier.

        Returns:
            The store.

        Raises:
            ConfigError: an argument is out of range, or the location is of a kind that does not exist.
            StoreError: nothing can be kept at the location.
        """
        limits = Limits(memory_bytes, disk_bytes, device_bytes, quota_bytes, ttl_s, eviction, remote_queue_bytes)
        limits.check()
        if partial is not None and disk_bytes is not None:
            limits = replace(limits, disk_bytes=disk_bytes // 2)
        check_secret(secret)
        _check_durability(durability)
        plugins.load("store.codecs", codec)
        root, tiers = open_tiers(location, remote, durable=durability == "full", deadline_s=remote_deadline_s)
        index = root / "index" if root else None
        given: dict[str, Any] = {"namespace": namespace, "index": index, "limits": limits, "secret": secret}
        opened = cls(limits.hold(device), tiers, **given, codec=codec, placement=placement)
        if partial is None:
            opened._blocks = root / "blocks" if root else None
            return opened
        settings = dict(partial) if isinstance(partial, Mapping) else {"share": partial}
        if root is None and any(not tier.is_local for tier in tiers):
            raise ConfigError(
                f"partial={partial!r} came with a location that is a URL, expected a directory: blocks are read from "
                "a disk. Give a directory, and remote=URL."
            )
        loader = plugins.load("sparse.partial", "impress")()
        in_front: Self = loader.open(opened, root / "blocks" if root else None, limits.bound_blocks, **settings)
        return in_front

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
            self._stack.miss("namespace")
            return None
        return self._stack.get(key, budget_s, layout)

    def stream(
        self, key: ChunkKey, recompute: Recompute, budget_s: float | None = None, layout: Layout | None = None
    ) -> ChunkKV | None:
        """Fetch a chunk whose layers may still be on their way; see `TierStack.stream`.

        Args:
            key: which chunk.
            recompute: computes it again after a fault.
            budget_s: how long a tier on another machine is waited for, in seconds. None is as long as computing the
                chunk takes, as far as `timed` blocks of the same model have shown.
            layout: as in `get`.

        Returns:
            The chunk, or None for a miss.
        """
        budget_s = self._stack.compute_times.expect_s(key) if budget_s is None else budget_s
        if key.namespace != self.namespace or not self.pipeline_depth:
            return self.get(key, budget_s, layout)
        return self._stack.stream(key, recompute, budget_s, layout)

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

    def add(
        self,
        model: nn.Module,
        tokenizer: Any,
        chunks: Sequence[str | Sequence[int]],
        *,
        chunk_prefix_ids: Sequence[int] | None = None,
    ) -> list[ChunkKey]:
        """Compute and store chunks ahead of time; those that are stored already cost nothing.

        Unlike `put`, this returns when every tier that answers has the chunks.

        Args:
            model: the model that will use them.
            tokenizer: for chunks that are text; None if all are ids.
            chunks: texts or token ids, none empty.
            chunk_prefix_ids: tokens before each chunk while it is computed; None is the model's BOS, if any.

        Returns:
            The keys of the chunks, in their order.

        Raises:
            PromptError: `chunks` is not a list, or a chunk is empty, too long for the model, or holds a token that
                stands for an image.
            StoreError: a chunk's KV holds NaN or infinity.
            UnsupportedModelError: the model has hooks of others, is wrapped, or changes while it is used.
        """
        from ..model.canary import compute_chunks, packs
        from ..model.capture import check_chunk
        from ..prompt.pieces import tokenizer_digest

        keys = self.keys(model, tokenizer, chunks, chunk_prefix_ids=chunk_prefix_ids)
        for number, key in enumerate(keys):
            check_chunk(model, key.token_ids, key.chunk_prefix_ids, f"chunk {number}")
        texts = {key for key, chunk in zip(keys, chunks, strict=True) if isinstance(chunk, str)}
        missing = [key for key in dict.fromkeys(keys) if not self.contains(key)]
        for pack in packs(model, missing):
            pack = [key for key in pack if not self.contains(key)]  # another process may have been faster
            for chunk in compute_chunks(model, pack) if pack else ():
                known = tokenizer_digest(tokenizer) if chunk.key in texts else ""
                self._put(replace(chunk, tokenizer=known), wait_s=ADD_S)
        self.flush(ADD_S)
        return keys

    def prefetch(
        self,
        model: nn.Module,
        tokenizer: Any,
        chunks: Sequence[str | Sequence[int]],
        *,
        chunk_prefix_ids: Sequence[int] | None = None,
    ) -> Future[int]:
        """Bring the chunks of a coming request into memory on another thread, from whatever tier has them.

        They are read and verified as by `get`, one after the other, and leave memory by its eviction as others do. A
        request need not wait for it: a chunk that is not there yet is read by the request itself.

        Args:
            model: the model that will use them.
            tokenizer: for chunks that are text; None if all are ids.
            chunks: texts or token ids; those that are not stored stay so.
            chunk_prefix_ids: as in `add`.

        Returns:
            How many chunks were brought, once it is known; those that were in memory already are not counted.

        Raises:
            PromptError: `chunks` is not a list.
        """
        keys = self.keys(model, tokenizer, chunks, chunk_prefix_ids=chunk_prefix_ids)
        if self._prefetcher is None:
            self._prefetcher = ThreadPoolExecutor(1, thread_name_prefix="hf_blend-prefetch")
        return self._prefetcher.submit(self._bring, list(dict.fromkeys(keys)))

    def _bring(self, keys: Sequence[ChunkKey]) -> int:
        away = (key for key in keys if not self._stack.is_held(key.digest) and self._stack.contains(key.digest))
        return sum(self.get(key) is not None for key in away)

    def keys(
        self,
        model: nn.Module,
        tokenizer: Any,
        chunks: Sequence[str | Sequence[int]],
        *,
        chunk_prefix_ids: Sequence[int] | None = None,
    ) -> list[ChunkKey]:
        """The keys under which `add` would store chunks; nothing is computed.

        Args:
            model: as in `add`.
            tokenizer: as in `add`.
            chunks: as in `add`.
            chunk_prefix_ids: as in `add`.

        Returns:
            The keys, in the order of the chunks.

        Raises:
            PromptError: `chunks` is not a list.
        """
        from ..model.fingerprint import fingerprint
        from ..prompt.pieces import tokenize

        if isinstance(chunks, str):
            raise PromptError(f"chunks is the text {chunks!r:.60}, expected a list of chunks. Write [text].")
        identity = fingerprint(model)
        sink = default_sink(model) if chunk_prefix_ids is None else tuple(chunk_prefix_ids)
        return [ChunkKey(identity, sink, tokenize(tokenizer, chunk), self.namespace) for chunk in chunks]

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
        self._stack.miss(reason)
        with contextlib.suppress(StoreError):
            self.delete(key)

    @property
    def reads_importance(self) -> bool:
        """Whether a tier reads which tokens were important (`note`, `record_importance`)."""
        held = any(place.reads_importance for place in self._stack.held)
        return held or any(tier.reads_importance for tier in self._stack.tiers)

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
        for digest, record in sorted(self._catalog.items(), key=lambda one: one[1].created, reverse=True):
            places = self._catalog.places(digest)
            if places == [self.placement]:
                found["placed"] += 1
                continue
            fits = self.placement in places or target.has_room(record.nbytes)
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
        removed, listed = 0, list(digests)
        if self._blocks is not None and self._blocks.is_dir():
            plugins.load("sparse.partial", "impress")().forget(self, self._blocks, listed)
        for digest in listed:
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
            One finding for each entry, whole or not.
        """
        self.flush()
        for tier in self._stack.tiers:
            for name in sorted(self._catalog.names(tier.name)):
                yield self._stack.examine(tier, name, repair)

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
            found["orphans"] += tier.remove_orphans()
            found["expired"] += self._stack.expire(tier)
            limits = [value for value in (target_bytes, tier.cap_bytes) if value is not None]
            found["freed_bytes"] += self._stack.shrink(tier, min(limits)) if limits else 0
        return found

    def tiers(self) -> list[Tier]:
        """The tiers that keep bytes, the nearest first."""
        return [bounded.tier for bounded in self._stack.tiers]

    def place(self, key: ChunkKey) -> str | None:
        """The name of the nearest place that has a chunk; None if none has it, or says so now."""
        for name, place in self._stack.at_hand():
            if place.contains(key.digest):
                return name
        for tier in self._stack.tiers:
            with contextlib.suppress(OSError):
                if tier.contains(self._catalog.name(key.digest)):
                    return tier.name
        return None

    def files(self) -> Iterator[tuple[str, Path]]:
        """Verify every entry in a folder of this store, and walk over those that are whole: digest and file."""
        for tier in self._stack.tiers:
            for name in sorted(self._catalog.names(tier.name)):
                path = tier.tier.file(name)
                if path is not None and not self._stack.examine(tier, name, repair=False).reason:
                    yield self._catalog.digest(name), path

    def entries(self) -> Iterator[EntryInfo]:
        """Walk over what is stored in this namespace, in the order of digests."""
        pins = self._stack.pins()  # by name
        for digest, record in self._catalog.items():
            held = [name for name, place in self._stack.at_hand() if place.contains(digest)]
            where = "+".join([*held, *self._catalog.places(digest)])
            about = (record.fingerprint, record.tokens, record.nbytes)
            yield EntryInfo(digest, *about, where, record.created, self._catalog.name(digest) in pins)

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
        happened = ("hits", "misses", "loaded_bytes", "load_failures", "stored", "store_failures", "dropped_writes")
        all_places: list[Any] = [*self._stack.held, *self._stack.tiers]
        places = {place.name: place for place in all_places}
        return {
            **{group: self._tally.group(group) for group in (*happened, "evicted", "moved", "removed", "skipped")},
            "seconds": self._tally.seconds(),
            "entries": len(self._catalog.items()),
            "bytes": {name: place.nbytes for name, place in places.items()},
            "pinned_bytes": {name: place.pinned_bytes for name, place in places.items()},
            "capacity_bytes": {name: place.cap_bytes for name, place in places.items()},
            "queued_bytes": {name: queue.nbytes for name, queue in self._stack.queues.items()},
            "healthy": {tier.name: tier.is_healthy for tier in self._stack.tiers},
        }

    def traffic(self) -> dict[str, tuple[int, float]]:
        """Bytes of K and V that were read since opening, and the seconds that took, by tier."""
        seconds = self._tally.seconds().get("load_seconds", {})
        return {tier: (nbytes, seconds.get(tier, 0.0)) for tier, nbytes in self._tally.group("loaded_bytes").items()}

    def close(self) -> None:
        """Flush for 30 s at most, save the index, and let go of memory and connections; closing twice is allowed."""
        if self._prefetcher is not None:
            self._prefetcher.shutdown(cancel_futures=True)
            self._prefetcher = None
        self._stack.close(FLUSH_S)
        self.importance.save()
        self._catalog.save()

    def count_eviction(self, tier: str) -> None:
        """Count a chunk that left a tier of a store in front of this one."""
        self._tally.count("evicted", tier)

    def _was_evicted(self, tier: str, name: str) -> None:
        self._tally.count("evicted", tier)
        self._catalog.forget(self._catalog.digest(name), tier)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __bool__(self) -> bool:
        return True  # an empty store is a store: `store or other` must not drop it

    def __len__(self) -> int:
        return len(self._catalog.items())


def _check_durability(durability: str) -> None:
    if durability not in _DURABILITIES:
        raise ConfigError(f"no durability named {durability!r}. {suggest(str(durability), _DURABILITIES)}")


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
