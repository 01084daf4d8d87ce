# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Warnings of a prompt and a store that do not fit each other."""

import logging
import reprlib
from collections.abc import Iterable, Sequence
from functools import cache

from ..store import ChunkStore

NOTHING_REUSED = "no stored chunk is reused: "  # before a reason

OTHER_IDS = (
    "the model was called with other ids than those of the prompt that inputs() built, so only stored chunks are "
    "reused, wherever they are found. Pass what inputs() returned."
)

UNEVEN = (
    "some stored chunks are computed: their position_ids do not count up by 1, so their tokens are at other distances "
    "from each other than they were stored at. Leave position_ids out, or let them count up by 1 inside each chunk."
)


@cache
def warn_once(notice: str) -> None:
    """Log a notice as a warning, once for each text in this process."""
    logging.getLogger(__name__).warning("%s", notice)


def why_nothing_found(store: ChunkStore, fingerprint: str, chunk_prefix_ids: Sequence[int], tokenizer: str) -> str:
    """Why nothing of a prompt is in a store."""
    here, everywhere = store.known(fingerprint)
    if not everywhere:
        return ""
    if not here:
        return (
            f"the store holds {everywhere} chunks, but none of this model: weights, adapter or code are others. Add "
            "the documents with this model."
        )
    key = store.sample(fingerprint, chunk_prefix_ids)
    other = store.sample(fingerprint, store.longest_prefix(fingerprint)) if key is None else key
    chunk = store.get(other) if tokenizer and other is not None else None
    stored = {tokenizer, ""} if chunk is None else {chunk.tokenizer}
    named = other_tokenizers(stored, tokenizer) if stored.isdisjoint((tokenizer, "")) else ""
    if key is None and not named:
        return (
            f"the store holds {here} chunks of this model, but none behind chunk_prefix_ids="
            f"{reprlib.repr(tuple(chunk_prefix_ids))}. Use the chunk_prefix_ids that they were added with, or the "
            "tokenizer: without one chunks are behind BOS alone."
        )
    return f"the store holds {here} chunks of this model, but none of them is in the prompt. " + (
        f"{named[0].upper()}{named[1:]}" if named else "Put the documents into it as they were added."
    )


def other_tokenizers(others: Iterable[str], tokenizer: str) -> str:
    """Name the tokenizers that chunks were stored with, which are not the prompt's."""
    return (
        f"chunks were stored with another tokenizer ({', '.join(sorted(others))}) than this one ({tokenizer}): their "
        "ids may not be in its prompts. Add the documents with the tokenizer that is used."
    )


def too_small(kept_ratio: float) -> str:
    """Say that a store has no room for all chunks of a prompt."""
    return (
        f"the store has room for {kept_ratio:.0%} of this prompt's chunks: the others are computed for every prompt "
        "that has them. Give ChunkStore.open more memory_bytes or disk_bytes."
    )


def other_author(cached: int, computed: int) -> str:
    """Say how many of the cached tokens are computed again; empty where none is."""
    if computed <= 0:
        return ""
    return (
        f"{computed} of {cached} tokens that were held are computed again: the model was another one when it computed "
        "them (adapter, weights, dtype, code or attention)."
    )
