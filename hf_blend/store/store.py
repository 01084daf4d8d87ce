# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The chunk store that users open: chunk KV in memory and on disk, verified on every load.

A fault costs time, never correctness: whatever is missing, damaged, foreign or unreadable is a miss with a reason.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from torch import nn

from ..anatomy import default_sink
from ..errors import ConfigError, PromptError, StoreError, suggest
from .catalog import Catalog
from .chunk import ChunkKey, ChunkKV
from .header import hash_namespace
from .location import resolve_location
from .stack import TierStack
from .tally import Tally
from .tiers.disk import DiskTier
from .tiers.memory import MemoryTier, default_memory_bytes

__all__ = ["ChunkStore", "EntryInfo"]

_DURABILITIES = ("full", "none")


@dataclass(frozen=True)
class EntryInfo:
    """One stored chunk, for lists.

    Attributes:
        digest: of its key.
        fingerprint: of its model.
        tokens: its length in tokens.
        nbytes: its size in bytes.
        tier: where it is: memory, disk, or memory+disk.
        created: when it was stored, seconds since 1970.
    """

    digest: str
    fingerprint: str
    tokens: int
    nbytes: int
    tier: str
    created: float


class ChunkStore:
    """KV of chunks by what they were computed from. Open one with `ChunkStore.open`; threads may share it.

    Args:
        memory: the tier that is asked first.
        disk: the tier behind it, or None.
        namespace: only chunks of this namespace are seen.
    """

    def __init__(self, memory: MemoryTier, disk: DiskTier | None = None, *, namespace: str = "") -> None:
        self.namespace = namespace
        self._memory = memory
        self._tally = Tally()
        snapshot = disk.root / "index" / f"{hash_namespace(namespace)[:32]}.index" if disk else None
        self._catalog = Catalog(namespace, disk, snapshot, memory.contains)
        self._stack = TierStack(memory, disk, self._catalog, self._tally)
        if disk:
            self._tally.count("removed", "orphans", disk.reclaim())

    @classmethod
    def open(
        cls,
        location: str | Path | None = None,
        *,
        memory_bytes: int | None = None,
        durability: str = "full",
        namespace: str = "",
    ) -> Self:
        """Open a store, making it if it does not exist.

        Args:
            location: a directory; "memory://" keeps nothing on disk; None is `$HF_BLEND_HOME`, or else the assets
                folder of the Hugging Face cache.
            memory_bytes: most that the memory tier may hold; None is a quarter of what is available.
            durability: "full" makes a stored chunk survive a power loss, "none" is for scratch; neither ever gives
                wrong KV.
            namespace: keeps tenants apart: no chunk is seen from another namespace.

        Returns:
            The store.

        Raises:
            ConfigError: an argument is out of range, or the location is of a kind that does not exist.
            StoreError: nothing can be kept at the location.
        """
        if durability not in _DURABILITIES:
            raise ConfigError(f"no durability named {durability!r}. {suggest(str(durability), _DURABILITIES)}")
        if memory_bytes is not None and memory_bytes < 0:
            raise ConfigError(
                f"memory_bytes is {memory_bytes}, wanted 0 or more. Leave it out for a quarter of memory."
            )
        memory = MemoryTier(default_memory_bytes() if memory_bytes is None else memory_bytes)
        root = resolve_location(location)
        disk = DiskTier(root, durable=durability == "full") if root else None
        return cls(memory, disk, namespace=namespace)

    def get(self, key: ChunkKey) -> ChunkKV | None:
        """Fetch a chunk. Its tensors are shared: never write to them.

        Args:
            key: which chunk.

        Returns:
            The chunk exactly as it was stored, or None; a fault never raises, it is counted and is a miss.
        """
        if key.namespace != self.namespace:
            self._stack.miss("namespace")
            return None
        return self._stack.get(key)

    def put(self, chunk: ChunkKV) -> None:
        """Store a chunk. If the disk fails, the chunk stays in memory and the failure is counted.

        Args:
            chunk: computed alone (`hf_blend.capture`); it is copied.

        Raises:
            StoreError: the chunk holds NaN or infinity, is malformed, or belongs to another namespace.
        """
        key = chunk.key
        if key.namespace != self.namespace:
            raise StoreError(
                f"chunk {key.digest} belongs to another namespace than this store. Open a store with the chunk's "
                "namespace, or compute the chunk for the store's."
            )
        chunk.check()
        self._stack.put(chunk)

    def add(
        self,
        model: nn.Module,
        tokenizer: Any,
        chunks: Sequence[str | Sequence[int]],
        *,
        sink_ids: Sequence[int] | None = None,
    ) -> list[ChunkKey]:
        """Compute and store chunks ahead of time; those that are stored already cost nothing.

        Args:
            model: the model that will use them.
            tokenizer: for chunks that are text; None if all are ids.
            chunks: texts or token ids, none empty.
            sink_ids: tokens that stand before each chunk while it is computed; None is the model's BOS, if any.

        Returns:
            The keys of the chunks, in their order.

        Raises:
            PromptError: `chunks` is not a list, or a chunk is empty or too long for the model.
            StoreError: a chunk's KV holds NaN or infinity.
        """
        from ..capture import capture_chunk
        from ..fingerprint import fingerprint
        from ..prompt import tokenize

        if isinstance(chunks, str):
            raise PromptError(f"chunks is the text {chunks!r:.60}, wanted a list of chunks. Write [text].")
        identity = fingerprint(model)
        sink = default_sink(model) if sink_ids is None else tuple(sink_ids)
        keys = [ChunkKey(identity, sink, tokenize(tokenizer, chunk), self.namespace) for chunk in chunks]
        for key in dict.fromkeys(keys):
            if not self.contains(key):
                self.put(capture_chunk(model, key.token_ids, key.sink_ids, identity, self.namespace))
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
        try:
            return self._stack.delete(key.digest)
        except OSError as error:
            raise StoreError(
                f"chunk {key.digest} cannot be removed: {error}. Check who owns the files of the store."
            ) from error

    def entries(self) -> Iterator[EntryInfo]:
        """Walk over what is stored in this namespace, in the order of digests."""
        for digest, record in self._catalog.items():
            where = (("memory", self._memory.contains(digest)), ("disk", self._catalog.is_listed(digest)))
            tier = "+".join(name for name, there in where if there)
            yield EntryInfo(digest, record.fingerprint, record.tokens, record.nbytes, tier, record.created)

    def stats(self) -> dict[str, Any]:
        """Count what happened since opening, and what is held now.

        Returns:
            `hits`, `stored` and `evicted` by tier, `misses` by reason, `store_failures` by error, `removed` by cause
            (corrupt, orphans), `entries`, and `bytes` and `capacity_bytes` by tier.
        """
        groups = ("hits", "misses", "stored", "store_failures", "evicted", "removed")
        records = self._catalog.items()
        disk_bytes = sum(record.nbytes for digest, record in records if self._catalog.is_listed(digest))
        return {
            **{group: self._tally.group(group) for group in groups},
            "entries": len(records),
            "bytes": {"memory": self._memory.nbytes, "disk": disk_bytes},
            "capacity_bytes": {"memory": self._memory.cap_bytes},
        }

    def close(self) -> None:
        """Save the index and let go of the memory; closing twice is allowed."""
        self._catalog.save()
        self._memory.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __bool__(self) -> bool:
        return True  # an empty store is a store: `store or other` must not drop it

    def __len__(self) -> int:
        return len(self._catalog.items())
