# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Finding chunks whose first or last tokens differ in a prompt, as a tokenizer makes them where texts are joined.

A chunk is recognised by one window a few tokens behind its beginning, which no seam reaches. From there the run of
equal tokens is followed in both directions. Chunks that share the window are kept sorted, so the one that agrees with
the prompt the furthest is the neighbour of where the prompt itself would be.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from .windows import WINDOW, WindowFilter

__all__ = ["EDGE_TOKENS", "Interiors", "Run", "without_overlap"]

EDGE_TOKENS = 8  # so many of the first tokens may differ
_LEAST_TOKENS = 16  # a shorter run is used only where nearly all of the chunk is in it
_LEAST_SHARE = 4  # … and one of less than a quarter never: reading the entry would cost more than it saves
_NEIGHBOURS = 2  # on each side of where the prompt would be; several chunks may agree with it equally far
_WIDTH = 4  # bytes of a packed token


class Run(NamedTuple):
    """Tokens of a stored chunk that are in a prompt."""

    start: int
    packed: bytes
    first: int
    tokens: int

    @property
    def stop(self) -> int:
        """The place in the prompt behind the last of them."""
        return self.start + self.tokens

    @property
    def is_worth_reading(self) -> bool:
        """Whether it is enough of the chunk."""
        size = len(self.packed) // _WIDTH
        is_long = self.tokens >= _LEAST_TOKENS and self.tokens * _LEAST_SHARE >= size
        return self.tokens > 0 and (is_long or size - self.tokens <= min(EDGE_TOKENS, size // 2))

    def between(self, start: int, stop: int) -> "Run":
        """The part of it that lies between two places of the prompt."""
        first, last = max(start, self.start), min(stop, self.stop)
        return Run(first, self.packed, self.first + first - self.start, max(0, last - first))


class Interiors:
    """The chunks of one model and sink, by a window inside each; those of fewer tokens than a window are not here."""

    def __init__(self) -> None:
        self._filter = WindowFilter(WINDOW)
        self._chunks: dict[int, dict[bytes, list[bytes]]] = {}  # offset of the window → window → chunks, sorted
        self._most_bytes = 0  # of a chunk

    def add(self, packed: bytes) -> None:
        """Make a chunk findable, unless its window repeats so few tokens that it would be seen everywhere."""
        offset, window = _window_of(packed)
        if not _is_telling(window):
            return
        insort(self._chunks.setdefault(offset, {}).setdefault(window, []), packed, key=lambda one: one[offset:])
        self._filter.add(window)
        self._most_bytes = max(self._most_bytes, len(packed))

    def discard(self, packed: bytes) -> None:
        """Forget a chunk that was added."""
        offset, window = _window_of(packed)
        if _is_telling(window):
            self._chunks[offset][window].remove(packed)
            if not self._chunks[offset][window]:
                del self._chunks[offset][window]

    def find(self, ids: np.ndarray) -> Iterator[Run]:
        """The longest run at every place where a window is, of those that are long enough.

        Shapes: ids `[tokens]`.
        """
        raw, done = ids.tobytes(), dict[tuple[int, bytes], int]()
        for at in (_WIDTH * self._filter.positions(ids)).tolist():
            window, rest = raw[at : at + _WIDTH * WINDOW], raw[at : at + self._most_bytes]
            for offset, chunks in self._chunks.items():
                if window not in chunks or at < done.get((offset, window), 0):
                    continue
                near = bisect_left(chunks[window], rest, key=lambda one: one[offset:])
                like = chunks[window][max(0, near - _NEIGHBOURS) : near + _NEIGHBOURS]
                run = max((_run(one, raw, at, offset) for one in like), key=lambda one: one.tokens)
                if run.is_worth_reading:
                    done[offset, window] = _WIDTH * run.stop  # a text that repeats itself is looked at once
                    yield run


def without_overlap(complete: Sequence[Run], runs: Sequence[Run]) -> list[Run]:
    """Settle which chunk each token of a prompt comes from: the longest first, others have what is left of them."""
    taken: list[Run] = []
    for run in sorted([*complete, *runs], key=lambda one: (-one.tokens, one.start, one.first)):
        offset = bisect_left(taken, run.start, key=lambda one: one.start)
        left = taken[offset - 1].stop if offset else 0
        right = taken[offset].start if offset < len(taken) else run.stop
        rest = run.between(left, right)
        if rest == run or rest.is_worth_reading:
            taken.insert(offset, rest)
    return taken


def _window_of(packed: bytes) -> tuple[int, bytes]:
    """The window by which a chunk is recognised, and where in the chunk it begins, in bytes."""
    offset = _WIDTH * max(0, min(EDGE_TOKENS, (len(packed) // _WIDTH - WINDOW) // 2))
    return offset, packed[offset : offset + _WIDTH * WINDOW]


def _is_telling(window: bytes) -> bool:
    tokens = [window[start : start + _WIDTH] for start in range(0, len(window), _WIDTH)]
    return len(tokens) == WINDOW and len({*tokens}) > WINDOW // 4


def _run(packed: bytes, raw: bytes, at: int, offset: int) -> Run:
    """The tokens of a chunk and of a prompt that agree around a window; both in bytes."""
    behind = _agreement(packed[offset:], raw[at : at + len(packed) - offset])
    before = _agreement(packed[:offset], raw[max(0, at - offset) : at], from_end=True)
    return Run(at // _WIDTH - before, packed, offset // _WIDTH - before, before + behind)


def _agreement(one: bytes, other: bytes, from_end: bool = False) -> int:
    """How many of their first tokens, or of their last ones, are the same."""
    size = min(len(one), len(other))
    if not size:
        return 0
    pair = (one[-size:], other[-size:]) if from_end else (one[:size], other[:size])
    left, right = (np.frombuffer(part, np.int32) for part in pair)
    differs = left[::-1] != right[::-1] if from_end else left != right
    first = int(differs.argmax())
    return first if differs[first] else size // _WIDTH
