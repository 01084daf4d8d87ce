# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Compute and store the chunks of a corpus ahead of time, by one process or by many; what `hf-blend index` does."""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from hf_blend import ChunkStore
from hf_blend.errors import ConfigError, StoreError
from hf_blend.model.fingerprint import fingerprint
from hf_blend.prompt.pieces import tokenize
from hf_blend.store import ChunkKey

from .answering import token_bytes
from .bundled import handbook_pages
from .documents import Document
from .retrieving import Piece, closed
from .sources import Source, Sources


@dataclass(frozen=True)
class Shard:
    """The chunks that one of several processes computes: those whose digest says so. Processes need not talk."""

    number: int = 0
    count: int = 1

    @classmethod
    def find(cls, text: str | None = None) -> "Shard":
        """Find out which share is this process's."""
        shard = text or f"{os.environ.get('RANK', 0)}/{os.environ.get('WORLD_SIZE', 1)}"
        number, _, count = shard.partition("/")
        if not (number.isdecimal() and count.isdecimal() and int(number) < int(count)):
            raise ConfigError(f"the shard {shard!r} is not NUMBER/COUNT with a number from 0 on, such as 0/4.")
        return cls(int(number), int(count))

    def owns(self, key: ChunkKey) -> bool:
        """Say whether a chunk is this process's."""
        return int(key.digest[:16], 16) % self.count == self.number


@dataclass(frozen=True)
class Estimate:
    """What storing some pieces takes."""

    pieces: int
    tokens: int
    nbytes: int

    @classmethod
    def of(cls, pieces: Iterable[Piece], model: nn.Module) -> "Estimate":
        """Count tokens, each once where pieces are the same, and the bytes of their K and V."""
        unlike = {piece.ids for piece in pieces}
        tokens = sum(map(len, unlike))
        return cls(len(unlike), tokens, tokens * token_bytes(model))


@dataclass
class Indexed:
    """What came of it."""

    chunks: int = 0
    tokens: int = 0
    stored: int = 0
    present: int = 0
    refused: int = 0


class Indexer:
    """Stores every piece of a corpus that is not stored yet. Stopped at any time, it continues where it was."""

    def __init__(
        self, model: nn.Module, tokenizer: Any, store: ChunkStore, pieces: Sequence[Piece], shard: Shard = Shard()
    ) -> None:
        self.model, self.tokenizer, self.store = model, tokenizer, store
        self.fingerprint, sink = fingerprint(model), store.default_prefix(model, tokenizer)
        self._names = [(piece.name, ChunkKey(self.fingerprint, sink, piece.ids, store.namespace)) for piece in pieces]
        self._texts = {key: piece.prompt_text for (_, key), piece in zip(self._names, pieces, strict=True)}
        self.keys = list(self._texts)
        own = [key for key in self.keys if shard.owns(key)]
        self.missing = [key for key in own if not store.contains(key)]
        tokens = sum(len(key.token_ids) for key in self.keys)
        self.done = Indexed(len(self.keys), tokens, present=len(own) - len(self.missing))

    def probe_s(self) -> float:
        """Compute one missing chunk and throw it away."""
        if not self.missing:
            return 0.0
        longest = max(self.missing, key=lambda key: len(key.token_ids))
        with ChunkStore.open("memory://") as scratch:
            started = time.perf_counter()
            scratch.add(self.model, self.tokenizer, [self._texts[longest]], chunk_prefix_ids=longest.chunk_prefix_ids)
            seconds = time.perf_counter() - started
        return seconds * sum(len(key.token_ids) for key in self.missing) / len(longest.token_ids)

    def texts(self) -> list[str | Sequence[int]]:
        """List the texts of what is missing."""
        return [self._texts[key] for key in self.missing]

    def run(self, progress: Callable[[Iterable[ChunkKey]], Iterable[ChunkKey]] = iter) -> Indexed:
        """Compute and store what is missing."""
        for key in progress(self.missing):
            self.store.add(self.model, self.tokenizer, [self._texts[key]], chunk_prefix_ids=key.chunk_prefix_ids)
            if self.store.contains(key):
                self.done.stored += 1
            else:
                self.done.refused += 1
        return self.done

    def name_sources(self, documents: Iterable[Document], model: str, chunk_tokens: int) -> None:
        """Write down beside the store which document each chunk came from."""
        paths = {document.name: str(document.path.resolve()) if document.path else "" for document in documents}
        digests: dict[str, dict[str, None]] = {}
        for name, key in self._names:
            digests.setdefault(name, {})[key.digest] = None
        about = (model, self.fingerprint, chunk_tokens, time.time())
        Sources(self.store).add(
            Source(name, paths.get(name, ""), *about, tuple(chunk_digests)) for name, chunk_digests in digests.items()
        )


def check_room(store: ChunkStore, estimate: Estimate) -> None:
    """Refuse what a store's disk will not hold."""
    capacity = store.stats()["capacity_bytes"].get("disk")
    if capacity is not None and estimate.nbytes > capacity:
        raise StoreError(
            f"the corpus takes about {estimate.nbytes / 1e9:.1f} GB, but the store may hold {capacity / 1e9:.1f} GB: "
            "what it holds and half of what is free on its disk. Make room, give another --store, or index less."
        )


def bundled_pieces(tokenizer: Any) -> Iterator[Piece]:
    """Yield the pages of the bundled handbook, each a piece as the bundled questions use it."""
    for name, text in handbook_pages().items():
        yield Piece(name, 0, text, tokenize(tokenizer, closed(text)))
