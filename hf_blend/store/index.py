# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Finding stored chunks inside any list of tokens, by content and at any offset."""

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .interiors import Interiors, Run, without_overlap
from .windows import WindowFilter

__all__ = ["ContentIndex", "IndexRecord", "pack_tokens", "unpack_tokens"]

_WIDTH = 4  # bytes of a packed token
_HEAD_BYTES = 8 * _WIDTH  # chunks are told apart by their first 8 tokens, then compared whole


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
