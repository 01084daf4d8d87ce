# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The chunk store that users open: chunk KV in memory and on disk, verified on every load.

A fault costs time, never correctness: whatever is missing, damaged, foreign or unreadable is a miss with a reason.
"""

import contextlib
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

from torch import nn

from .. import plugins
from ..errors import ConfigError, PromptError, StoreError, suggest
from ..model.anatomy import default_sink
from .catalog import Catalog
from .chunk import ChunkKey, ChunkKV, Layout
from .header import hash_namespace
from .held import HeldChunks
from .limits import Limits
from .location import open_tiers
from .seal import check_secret, keyed
from .streaming import Recompute, StreamingStack
from .tally import Tally
from .tiers.base import Tier
from .upkeep import FLUSH_S, EntryInfo, Upkeep

__all__ = ["ChunkStore", "EntryInfo"]

ADD_S = 3600.0  # `add` waits for tiers as long as they take; each call to one has a deadline of its own
_DURABILITIES = ("full", "none")


class ChunkStore(Upkeep):
    """KV of chunks by what they were computed from. Open one with `ChunkStore.open`; threads may share it.

    Args:
        held: the places in memory that are asked first, the nearest first.
        tiers: the tiers behind them that keep bytes, the nearest first.
        namespace: only chunks of this namespace are seen.
        index: folder for copies of the index and of the order of eviction, or None.
        limits: caps, quotas and ages.
        secret: signs entries, hides their names, and refuses what is not signed with it; None signs nothing.
        codec: how K and V are packed in tiers that keep bytes.
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
    ) -> None:
        self.namespace = namespace
        self.pipeline_depth = 2  # layers that a request reads ahead; 0 reads chunks whole before it begins
        self.controller: Any = None  # a `LoadingController` decides for each request what is worth loading
        self._tally = Tally()
        self.secret = check_secret(secret)
        snapshot = index / f"{keyed(secret, 'index', hash_namespace(namespace))[:32]}.index" if index else None
        given_catalog = (namespace, tiers, snapshot, lambda digest: self._stack.is_held(digest))
        self._catalog = Catalog(*given_catalog, secret=secret, tally=self._tally)
        skip = partial(self._tally.count, "skipped")
        bounded = [limits.bound(tier, index, self._catalog.owns, self._was_evicted, skip) for tier in tiers]
        given = (held, bounded, self._catalog, self._tally)
        settings: dict[str, Any] = {"secret": secret, "ttl_s": limits.ttl_s, "codec": codec}
        self._stack: StreamingStack = StreamingStack(*given, **settings, queue_bytes=limits.queue_bytes)
        for tier in tiers:
            self._tally.count("removed", "orphans", tier.reclaim())

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
            codec: "raw" keeps K and V bit for bit; "int8" takes half the bytes of bfloat16, and a chunk is then used
                as it was rounded, from memory too. Entries of either are read.

        Returns:
            The store.

        Raises:
            ConfigError: an argument is out of range, or the location is of a kind that does not exist.
            StoreError: nothing can be kept at the location.
        """
        limits = Limits(memory_bytes, disk_bytes, device_bytes, quota_bytes, ttl_s, eviction, remote_queue_bytes)
        limits.check()
        check_secret(secret)
        _check_durability(durability)
        plugins.load("store.codecs", codec)
        root, tiers = open_tiers(
            location, remote, durable=durability == "full", deadline_s=remote_deadline_s
        )
        index = root / "index" if root else None
        given: dict[str, Any] = {"namespace": namespace, "index": index, "limits": limits, "secret": secret}
        return cls(limits.hold(device), tiers, **given, codec=codec)

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
        """Fetch a chunk whose layers may still be on their way; see `StreamingStack.stream`.

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

    def timed(self, key: ChunkKey) -> contextlib.AbstractContextManager[None]:
        """Measure a block that computes a missing chunk and puts it: later requests wait no longer than that for one.

        Args:
            key: of the chunk.

        Returns:
            A context manager.
        """
        return self._stack.compute_times.timed(key)

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
        sink_ids: Sequence[int] | None = None,
    ) -> list[ChunkKey]:
        """Compute and store chunks ahead of time; those that are stored already cost nothing.

        Unlike `put`, this returns when every tier that answers has the chunks.

        Args:
            model: the model that will use them.
            tokenizer: for chunks that are text; None if all are ids.
            chunks: texts or token ids, none empty.
            sink_ids: tokens that stand before each chunk while it is computed; None is the model's BOS, if any.

        Returns:
            The keys of the chunks, in their order.

        Raises:
            PromptError: `chunks` is not a list, or a chunk is empty, too long for the model, or holds a token that
                stands for an image.
            StoreError: a chunk's KV holds NaN or infinity.
            UnsupportedModelError: the model has hooks of others, is wrapped, or changes while it is used.
        """
        from ..model.canary import compute_chunk
        from ..model.capture import check_chunk
        from ..model.fingerprint import fingerprint
        from ..prompt.pieces import tokenize

        if isinstance(chunks, str):
            raise PromptError(f"chunks is the text {chunks!r:.60}, wanted a list of chunks. Write [text].")
        identity = fingerprint(model)
        sink = default_sink(model) if sink_ids is None else tuple(sink_ids)
        keys = [ChunkKey(identity, sink, tokenize(tokenizer, chunk), self.namespace) for chunk in chunks]
        for number, key in enumerate(keys):
            check_chunk(model, key.token_ids, key.sink_ids, f"chunk {number}")
        for key in dict.fromkeys(keys):
            if not self.contains(key):
                self._put(compute_chunk(model, key), wait_s=ADD_S)
        self.flush(ADD_S)
        return keys

    def find(self, fingerprint: str, sink_ids: Sequence[int], token_ids: Sequence[int]) -> list[tuple[int, ChunkKey]]:
        """Find stored chunks inside any tokens, by content and at any offset.

        Args:
            fingerprint: of the model.
            sink_ids: tokens that stood before the chunks when they were computed.
            token_ids: for example a whole prompt.

        Returns:
            Where each chunk starts, and its key: left to right, the longest first at an offset, no overlap.
        """
        spans = self._catalog.find(fingerprint, sink_ids, token_ids)
        sink = tuple(sink_ids)
        return [
            (start, ChunkKey(fingerprint, sink, tuple(token_ids[start:stop]), self.namespace)) for start, stop in spans
        ]

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

    def weigh(self, key: ChunkKey, important_ratio: float) -> None:
        """Say which share of a chunk's tokens turned out to be important, for the policy "importance".

        Args:
            key: which chunk.
            important_ratio: 0 to 1.
        """
        self._stack.weigh(key.digest, min(1.0, max(0.0, important_ratio)))

    def close(self) -> None:
        """Flush for 30 s at most, save the index, and let go of memory and connections; closing twice is allowed."""
        self._stack.close(FLUSH_S)
        self._catalog.save()

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
