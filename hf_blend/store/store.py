# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A store of chunk KV in memory and in tiers that keep bytes, verified on every load. It knows no model.

A fault costs time, never correctness: whatever is missing, damaged, foreign or unreadable is a miss with a reason.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from ..errors import StoreError
from .admin import FLUSH_S, CheckResult, EntryInfo, StoreAdmin
from .chunk import ChunkKey, ChunkKV, ChunkSpan, Layout
from .memory import MemoryCache
from .opening import Limits
from .reader import Reader
from .storage import Storage
from .stream import ComputeTimes, LayerReader, Recompute, StreamReader
from .tiers.base import Tier
from .writer import Writer

__all__ = ["BaseStore", "CheckResult", "EntryInfo"]


class BaseStore:
    """KV of chunks, by the key that says what they were computed from; threads may share it.

    Chunks are ready to use in `memories`, and behind them in `tiers` that keep bytes, the nearest first. A fault never
    leaves here: it is a miss, counted, and warned of once. A chunk that comes from a farther tier is taken into
    memory, and the bytes that were verified are written to the nearer ones. A chunk that is put goes to every tier:
    when `put` returns, it is in those on this machine, and in the queue of the others. What is in a queue is found
    there.

    `index` is a folder for copies of the index and of the order of eviction.

    The work is done by `reader` (whole chunks), `layer_reader` (chunks for a request, layer by layer), `writer` and
    `admin`, over one `storage`.
    """

    def __init__(
        self,
        memories: Sequence[MemoryCache],
        tiers: Sequence[Tier] = (),
        *,
        namespace: str = "",
        index: Path | None = None,
        limits: Limits = Limits(),  # noqa: B008 (frozen)
        codec: str = "raw",
    ) -> None:
        self.namespace = namespace
        # how many layers a request reads ahead of their use; 0: it reads chunks whole before it begins. Unbounded by
        # default: what was read is kept until the request ends anyway, and the first layers take longest to compute
        self.pipeline_depth: float = math.inf
        self.storage = Storage(memories, tiers, namespace, index, limits)
        self.writer = Writer(self.storage, codec)
        self.reader = Reader(self.storage, self.writer)
        self._compute_times = ComputeTimes()
        self.layer_reader: LayerReader = StreamReader(self.reader, self.writer, self._compute_times)
        self.admin = StoreAdmin(self.storage)

    @property
    def reads_importance(self) -> bool:
        """True where something depends on which tokens are important (`note`, `record_importance`)."""
        return self.storage.reads_importance or self.layer_reader.reads_importance

    def get(self, key: ChunkKey, budget_s: float = math.inf, layout: Layout | None = None) -> ChunkKV | None:
        """Fetch a chunk. Its tensors are shared: never write to them.

        Args:
            key: which chunk.
            budget_s: how long a tier on another machine is waited for, in seconds. A chunk that takes longer is a miss
                (reason "slow"), and is in memory later.
            layout: of the model that will use it (`hf_blend.prefill.layout.layout_of`); a chunk of another shape or
                dtype is a miss. None takes the entry at its word.

        Returns:
            The chunk exactly as it was stored, or None, also if it was written to. A fault is counted, never raised.
        """
        return self.reader.get(key, budget_s, layout) if self._is_ours(key) else None

    def at_hand(self, keys: Sequence[ChunkKey], layout: Layout | None = None) -> dict[ChunkKey, ChunkKV]:
        """Fetch those of some chunks that are in memory and can be used from there; `stream` fetches the others."""
        return self.reader.cached(keys, layout) if self.layer_reader.uses_memory else {}

    def stream(
        self, key: ChunkKey, recompute: Recompute, budget_s: float | None = None, layout: Layout | None = None
    ) -> ChunkKV | None:
        """Fetch a chunk as `get` does, but return before all layers were read; after a fault `recompute` gives it.

        A tier on another machine is waited for `budget_s`; None: as long as computing the chunk takes, by the `timed`
        blocks of the same model.
        """
        if not self._is_ours(key):
            return None
        if self.pipeline_depth or not self.layer_reader.uses_memory:  # blocks are read when they are chosen, not ahead
            return self.layer_reader.stream(key, recompute, budget_s, layout)
        return self.reader.get(key, self._compute_times.expect_s(key) if budget_s is None else budget_s, layout)

    def timed(self, *keys: ChunkKey) -> contextlib.AbstractContextManager[None]:
        """Measure a block that computes and puts missing chunks; `stream` waits no longer than that for one."""
        return self._compute_times.timed(*keys)

    def put(self, chunk: ChunkKV) -> ChunkKV:
        """Store a chunk. If the disk fails, it stays in memory and the failure is counted.

        When this returns, the chunk is in memory and on disk, and waits in a queue for a tier on another machine
        (`flush`); `get` finds it from now on.

        Args:
            chunk: computed alone (`hf_blend.model.capture`); it is copied.

        Returns:
            The chunk as `get` will give it: a codec may round.

        Raises:
            StoreError: the chunk holds NaN or infinity, is malformed, or belongs to another namespace.
        """
        return self.writer.put(chunk)

    def find(self, fingerprint: str, chunk_prefix_ids: Sequence[int], token_ids: Sequence[int]) -> list[ChunkSpan]:
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
        return self.storage.catalog.find(fingerprint, chunk_prefix_ids, token_ids)

    def sample(self, fingerprint: str, chunk_prefix_ids: Sequence[int]) -> ChunkKey | None:
        """Give any chunk of a model behind a chunk prefix, for looking at what is stored; None if there is none."""
        return self.storage.catalog.sample(fingerprint, chunk_prefix_ids)

    def longest_prefix(self, fingerprint: str) -> tuple[int, ...]:
        """Give the most tokens that chunks of a fingerprint are behind; empty if there is no such chunk."""
        return self.storage.catalog.longest_prefix(fingerprint)

    def counts(self, fingerprint: str) -> tuple[int, int]:
        """Count the chunks of a model that are known, and those of all models, in the store's namespace."""
        return self.storage.catalog.counts(fingerprint)

    def contains(self, key: ChunkKey) -> bool:
        """Say whether a chunk is there, without reading it: `get` may still find it damaged."""
        return key.namespace == self.namespace and self.tier_of(key) is not None

    def delete(self, key: ChunkKey) -> bool:
        """Remove a chunk from every tier; False if there was none. Raises StoreError if a disk refuses."""
        return key.namespace == self.namespace and bool(self.remove([key.digest]))

    def reject(self, key: ChunkKey, reason: str) -> None:
        """Count a chunk that was fetched as a miss after all, and make room for one that is right."""
        self.storage.stats.count("misses", reason)
        with contextlib.suppress(StoreError):
            self.delete(key)

    def note(self, key: ChunkKey, scores: Tensor, important_ratio: float) -> None:
        """Report how much attention a chunk's tokens got in a request; kept as a moving average, over restarts too.

        Shapes: scores `[tokens]`, as multiples of what a stored token of the prompt got on average.
        """
        self.storage.importance.note(key.digest, scores, min(1.0, max(0.0, important_ratio)))
        self.record_importance(key, important_ratio)
        self.layer_reader.note(key)

    def record_importance(self, key: ChunkKey, important_ratio: float) -> None:
        """Report which share of a chunk's tokens turned out to be important, for the policy "importance"."""
        self.admin.record_importance(key, min(1.0, max(0.0, important_ratio)))

    def protect(self, keys: Iterable[ChunkKey], owner: object) -> Callable[[], object]:
        """Keep the chunks of a request from being evicted from memory while it runs.

        Memory that is smaller than the request then holds its first chunks, and a further request finds them. Without
        it each chunk would push out the one that the next request needs first.
        """
        return self.admin.protect(keys, owner)

    def pin(self, key: ChunkKey) -> None:
        """Keep a chunk from being evicted, also after a restart if it is on disk; it still counts against caps."""
        self.set_pins([key.digest], True)

    def unpin(self, key: ChunkKey) -> None:
        """Let a chunk be evicted again; arguments and errors as in `pin`."""
        self.set_pins([key.digest], False)

    def set_pins(self, digests: Iterable[str], pinned: bool) -> None:
        """Pin chunks, or let them go, by their digests; raises StoreError if a pin cannot be noted."""
        self.admin.set_pins(digests, pinned)

    def flush(self, wait_s: float = FLUSH_S) -> bool:
        """Wait until every tier has written or refused what was put; False if something still waits."""
        return self.admin.flush(wait_s)

    def remove(self, digests: Iterable[str]) -> int:
        """Remove chunks from every queue and tier by their digests, and count them.

        Raises StoreError if a tier refuses, or takes too long to write a chunk.
        """
        return self.admin.remove(digests)

    def check(self, *, repair: bool = False) -> Iterator[CheckResult]:
        """Read and verify every entry of this namespace; with `repair` what can never become good is removed."""
        return self.admin.check(repair)

    def collect(self, target_bytes: int | None = None) -> dict[str, int]:
        """Remove what writers that are gone left behind, what is too old, and what is above the caps.

        Then evict until no more than `target_bytes` are left in each tier, all namespaces together.
        """
        return self.admin.collect(target_bytes)

    def tiers(self) -> list[Tier]:
        """The tiers that keep bytes, the nearest first."""
        return [bounded.tier for bounded in self.storage.tiers]

    def tier_of(self, key: ChunkKey) -> str | None:
        """Name the nearest tier that has a chunk; None if none has it, or says so now."""
        return self.admin.tier_of(key)

    def entries(self) -> Iterator[EntryInfo]:
        """Walk over what is stored in this namespace, in the order of digests."""
        return self.admin.entries()

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
        return self.admin.stats()

    def traffic(self) -> dict[str, tuple[int, float]]:
        """Bytes of K and V that were read since opening, and the seconds that took, by tier."""
        return self.admin.traffic()

    def close(self) -> None:
        """Flush for 30 s at most, and let go of memory and connections; closing twice is allowed."""
        self.layer_reader.close()
        self.admin.close()

    def _is_ours(self, key: ChunkKey) -> bool:
        if key.namespace == self.namespace:
            return True
        self.storage.stats.count("misses", "namespace")
        return False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __bool__(self) -> bool:
        return True  # an empty store is a store: `store or other` must not drop it

    def __len__(self) -> int:
        return len(self.storage.catalog)
