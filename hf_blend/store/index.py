# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Finding stored chunks inside any list of tokens, by content and at any offset, in one pass over a prompt.

A chunk whose first or last tokens differ in a prompt, as a tokenizer makes them where texts are joined, is recognised
by one window a few tokens behind its beginning, which no seam reaches. From there the run of equal tokens is followed
in both directions. Chunks that share the window are sorted, so the one that agrees with the prompt the furthest is the
neighbour of where the prompt itself would be.
"""

from array import array
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

__all__ = ["ContentIndex", "IndexRecord", "Run", "WindowFilter", "pack_tokens", "unpack_tokens"]

WINDOW = 8  # tokens; stored chunks are recognised by windows of so many
EDGE_TOKENS = 8  # so many of the first tokens may differ
_LEAST_TOKENS = 16  # a shorter run is used only where nearly all of the chunk is in it
_LEAST_SHARE = 4  # … and one of less than a quarter never: reading the entry would cost more than it saves
_NEIGHBOURS = 2  # on each side of where the prompt would be; several chunks may agree with it equally far
_WIDTH = 4  # bytes of a packed token
_HEAD_BYTES = 8 * _WIDTH  # chunks are told apart by their first 8 tokens, then compared whole
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


@dataclass(frozen=True)
class IndexRecord:
    """What is known of a stored chunk without opening it."""

    fingerprint: str
    chunk_prefix_ids: tuple[int, ...]
    packed: bytes
    nbytes: int
    created: float

    @property
    def tokens(self) -> int:
        """Length of the chunk in tokens."""
        return len(self.packed) // _WIDTH


class _Group:
    """The chunks of one model and sink: length of head → head → length of chunk → chunks, all in bytes."""

    def __init__(self) -> None:
        self._heads: dict[int, dict[bytes, dict[int, set[bytes]]]] = {}
        self._filters: dict[int, WindowFilter] = {}
        self._interiors = Interiors()

    def add(self, packed: bytes) -> None:
        head = packed[:_HEAD_BYTES]
        self._heads.setdefault(len(head), {}).setdefault(head, {}).setdefault(len(packed), set()).add(packed)
        self._filters.setdefault(len(head), WindowFilter(len(head) // _WIDTH)).add(head)
        self._interiors.add(packed)

    def discard(self, packed: bytes) -> None:
        head = packed[:_HEAD_BYTES]
        heads = self._heads[len(head)]
        heads[head][len(packed)].discard(packed)
        if not heads[head][len(packed)]:
            del heads[head][len(packed)]
        if not heads[head]:
            del heads[head]
        if not heads:
            del self._heads[len(head)], self._filters[len(head)]
        self._interiors.discard(packed)

    def find(self, ids: np.ndarray) -> list[Run]:
        """Whole chunks from left to right, without overlap: the longest at each place."""
        prompt, stop, found = ids.tobytes(), 0, []
        for start, width in self._starts(ids):
            head = self._heads[width].get(prompt[start : start + width])
            length = _longest(head, prompt, start) if head and start >= stop else 0
            if length:
                stop = start + length
                found.append(Run(start // _WIDTH, prompt[start:stop], 0, length // _WIDTH))
        return found

    def match(self, ids: np.ndarray) -> list[Run]:
        """Whole chunks and parts of others."""
        return without_overlap(self.find(ids), list(self._interiors.find(ids)))

    def _starts(self, ids: np.ndarray) -> list[tuple[int, int]]:
        """(start, width of the head) in bytes, wherever a chunk may begin; the longest head first at each start."""
        known = [(filter_.positions(ids), width) for width, filter_ in self._filters.items()]
        found = [(_WIDTH * start, -width) for starts, width in known for start in starts.tolist()]
        return [(start, -width) for start, width in sorted(found)]


def _longest(lengths: dict[int, set[bytes]], prompt: bytes, start: int) -> int:
    """Length in bytes of the longest of some chunks that stands at `start`, or 0."""
    for length in sorted(lengths, reverse=True):
        if prompt[start : start + length] in lengths[length]:
            return length
    return 0


class ContentIndex:
    """Stored chunks by digest and by content. One pass over a prompt, whatever the number of chunks."""

    def __init__(self) -> None:
        self._records: dict[str, IndexRecord] = {}
        self._groups: dict[tuple[str, tuple[int, ...]], _Group] = {}
        self._counts: Counter[str] = Counter()  # of the chunks of each model

    def add(self, digest: str, record: IndexRecord) -> None:
        """Make a chunk findable; adding it again changes nothing."""
        if digest not in self._records:
            self._groups.setdefault((record.fingerprint, record.chunk_prefix_ids), _Group()).add(record.packed)
            self._counts[record.fingerprint] += 1
        self._records[digest] = record

    def discard(self, digest: str) -> None:
        """Forget a chunk, if it is known."""
        record = self._records.pop(digest, None)
        if record:
            self._counts[record.fingerprint] -= 1
            self._groups[record.fingerprint, record.chunk_prefix_ids].discard(record.packed)

    def find(
        self, fingerprint: str, chunk_prefix_ids: Sequence[int], token_ids: Sequence[int]
    ) -> list[tuple[int, int]]:
        """Find the stored chunks of one model and sink: the longest at an offset, left to right, no overlap."""
        group = self._groups.get((fingerprint, tuple(chunk_prefix_ids)))
        return [] if group is None else [(run.start, run.stop) for run in group.find(_as_array(token_ids))]

    def match(self, fingerprint: str, chunk_prefix_ids: Sequence[int], token_ids: Sequence[int]) -> list[Run]:
        """Find the stored chunks of one model and sink, also those whose first or last tokens differ here."""
        group = self._groups.get((fingerprint, tuple(chunk_prefix_ids)))
        return [] if group is None else group.match(_as_array(token_ids))

    def sample(self, fingerprint: str, chunk_prefix_ids: Sequence[int]) -> bytes:
        """The packed ids of any chunk of a model and sink; empty if there is none."""
        alike = (one for one in self._records.values() if one.fingerprint == fingerprint)
        return next((one.packed for one in alike if one.chunk_prefix_ids == tuple(chunk_prefix_ids)), b"")

    def count(self, fingerprint: str) -> int:
        """How many chunks of a model there are."""
        return self._counts[fingerprint]

    def items(self) -> list[tuple[str, IndexRecord]]:
        """Everything that is known, by digest."""
        return sorted(self._records.items())

    def __contains__(self, digest: object) -> bool:
        return digest in self._records

    def __len__(self) -> int:
        return len(self._records)


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Lay token ids side by side, 4 bytes each, so that comparing chunks is comparing bytes."""
    return array("i", token_ids).tobytes()


def unpack_tokens(packed: bytes) -> tuple[int, ...]:
    """The token ids that `pack_tokens` laid side by side."""
    return tuple(array("i", packed))


def _as_array(token_ids: Sequence[int]) -> np.ndarray:
    return np.frombuffer(pack_tokens(token_ids), np.int32)
