# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Reusing a conversation's cache for a prompt that is almost the same: edited, cut, or with something put in.

`blended` finds matching runs at any index and has a share of their tokens recomputed, because they lost, or gained,
what is before them. llama.cpp's `--cache-reuse` only moves them, so that they remember what was cut out.
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
from ..prompt.history import History
from ..prompt.pieces import TextPrompt
from ..store import ChunkStore
from ..store.chunk import ChunkKey, ChunkKV
from .sequence_cache import SequenceCache
from .tables import TableSource

MIN_RUN_TOKENS = 32  # shorter runs are mostly chance, and moving them is not worth what it does to the answer


def blended(cache: SequenceCache, token_ids: Sequence[int], **settings: Any) -> BlendCache:
    """Make a blend cache for a prompt out of what a conversation's cache holds, which stays as it is.

    It brings the matching runs along: the common prefix exactly, the others blended. Shorter ones are computed.
    """
    cache.compact()
    cached, expected = cache.tokens(), list(token_ids)
    _refuse_unknown(cache, cached)
    store = ChunkStore.open("memory://", memory_bytes=1 << 62)  # of this request alone: what is in it saw a context
    for start, at, tokens in SequenceMatcher(None, cached, expected, autojunk=False).get_matching_blocks():
        is_prefix = start == at == 0
        if tokens and (is_prefix or tokens >= MIN_RUN_TOKENS):
            store.put(chunk_of(cache, start, start + tokens))
    return BlendCache(cache.model, store, **{**settings, "chunk_prefix_ids": ()})


def continued(cache: SequenceCache, store: ChunkStore, **settings: Any) -> BlendCache:
    """Make a blend cache that holds what the active sequence holds, for a prompt with chunks behind it.

    Pass `history=[cache.tokens()]` to its `inputs`, or a prompt that begins so to `expect`; `take_back` brings what it
    computed into the sequence.
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
    """Let a blend cache expect a prompt, of which it holds the `history`; gives `input_ids` and `attention_mask`."""
    ids = torch.tensor([prompt.history])
    return blend.expect(tokenizer, [prompt], History(ids, torch.ones_like(ids)) if prompt.history else None)


def take_back(cache: SequenceCache, blend: BlendCache, token_ids: Sequence[int], more: int = 0) -> None:
    """Let the active sequence hold the tokens that a blend cache holds behind it, but for the last `more`."""
    stop, start = -more or None, -more - len(token_ids)
    layers: list[Any] = blend.layers
    states = [(layer.keys[:, :, start:stop], layer.values[:, :, start:stop]) for layer in layers]
    cache.append(token_ids, states, blend.turns.author)


def chunk_of(cache: SequenceCache, start: int, stop: int) -> ChunkKV:
    """A part of the active sequence as a chunk of who computed it.

    It saw what stood before it: never put it into a shared store.
    """
    cache.refuse_extended()
    author = cache.computed_by(cache.active) or author_of(cache.model)
    ids, positions = tuple(cache.tokens()[start:stop]), torch.tensor(cache.positions()[start:stop])
    tables, layer_table = distinct_tables(TableSource.of(cache.model, below_regime=True).tables(positions))
    pairs = [(layer.keys[0], layer.values[0]) for layer in cache.materialize()]  # type: ignore[index]
    layers = tuple((keys[:, start:stop].clone(), values[:, start:stop].clone()) for keys, values in pairs)
    return ChunkKV(ChunkKey(author.stored_name(), (), ids), layers, tables, layer_table)


def _refuse_unknown(cache: SequenceCache, cached: list[int]) -> None:
    refuse_placeholders(cache.model, cached, "the cache")
    unknown = sum(token < 0 for token in cached)
    if unknown:
        raise ConfigError(
            f"the cache holds {unknown} tokens whose ids are not known. Fill it through generate() or inside "
            "`with cache:`."
        )
