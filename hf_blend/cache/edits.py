# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What a cache and a prompt that departs from it have in common behind the first edit, as chunks that are moved.

K and V of a run of equal tokens are copied out of the layers before the cache is cropped. In the prompt they are a
chunk like a stored one: its keys are rotated to their new positions, and some of its tokens are computed again. They
have seen what was before them: also what the prompt has no more. `heal` makes them exact.

Runs of equal ids are found by a rolling hash, and compared id by id: no hash is trusted.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .. import plugins
from ..errors import PromptError, UnsupportedModelError
from ..model.capture import layout_of
from ..prefill.request import NO_EDIT, Edit
from ..prompt.pieces import Prompt, shared_tokens
from ..store.chunk import ChunkKey, ChunkKV
from .layers import BlendLayer
from .quantised_layer import QuantisedLayer
from .state import BlendState

MOVABLE = (BlendLayer, QuantisedLayer)  # layers that keep K and V of every token, and nothing else
LEAST_TOKENS = 33  # of a run: shorter ones cost more to repair than to compute
_BASE = 0x9E3779B97F4A7C15  # of the hash; odd, so that it has an inverse modulo 2^64
_INVERSE = pow(_BASE, -1, 1 << 64)
_MOST_ALIKE = 4  # positions with equal windows that are compared; a text that repeats itself has thousands


class Run(NamedTuple):
    """Tokens of a prompt that a cache has, too."""

    start: int  # in the prompt
    held: int  # in the cache
    tokens: int


def edit_of(state: BlendState, prompts: Sequence[Prompt], shared: int) -> Edit:
    """Copy what a cache has of a prompt behind the `shared` tokens that both begin with, if the config says so.

    Nothing in the cache changes; the reason says what kept it from being moved.
    """
    if state.config.edits != "blend" or shared >= state.kv.length:
        return NO_EDIT
    reason = _why_computed(state, prompts)
    if reason:
        return Edit(fallback_reason=f"what is behind an edit was computed: {reason}")
    ids = prompts[0].ids
    author = state.author
    runs = []
    for run in common_runs(state.tokens.rows()[0], ids[shared:-1]):
        runs.append(run._replace(start=shared + run.start))
    if not runs or author is None:
        return NO_EDIT
    keys = []
    for run in runs:
        key = ChunkKey(author.fingerprint, (), ids[run.start : run.start + run.tokens], state.store.namespace)
        keys.append(key)
    try:
        chunks = copy_columns(state, [run.held for run in runs], keys)
    except (UnsupportedModelError, PromptError) as error:  # keys that cannot be moved
        return Edit(fallback_reason=f"what is behind an edit was computed: {error}")
    return Edit({run.start: chunk for run, chunk in zip(runs, chunks, strict=True)}, author)


def _why_computed(state: BlendState, prompts: Sequence[Prompt]) -> str:
    """Say why nothing of a cache can be moved; empty if it can."""
    if len(prompts) != 1 or state.kv.batch_size != 1 or state.tokens.is_padded():
        return f"the cache holds {state.kv.batch_size} requests or padding. Pass each prompt with a cache of its own."
    for index, layer in enumerate(state.kv.of_tokens):
        if type(layer) not in MOVABLE:
            kept = "a window, a state, or K and V elsewhere"
            return f"layer {index} is a {type(layer).__name__}, which keeps {kept}, not those of all tokens beside it."
    if state.info.ignores_states:
        return f"the code of {state.info.config.model_type} models continues a cache by one token at a time only."
    if state.tokens.is_extended or state.store.loads_in_part:
        return "the cache has seen self_extend, or its store loads chunks in part."
    lengths = (1, state.kv.length, len(prompts[0].ids))
    if not state.has_one_regime(*lengths):
        return f"rotary frequencies differ between prompts of {lengths[1]} and {lengths[2]} tokens."
    return ""


@torch.no_grad()
def copy_columns(state: BlendState, starts: Sequence[int], keys: Sequence[ChunkKey]) -> list[ChunkKV]:
    """Copy K and V from some columns on, each as the chunk of a key, with the rotary tables of their positions.

    The cache holds one request without padding, so a column is a position. Raises UnsupportedModelError or PromptError
    where the tables are not known.
    """
    # Columns of all chunks side by side
    ranges = [torch.arange(start, start + len(key.token_ids)) for start, key in zip(starts, keys, strict=True)]
    columns = torch.cat(ranges)
    layers: list[tuple[Tensor, ...]] = []
    for layer in state.kv.all:
        states = []
        if layer in state.kv.of_tokens:
            columns = columns.to(layer.device)
            states = [kept[0].index_select(1, columns) for kept in (layer.keys, layer.values)]
        layers.append(tuple(states))

    # The tables of these positions, made as for the whole cache
    source = plugins.extension("context.tables").TableSource.of(state.model, below_regime=True)
    positions = torch.arange(state.kv.length)
    layer_table = layout_of(state.model).layer_table
    tables = []
    for number in range(max(layer_table, default=-1) + 1):
        table = source.table(layer_table.index(number), positions)
        tables.append(tuple(part[columns.to(part.device)].float() for part in table))

    chunks = []
    start = 0
    for key in keys:
        here = slice(start, start + len(key.token_ids))
        start = here.stop
        of_key = tuple(tuple(part[:, here] for part in states) for states in layers)
        chunks.append(ChunkKV(key, of_key, tuple((cos[here], sin[here]) for cos, sin in tables), layer_table))
    return chunks


def common_runs(held_ids: Sequence[int], prompt_ids: Sequence[int], least: int = LEAST_TOKENS) -> list[Run]:
    """Find the runs of at least `least` tokens that a prompt shares with cached ids, at any position of these.

    From left to right in the prompt, without overlap, each as long as it goes: no token between two runs begins
    another. Where the cache has a window several times, the next behind the run before it is tried first.
    """
    held = np.asarray(held_ids, np.int64)
    prompt = np.asarray(prompt_ids, np.int64)
    if min(len(held), len(prompt)) < least:
        return []

    # Windows of the prompt that the cache has
    held_hashes = _hashes(held, least)
    prompt_hashes = _hashes(prompt, least)
    order = np.argsort(held_hashes, kind="stable")
    ordered = held_hashes[order]
    first = np.searchsorted(ordered, prompt_hashes)
    hits = np.flatnonzero(ordered.take(first, mode="clip") == prompt_hashes)

    # The longest run from each, as far as the one before it has not covered it
    runs: list[Run] = []
    stop = held_stop = number = 0
    while number < len(hits):
        start = int(hits[number])
        last = np.searchsorted(ordered, prompt_hashes[start], "right")
        alike = order[first[start] : last]
        behind = int(np.searchsorted(alike, held_stop))
        tried = [*alike[behind : behind + _MOST_ALIKE], *alike[:behind]][:_MOST_ALIKE]
        lengths = [shared_tokens(held[position:], prompt[start:]) for position in tried]
        tokens = max(lengths)
        stop = start + 1
        if tokens >= least:
            position = int(tried[lengths.index(tokens)])
            runs.append(Run(start, position, tokens))
            stop = start + tokens
            held_stop = position + tokens
        number = int(np.searchsorted(hits, stop))
    return runs


def _hashes(ids: np.ndarray, width: int) -> np.ndarray:
    """`[tokens - width + 1]`: a hash of `width` ids from each position on; ids are `[tokens]`."""
    powers = np.full(len(ids), _BASE, np.uint64)
    powers[0] = 1
    shifts = np.full(len(ids) - width + 1, _INVERSE, np.uint64)
    shifts[0] = 1
    sums = np.zeros(len(ids) + 1, np.uint64)
    np.cumsum(ids.astype(np.uint64) * np.multiply.accumulate(powers), out=sums[1:])
    hashes: np.ndarray = (sums[width:] - sums[:-width]) * np.multiply.accumulate(shifts)
    return hashes
