# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Where a prompt may hold a known window of tokens: one pass of numpy over the prompt, no loop over its tokens."""

import numpy as np

__all__ = ["WINDOW", "WindowFilter"]

WINDOW = 8  # tokens; stored chunks are recognised by windows of so many
_LEAST_BITS, _LOAD = 12, 8  # the table has at least 2**12 entries, and 8 for each window
_FACTORS = np.random.default_rng(0).integers(1, 1 << 62, WINDOW, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
_SPREAD = np.uint64(0x9E3779B97F4A7C15)


class WindowFilter:
    """Says at which positions a window of `width` tokens may be one that was added; never misses one.

    Windows are hashed into a table of booleans. One that was discarded leaves its mark there: the filter only saves
    looking at positions, and what it lets through is compared in full.
    """

    def __init__(self, width: int) -> None:
        self.width = width
        self._new: list[bytes] = []  # windows that are not in the table yet
        self._hashes = np.empty(0, np.uint64)
        self._bits, self._table = 0, np.empty(0, bool)

    def add(self, window: bytes) -> None:
        """Take up a window; it is hashed with others, when the next prompt is looked at."""
        self._new.append(window)

    def positions(self, ids: np.ndarray) -> np.ndarray:
        """Where a window may begin.

        Shapes: ids `[tokens]`.
        """
        self._take_up()
        if len(ids) < self.width or not len(self._hashes):
            return np.empty(0, np.int64)
        return np.flatnonzero(self._table[self._slots_of(self._hashed(ids))])

    def _take_up(self) -> None:
        if not self._new:
            return
        rows = np.frombuffer(b"".join(self._new), np.int32).reshape(-1, self.width)
        hashes = (rows.astype(np.uint64) * _FACTORS[: self.width]).sum(axis=1, dtype=np.uint64)
        self._hashes, self._new = np.concatenate((self._hashes, hashes)), []
        bits = max(_LEAST_BITS, (_LOAD * len(self._hashes) - 1).bit_length())
        if bits != self._bits:
            self._bits, self._table, hashes = bits, np.zeros(1 << bits, bool), self._hashes
        self._table[self._slots_of(hashes)] = True

    def _hashed(self, ids: np.ndarray) -> np.ndarray:
        """`[tokens - width + 1]`: the hash of the window at each position."""
        values, count = ids.astype(np.uint64), len(ids) - self.width + 1
        hashes = np.zeros(count, np.uint64)
        for number, factor in enumerate(_FACTORS[: self.width]):
            hashes += values[number : number + count] * factor
        return hashes

    def _slots_of(self, hashes: np.ndarray) -> np.ndarray:
        mixed: np.ndarray = (hashes ^ (hashes >> np.uint64(29))) * _SPREAD >> np.uint64(64 - self._bits)
        return mixed
