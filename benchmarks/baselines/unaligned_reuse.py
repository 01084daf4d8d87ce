# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Full reuse with keys left at the positions where they were computed, as PromptCache does behind its first chunk."""

from collections.abc import Callable
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


class _Unaligned:
    """Chunks that are missing are computed and stored first, and then count as loaded."""

    def __init__(self, store: Any) -> None:
        self._store = store

    at_hand = staticmethod(lambda *_: {})  # `stream` gives all

    def stream(self, key: Any, recompute: Callable[[], ChunkKV], **given: Any) -> ChunkKV:
        chunk = self._store.stream(key, recompute, **given) or self._store.put(recompute())
        return replace(chunk, layer_table=(-1,) * len(chunk.layer_table))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)
