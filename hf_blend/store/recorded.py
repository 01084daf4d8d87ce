# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Read an object once and keep its bytes: what was verified is what is written to other tiers."""

import numpy as np

from .tiers.base import EntryFault, Source

__all__ = ["RecordedSource"]


class RecordedSource:
    """An opened object in front of another one; no byte of it is read twice."""

    def __init__(self, source: Source) -> None:
        self.stat, self.identity = source.stat, source.identity
        self._source = source
        # takes memory only as it is filled: whether the size is a sane one turns out when the header is read
        self._content = np.empty(source.stat.nbytes, np.uint8).data
        self._known: list[tuple[int, int]] = []  # stretches that were read: sorted, apart

    def read_into(self, start: int, target: memoryview) -> None:
        """Fill `target` with the bytes from `start` on; raises EntryFault("truncated") if there are fewer."""
        stop = start + len(target)
        if stop > self.stat.nbytes:
            raise EntryFault("truncated", f"the bytes end {stop - self.stat.nbytes} too early")
        for first, last in self._missing(start, stop):
            self._source.read_into(first, self._content[first:last])
            self._note(first, last)
        target[:] = self._content[start:stop]

    def release(self) -> memoryview | None:
        """Hand the whole object over, or None if some of it was not read; nothing can be read from here any more."""
        content, is_whole = self._content, self._known == [(0, self.stat.nbytes)]
        self._content, self._known = memoryview(b""), []
        return content if is_whole else None

    def close(self) -> None:
        """Close the object; its bytes stay until they are released. Closing twice is allowed."""
        self._source.close()

    def _missing(self, start: int, stop: int) -> list[tuple[int, int]]:
        missing = []
        for first, last in self._known:
            if first > start and start < stop:
                missing.append((start, min(first, stop)))
            start = max(start, last)
        return [*missing, (start, stop)] if start < stop else missing

    def _note(self, first: int, last: int) -> None:
        merged: list[tuple[int, int]] = []
        for start, stop in sorted([*self._known, (first, last)]):
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
            else:
                merged.append((start, stop))
        self._known = merged
