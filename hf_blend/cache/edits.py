# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What a cache and a prompt that departs from it have in common behind the first edit.

Runs of equal ids are found by a rolling hash, and compared id by id: no hash is trusted.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

LEAST_TOKENS = 33  # of a run: shorter ones cost more to repair than to compute
_BASE = 0x9E3779B97F4A7C15  # of the hash; odd, so that it has an inverse modulo 2^64
_INVERSE = pow(_BASE, -1, 1 << 64)
_MOST_ALIKE = 4  # positions with equal windows that are compared; a text that repeats itself has thousands
_BLOCK = 256  # tokens that are compared first


class Run(NamedTuple):
    """Tokens of a prompt that a cache has, too."""

    start: int  # in the prompt
    held: int  # in the cache
    tokens: int


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
        lengths = [_agreement(held[position:], prompt[start:]) for position in tried]
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


def _agreement(left: np.ndarray, right: np.ndarray) -> int:
    """Count the equal ids at the beginning of both."""
    size = min(len(left), len(right))
    start = 0
    block = _BLOCK
    while start < size:
        stop = min(size, start + block)
        differs = np.flatnonzero(left[start:stop] != right[start:stop])
        if len(differs):
            return start + int(differs[0])
        start = stop
        block *= 4
    return size
