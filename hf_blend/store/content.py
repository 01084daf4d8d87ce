# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Recognising stored chunks inside any list of tokens, by content and at any offset, in one pass over a prompt.

A chunk whose first or last tokens differ in a prompt, as a tokenizer makes them where texts are joined, is recognised
by one window a few tokens behind its beginning, which no seam reaches. From there the run of equal tokens is followed
in both directions.
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

__all__ = [
    "BEHIND",
    "WINDOW",
    "Run",
    "hashes",
    "pack_tokens",
    "run_around",
    "unpack_tokens",
    "window_of",
    "without_overlap",
]

WINDOW = 8  # tokens; stored chunks are recognised by windows of so many, and whole ones by so many of their first
BEHIND = 16  # tokens behind a window, by which chunks that share it are told apart
EDGE_TOKENS = 8  # so many of the first tokens may differ
_LEAST_TOKENS = 16  # a shorter run is used only where nearly all of the chunk is in it
_LEAST_SHARE = 4  # … and one of less than a quarter never: reading the entry would cost more than it saves
_WIDTH = 4  # bytes of a packed token
_FACTORS = np.random.default_rng(0).integers(1, 1 << 62, BEHIND, dtype=np.uint64) * np.uint64(2) + np.uint64(1)


class Run(NamedTuple):
    """Tokens of a stored chunk that are in a prompt."""

    start: int
    packed: bytes
    first: int
    tokens: int

    @property
    def stop(self) -> int:
        """The position in the prompt behind the last token."""
        return self.start + self.tokens

    @property
    def is_worth_reading(self) -> bool:
        """Whether it is enough of the chunk."""
        size = len(self.packed) // _WIDTH
        is_long = self.tokens >= _LEAST_TOKENS and self.tokens * _LEAST_SHARE >= size
        return self.tokens > 0 and (is_long or size - self.tokens <= min(EDGE_TOKENS, size // 2))

    def between(self, start: int, stop: int) -> "Run":
        """The part of it that lies between two positions of the prompt."""
        first, last = max(start, self.start), min(stop, self.stop)
        return Run(first, self.packed, self.first + first - self.start, max(0, last - first))


def without_overlap(runs: Iterable[Run]) -> list[Run]:
    """Choose a chunk for each token of a prompt: the longest run first, shorter ones keep what does not overlap."""
    chosen: list[Run] = []
    for run in sorted(runs, key=lambda span: (-span.tokens, span.start, span.first)):
        offset = bisect_left(chosen, run.start, key=lambda span: span.start)
        left = chosen[offset - 1].stop if offset else 0
        right = chosen[offset].start if offset < len(chosen) else run.stop
        rest = run.between(left, right)
        if rest == run or rest.is_worth_reading:
            chosen.insert(offset, rest)
    return chosen


def hashes(ids: np.ndarray, width: int) -> np.ndarray:
    """`[tokens - width + 1]`: the 64-bit hash of `width` tokens at each position.

    Shapes: ids `[tokens]`.
    """
    values, count = ids.astype(np.uint64), max(0, len(ids) - width + 1)
    sums = np.zeros(count, np.uint64)
    for number, factor in enumerate(_FACTORS[:width]):
        sums += values[number : number + count] * factor
    return sums


def window_of(ids: np.ndarray) -> int | None:
    """Give the offset of the window by which a chunk is recognised.

    None where there are too few tokens, or so few different ones in it that it would be found everywhere.
    """
    offset = max(0, min(EDGE_TOKENS, (len(ids) - WINDOW) // 2))
    window = ids[offset : offset + WINDOW]
    if len(window) < WINDOW or len(np.unique(window)) <= WINDOW // 4:
        return None
    return offset


def run_around(packed: bytes, prompt: bytes, position: int, offset: int) -> Run:
    """Give the run of equal tokens around a window, at a position of the prompt and at an offset of the chunk."""
    start, inside = _WIDTH * position, _WIDTH * offset
    behind = _agreement(packed[inside:], prompt[start : start + len(packed) - inside])
    before = _agreement(packed[:inside], prompt[max(0, start - inside) : start], from_end=True)
    return Run(position - before, packed, offset - before, before + behind)


def _agreement(left_ids: bytes, other: bytes, from_end: bool = False) -> int:
    """Count the equal tokens at the beginning of both, or at their end."""
    size = min(len(left_ids), len(other))
    if not size:
        return 0
    pair = (left_ids[-size:], other[-size:]) if from_end else (left_ids[:size], other[:size])
    left, right = (np.frombuffer(ids, np.int32) for ids in pair)
    differs = left[::-1] != right[::-1] if from_end else left != right
    first = int(differs.argmax())
    return first if differs[first] else size // _WIDTH


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Token ids as bytes, 4 each, so that comparing chunks is comparing bytes."""
    return array("i", token_ids).tobytes()


def unpack_tokens(packed: bytes) -> tuple[int, ...]:
    """The token ids that `pack_tokens` packed."""
    return tuple(array("i", packed))
