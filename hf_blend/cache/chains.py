# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Chains: K and V that are exact behind the tokens before them, kept in the store link by link.

A link is a chunk whose key names all tokens before it. It ends where a chunk of the prompt does, so that the planner
finds the longest chain of a prompt by its chunks. What is kept was computed by healing, behind exact entries of the
store: nothing that the caller's own forward computed has a way in.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from ..model.capture import canary_of
from ..prefill.plan import PlacedChunk
from ..store.chunk import CHAIN, ChunkKey
from .edits import copy_columns
from .state import BlendState


def link_ends(chunks: Sequence[PlacedChunk]) -> tuple[int, ...]:
    """Where links of one prompt may end, which begins with its first token; first, up to where all is exact."""
    exact = 0
    ends = []
    for placed in chunks:
        if placed.exact and placed.start == exact:
            exact = placed.columns.stop
        else:
            ends.append(placed.columns.stop)
    return (exact, *ends)


def store_links(state: BlendState, healed: int) -> None:
    """Store the links of the prompt that end among the first `healed` columns, which are exact."""
    author = state.author
    ends = [end for end in state.link_ends if end <= healed]
    state.link_ends = state.link_ends[max(0, len(ends) - 1) :]
    for start, stop in pairwise(ends):
        ids = state.tokens.rows(state.info.placeholders)[0]
        if author is None or len(ids) < stop:
            return
        key = ChunkKey(author.fingerprint + CHAIN, tuple(ids[:start]), tuple(ids[start:stop]), state.store.namespace)
        if not state.store.contains(key):
            (link,) = copy_columns(state, [start], [key])
            state.store.put(replace(link, canary=canary_of(state.model)))
