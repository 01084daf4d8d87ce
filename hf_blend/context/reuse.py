# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Reusing a conversation's cache for a prompt that is almost the same: edited, cut, or with an insertion.

`blended` finds matching runs anywhere, and a share of their tokens is recomputed, because other tokens are before them
now. llama.cpp's `--cache-reuse` only moves the runs, whose K and V still depend on the old tokens.
"""

from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import Any

import torch
from transformers import BatchEncoding

from ..cache.blend_cache import BlendCache
from ..errors import ConfigError
from ..model.author import author_of
from ..model.capture import distinct_tables
from ..model.modality import refuse_placeholders
from ..prompt.history import UNKNOWN, History
from ..prompt.pieces import TextPrompt
from ..store import ChunkStore
from ..store.chunk import ChunkKey, ChunkKV
from .sequence_cache import SequenceCache
from .tables import TableSource

MIN_RUN_TOKENS = 32  # shorter runs are mostly chance, and moving them is not worth what it does to the answer


def blended(cache: SequenceCache, token_ids: Sequence[int], **settings: Any) -> BlendCache:
    """Make a blend cache for a prompt from a conversation's cache, which stays as it is.

    The common prefix is reused exactly, other runs of at least `MIN_RUN_TOKENS` are blended, and the rest is computed.
    """
    cache.compact()
    cached, expected = cache.tokens(), list(token_ids)
    refuse_placeholders(cache.model, cached, "the cache")
    if unknown := cached.count(UNKNOWN):
        raise ConfigError(
            f"the cache holds {unknown} tokens whose ids are not known. Fill it through generate() or inside "
            "`with cache:`."
        )
    store = ChunkStore.open("memory://", memory_bytes=1 << 62)  # of this request alone: what is in it saw a context
    for start, at, tokens in SequenceMatcher(None, cached, expected, autojunk=False).get_matching_blocks():
        is_prefix = start == at == 0
        if tokens and (is_prefix or tokens >= MIN_RUN_TOKENS):
            store.put(chunk_of(cache, start, start + tokens))
    return BlendCache(cache.model, store, **{**settings, "chunk_prefix_ids": ()})


def continued(cache: SequenceCache, store: ChunkStore, **settings: Any) -> BlendCache:
    """Make a blend cache with the tokens of the active sequence, for a prompt that continues it with chunks.

    Pass `history=[cache.tokens()]` to its `inputs`, or a prompt with this `history` to `expect`. Then `take_back`
    appends what it computed to the sequence.
    """
    cache.refuse_extended()
    if cache.positions() != list(range(cache.get_seq_length())):
        raise ConfigError(
            f"the active sequence ends at position {cache.positions()[-1]} and has {cache.get_seq_length()} tokens, "
            "but positions 0, 1, 2 … are expected before a chunk. Close the holes with shift()."
        )
    blend = BlendCache(cache.model, store, **settings)
    blend.turns.author = cache.computed_by(cache.active)
    blend.activate_past_recording()  # layers with windows keep all of the prompt, as the sequence does
    layers: list[Any] = blend.layers
    for layer, stored in zip(layers, cache.materialize(), strict=True):
        if stored.length and stored.keys is not None and stored.values is not None:
            layer.update(stored.keys, stored.values)
    return blend


def expect(blend: BlendCache, tokenizer: Any, prompt: TextPrompt) -> BatchEncoding:
    """Announce a prompt, of which the blend cache has the `history`; returns `input_ids` and `attention_mask`."""
    ids = torch.tensor([prompt.history])
    return blend.expect(tokenizer, [prompt], History(ids, torch.ones_like(ids)) if prompt.history else None)


def take_back(cache: SequenceCache, blend: BlendCache, token_ids: Sequence[int], more: int = 0) -> None:
    """Append the last tokens of a blend cache to the active sequence, but for the very last `more`."""
    stop, start = -more or None, -more - len(token_ids)
    layers: list[Any] = blend.layers
    states = [(layer.keys[:, :, start:stop], layer.values[:, :, start:stop]) for layer in layers]
    cache.append(token_ids, states, blend.turns.author)


def chunk_of(cache: SequenceCache, start: int, stop: int) -> ChunkKV:
    """A range of the active sequence as a chunk.

    Its K and V depend on the tokens before it: never put it into a shared store.
    """
    cache.refuse_extended()
    author = cache.computed_by(cache.active) or author_of(cache.model)
    ids, positions = tuple(cache.tokens()[start:stop]), torch.tensor(cache.positions()[start:stop])
    tables, layer_table = distinct_tables(TableSource.of(cache.model, below_regime=True).tables(positions))
    pairs = [(layer.keys[0], layer.values[0]) for layer in cache.materialize()]  # type: ignore[index]
    layers = tuple((keys[:, start:stop].clone(), values[:, start:stop].clone()) for keys, values in pairs)
    return ChunkKV(ChunkKey(author.stored_name(), (), ids), layers, tables, layer_table)
