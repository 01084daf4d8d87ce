# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Reusing a conversation's cache for a prompt that is almost the same: edited, cut, or with something put in.

`reuse_prefix` is llama.cpp's `--cache-reuse`: the longest common prefix stays, matching runs behind it are moved up to
it, and nothing is computed for them, so they remember what was cut out. `blended` finds matching runs at any later
index too and has a share of their tokens recomputed, because they lost, or gained, what is before them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

import torch

from ..cache.blend_cache import BlendCache
from ..errors import ConfigError
from ..model.capture import distinct_tables
from ..model.fingerprint import fingerprint
from ..model.modality import refuse_placeholders
from ..store import ChunkStore
from ..store.chunk import ChunkKey, ChunkKV
from .sequence_cache import SequenceCache
from .tables import TableSource

MIN_RUN_TOKENS = 32  # shorter runs are mostly chance, and moving them is not worth what it does to the answer


@dataclass(frozen=True)
class ReusedPrefix:
    """What of a prompt a cache holds now: its first `prefix_tokens` exactly, `moved_tokens` behind them as moved."""

    prefix_tokens: int
    moved_tokens: int


def reuse_prefix(
    cache: SequenceCache, token_ids: Sequence[int], *, min_run_tokens: int = MIN_RUN_TOKENS
) -> ReusedPrefix:
    """Let a cache hold as much of a prompt as it can without computing anything.

    Afterwards `generate` with all of `token_ids` and this cache computes only the rest; at least one token is left.
    """
    held, expected = cache.tokens(), list(token_ids)[:-1]
    _check(cache, held, min_run_tokens)
    prefix = _common(held, expected)
    done, start = prefix, prefix  # tokens of the prompt, and the index behind them in what the cache held
    while start < len(held) and done < len(expected):
        run = _common(held[start:], expected[done:])
        if run < min_run_tokens:
            start += 1
            continue
        _close_up(cache, done, start - (len(held) - cache.get_seq_length()))
        done, start = done + run, start + run
    cache.crop(done - cache.get_seq_length())
    return ReusedPrefix(prefix, done - prefix)


def blended(
    cache: SequenceCache, token_ids: Sequence[int], *, min_run_tokens: int = MIN_RUN_TOKENS, **settings: Any
) -> BlendCache:
    """Make a blend cache for a prompt out of what a conversation's cache holds, which stays as it is.

    It brings the matching runs along: the common prefix exactly, the others blended. Shorter ones are computed.
    """
    cache.compact()
    held, expected = cache.tokens(), list(token_ids)
    _check(cache, held, min_run_tokens)
    store = ChunkStore.open("memory://", memory_bytes=1 << 62)  # of this request alone: what is in it saw a context
    for start, at, tokens in SequenceMatcher(None, held, expected, autojunk=False).get_matching_blocks():
        is_prefix = start == at == 0
        if tokens and (is_prefix or tokens >= min_run_tokens):
            store.put(chunk_of(cache, start, start + tokens))
    return BlendCache(cache.model, store, **{**settings, "chunk_prefix_ids": ()})


def continued(cache: SequenceCache, store: ChunkStore, **settings: Any) -> BlendCache:
    """Make a blend cache that holds what the active sequence holds, for a prompt with chunks behind it.

    Pass `history=[cache.tokens()]` to its `inputs`; `take_back` brings what it computed into the sequence.
    """
    cache.refuse_extended()
    if cache.positions() != list(range(cache.get_seq_length())):
        raise ConfigError(
            f"the active sequence ends at position {cache.positions()[-1]} and has {cache.get_seq_length()} tokens, "
            "but positions 0, 1, 2 … are expected before a chunk. Close the holes with shift()."
        )
    blend = BlendCache(cache.model, store, **settings)
    blend.activate_past_recording()  # layers with windows keep all of the prompt, as the sequence does
    layers: list[Any] = blend.layers
    for layer, held in zip(layers, cache.materialize(), strict=True):
        if held.length and held.keys is not None and held.values is not None:
            layer.update(held.keys, held.values)
    return blend


def take_back(cache: SequenceCache, blend: BlendCache, token_ids: Sequence[int], more: int = 0) -> None:
    """Let the active sequence hold the tokens that a blend cache holds behind it, but for the last `more`."""
    stop, start = -more or None, -more - len(token_ids)
    layers: list[Any] = blend.layers
    cache.append(token_ids, [(one.keys[:, :, start:stop], one.values[:, :, start:stop]) for one in layers])


def chunk_of(cache: SequenceCache, start: int, stop: int) -> ChunkKV:
    """A part of the active sequence as a chunk. It saw what stood before it: never put it into a shared store."""
    cache.refuse_extended()
    ids, positions = tuple(cache.tokens()[start:stop]), torch.tensor(cache.positions()[start:stop])
    tables, layer_table = distinct_tables(TableSource.of(cache.model, below_regime=True).tables(positions))
    pairs = [(layer.keys[0], layer.values[0]) for layer in cache.materialize()]  # type: ignore[index]
    layers = tuple((keys[:, start:stop].clone(), values[:, start:stop].clone()) for keys, values in pairs)
    return ChunkKV(ChunkKey(fingerprint(cache.model), (), ids), layers, tables, layer_table)


def _close_up(cache: SequenceCache, end: int, start: int) -> None:
    """Drop the columns from `end` to `start`, and move the rest up."""
    positions = cache.positions()
    if start > end:
        cache.remove(cache.active, positions[end], positions[start])
        cache.shift(cache.active, positions[start], None, positions[end] - positions[start])


def _common(held: Sequence[int], expected: Sequence[int]) -> int:
    """How many tokens agree from the first on."""
    pairs = zip(held, expected, strict=False)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(held), len(expected)))


def _check(cache: SequenceCache, held: list[int], min_run_tokens: int) -> None:
    refuse_placeholders(cache.model, held, "the cache")
    if min_run_tokens < 1:
        raise ConfigError(f"min_run_tokens is {min_run_tokens}, expected 1 or more.")
    unknown = sum(token < 0 for token in held)
    if unknown:
        raise ConfigError(
            f"the cache holds {unknown} tokens whose ids are not known. Fill it through generate() or inside "
            "`with cache:`."
        )
