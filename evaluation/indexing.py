# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Compute and store the chunks of a corpus ahead of time; what `hf-blend index` does."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from hf_blend import ChunkStore
from hf_blend.errors import StoreError
from hf_blend.model.identity import fingerprint
from hf_blend.prompt.pieces import tokenize
from hf_blend.store import ChunkKey

from .answering import token_bytes
from .bundled import handbook_pages
from .retrieving import Piece, closed


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

    def __init__(self, model: nn.Module, tokenizer: Any, store: ChunkStore, pieces: Sequence[Piece]) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.store = store
        self.token_bytes = token_bytes(model)
        self._pieces: dict[ChunkKey, Piece] = {}
        identity = fingerprint(model)
        prefix = store.default_prefix(model, tokenizer)
        for piece in pieces:
            key = ChunkKey(identity, prefix, piece.ids, store.namespace)
            self._pieces[key] = piece
        self.missing = [key for key in self._pieces if not store.contains(key)]
        tokens = sum(len(key.token_ids) for key in self._pieces)
        self.done = Indexed(len(self._pieces), tokens, present=len(self._pieces) - len(self.missing))

    @property
    def nbytes(self) -> int:
        """Bytes of K and V of all pieces."""
        return self.done.tokens * self.token_bytes

    def check_room(self) -> None:
        """Refuse what the store's disk will not hold."""
        capacity = self.store.stats()["capacity_bytes"].get("disk")
        if capacity is not None and self.nbytes > capacity:
            raise StoreError(
                f"the corpus takes about {self.nbytes / 1e9:.1f} GB, but the store may hold {capacity / 1e9:.1f} GB: "
                "what it holds and half of what is free on its disk. Make room, give another --store, or index less."
            )

    def estimated_s(self) -> float:
        """How long the missing chunks take, by one that is computed and thrown away."""
        if not self.missing:
            return 0.0
        longest = max(self.missing, key=lambda key: len(key.token_ids))
        with ChunkStore.open("memory://") as scratch:
            started = time.perf_counter()
            self._add(scratch, longest)
            seconds = time.perf_counter() - started
        return seconds * sum(len(key.token_ids) for key in self.missing) / len(longest.token_ids)

    def run(self, progress: Callable[[Iterable[ChunkKey]], Iterable[ChunkKey]] = iter) -> Indexed:
        """Compute and store what is missing."""
        for key in progress(self.missing):
            self._add(self.store, key)
            if self.store.contains(key):
                self.done.stored += 1
            else:
                self.done.refused += 1
        return self.done

    def _add(self, store: ChunkStore, key: ChunkKey) -> None:
        text = self._pieces[key].prompt_text
        store.add(self.model, self.tokenizer, [text], chunk_prefix_ids=key.chunk_prefix_ids)


def bundled_pieces(tokenizer: Any) -> Iterator[Piece]:
    """Yield the pages of the bundled handbook, each a piece as the bundled questions use it."""
    for name, text in handbook_pages().items():
        yield Piece(name, 0, text, tokenize(tokenizer, closed(text)))
