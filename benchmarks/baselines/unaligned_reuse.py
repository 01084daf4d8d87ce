# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Full reuse with keys left at the positions where they were computed, as PromptCache does behind its first chunk."""

from dataclasses import replace
from typing import Any

from hf_blend.config import BlendConfig
from hf_blend.evaluation.methods.base import Blended
from hf_blend.store.chunk import ChunkKV


class UnalignedReuse(Blended):
    """What realigning alone is worth shows beside full reuse."""

    config = BlendConfig(recompute_ratio=0.0, selector="none")

    def __init__(self, model: Any, tokenizer: Any, store: Any, max_new_tokens: int) -> None:
        """Read from the store chunks that say that their layers do not rotate."""
        super().__init__(model, tokenizer, _Unaligned(store), max_new_tokens)


def _unrotated(chunk: ChunkKV) -> ChunkKV:
    """The chunk, which says of each of its layers that it does not rotate."""
    return replace(chunk, layer_table=(-1,) * len(chunk.layer_table))


class _Unaligned:
    """A store whose chunks all say that their layers do not rotate."""

    def __init__(self, store: Any) -> None:
        self._store = store

    at_hand = staticmethod(lambda *_: {})  # `stream` gives all

    def stream(self, key: Any, layout: Any) -> ChunkKV | None:
        chunk = self._store.stream(key, layout)
        return None if chunk is None else _unrotated(chunk)

    def put(self, chunk: ChunkKV) -> ChunkKV:
        return _unrotated(self._store.put(chunk))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)
