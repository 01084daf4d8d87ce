# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Which chunks of a namespace are stored, by what is in them, and where these are in any list of tokens.

The index is a log of the chunks' ids, read into a NumPy window index. The log is two files that grow: rows of one
size, and the ids that they point to. It may be lost, stale, damaged or forged at no harm to KV: what a row says is
used only if an entry has the name that is the digest of it, and each row has a checksum. Rows of entries that are gone
stay until the log is written again.

A chunk is recognised at any offset in one pass over a prompt. One whose first or last tokens differ there, as a
tokenizer makes them where texts are joined, is recognised by one window a few tokens behind its beginning, which no
seam reaches. From there the run of equal tokens is followed in both directions.
"""

import contextlib
import hashlib
import logging
import os
import stat
import threading
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .chunk import CHAIN, ChunkKey, ChunkSpan
from .tiers.base import EntryFault
from .tiers.disk import open_regular, write_atomically

WINDOW = 8  # tokens; stored chunks are recognised by windows of so many, and whole ones by so many of their first
BEHIND = 16  # tokens behind a window, by which chunks that share it are told apart
EDGE_TOKENS = 8  # so many of the first tokens may differ
_LEAST_TOKENS = 16  # a shorter run is used only where nearly all of the chunk is in it
_LEAST_SHARE = 4  # … and one of less than a quarter never: reading the entry would cost more than it saves
_WIDTH = 4  # bytes of a packed token
_FACTORS = np.random.default_rng(0).integers(1, 1 << 62, BEHIND, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
logger = logging.getLogger(__name__)
_ROW = np.dtype(
    [
        ("digest", "S32"),
        ("start", "<u8"),  # in the file of ids
        ("fingerprint", "<u4"),  # bytes; then come the ids of the chunk prefix, then those of the chunk
        ("prefix", "<u4"),
        ("tokens", "<u4"),
        ("width", "<u4"),  # of the window, in tokens
        ("offset", "<u4"),  # of the window in the chunk
        ("flags", "<u4"),
        ("group", "<u8"),
        ("window", "<u8"),  # hash of the window and the group
        ("behind", "<u8"),  # hash of the tokens behind the window
        ("nbytes", "<u8"),
        ("created", "<f8"),
        ("check", "<u8"),
    ]
)
_WORDS = _ROW.itemsize // 8
_CHECKS = np.random.default_rng(1).integers(1, 1 << 62, _WORDS - 1, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
_WHOLE = 1  # flag: the chunk is known by its first tokens, and found only as a whole
_IN_MEMORY = 2  # flag: the ids are not in the file, which could not be written
_CHAIN = 4  # flag: a link of a chain, which is in no group of chunks
_MOST_BYTES = 1 << 27  # of the ids of one row
_MOST = 1 << 48  # bytes of an entry, and of the file of ids
_MOST_ALIKE = 64  # chunks with the same window that are compared with a prompt token by token
MOST_DEAD = 1000  # rows without an entry, and as many as there are others, before the log is written again


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


class Listed(NamedTuple):
    """A chunk that a row describes."""

    key: ChunkKey
    nbytes: int
    created: float


class ChunkIndex:
    """The chunks of one namespace. Threads may share it; what cannot be read or written now raises OSError.

    The log is at `path` with the suffixes `.rows` and `.ids`; None keeps it in memory. `lock` keeps other processes
    from writing it while a block runs.
    """

    def __init__(
        self,
        namespace: str,
        path: Path | None = None,
        lock: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> None:
        self.namespace = namespace
        self._rows_path = path and path.with_suffix(".rows")
        self._ids_path = path and path.with_suffix(".ids")
        self._file_lock = lock
        self._lock = threading.RLock()
        self._identity: tuple[int, int] | None = None  # of the file of rows that was read
        self._read_bytes = 0
        self._clear()

    def __contains__(self, digest: str) -> bool:
        with self._lock:
            return self._number(digest) is not None

    def refresh(self) -> bool:
        """Read what other processes appended; False if the log is another one than before, or was damaged."""
        if self._rows_path is None:
            return True
        with self._lock:
            info = None
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                info = os.lstat(self._rows_path)
            if info is None or not stat.S_ISREG(info.st_mode):
                if self._identity is None:
                    return True  # what could not be written is in memory
                self._clear()
                return False
            identity = (info.st_dev, info.st_ino)
            is_same = identity == self._identity and info.st_size >= self._read_bytes
            if not is_same:
                is_same = self._identity is None and not len(self._rows)
                self._clear()
                self._identity = identity
            if info.st_size - self._read_bytes < _ROW.itemsize:
                return is_same
            with open(self._rows_path, "rb", opener=_private) as file:
                file.seek(self._read_bytes)
                raw = file.read(info.st_size - self._read_bytes)
            count = len(raw) // _ROW.itemsize
            rows = np.frombuffer(raw, _ROW, count)
            self._read_bytes += count * _ROW.itemsize
            sound = rows[_are_sound(rows)]
            self._insert(sound)
            return is_same and len(sound) == count

    def is_current(self, changed_s: float) -> bool:
        """Say whether the log was touched after the entries changed, which others may have done without it."""
        with contextlib.suppress(OSError):
            is_read = self._identity is not None
            return is_read and self._rows_path is not None and os.stat(self._rows_path).st_mtime >= changed_s
        return False

    def touch(self) -> None:
        """Mark the log as one that knows of all changes so far, unless it has not all that this process knows."""
        if self._rows_path is not None and not self._ids:
            with contextlib.suppress(OSError):
                os.utime(self._rows_path)

    @property
    def may_be_stale(self) -> bool:
        """Whether so many rows came that most may be of chunks that are gone; `keep_only` says which are."""
        return len(self._rows) > 2 * self._kept + MOST_DEAD

    def add(self, chunks: Sequence[Listed]) -> None:
        """Append chunks to the log, or keep them in memory where it cannot be written; known ones are passed over."""
        with self._lock:
            new = [listed for listed in chunks if listed.key.digest not in self]
            if not new:
                return
            try:
                with self._file_lock():
                    self.refresh()
                    new = [listed for listed in new if listed.key.digest not in self]
                    self._append(new)
            except OSError as error:
                logger.info("the index %s cannot be written now (%s)", self._rows_path, error)
                self._append_in_memory(new)

    def _append(self, new: Sequence[Listed]) -> None:
        """Write rows behind the others."""
        if self._rows_path is None or self._ids_path is None:
            self._append_in_memory(new)
            return
        self._rows_path.parent.mkdir(mode=0o700, exist_ok=True)
        with open(self._ids_path, "ab", opener=_private) as file:
            rows, ids = _rows_of(new, file.seek(0, os.SEEK_END))
            file.write(ids)
        with open(self._rows_path, "ab", opener=_private) as file:
            torn = file.seek(0, os.SEEK_END) % _ROW.itemsize  # a writer was killed within a row
            if torn:
                file.truncate(file.tell() - torn)
            file.write(rows.tobytes())
        self.refresh()

    def _append_in_memory(self, new: Sequence[Listed]) -> None:
        rows, ids = _rows_of(new, len(self._ids))
        rows["flags"] |= _IN_MEMORY
        self._ids += ids
        self._insert(rows)

    def rewrite(self, chunks: Sequence[Listed]) -> None:
        """Begin the log again with some chunks."""
        with self._lock, self._file_lock():
            if self._rows_path is not None and self._ids_path is not None:
                rows, ids = _rows_of(chunks, 0)
                self._rows_path.parent.mkdir(mode=0o700, exist_ok=True)
                write_atomically(self._rows_path, [b""], durable=False)  # rows never point into other ids
                write_atomically(self._ids_path, [ids], durable=False)
                write_atomically(self._rows_path, [rows.tobytes()], durable=False)
                self.refresh()
                return
            self._clear()
        self.add(chunks)

    def drop(self, digest: str) -> None:
        """Forget a chunk whose entry is gone; its row stays in the log."""
        with self._lock:
            number = self._number(digest)
            if number is not None:
                self._is_there[number] = False

    def unknown(self, digests: Sequence[str]) -> list[str]:
        """Give those of some chunks that are not in the index."""
        with self._lock:
            known = self._heads[self._is_there[self._by_head]]
            is_known = np.isin(_heads_of(digests), known)
        return [digests[number] for number in np.flatnonzero(~is_known).tolist()]

    def keep_only(self, digests: Sequence[str]) -> None:
        """Forget all chunks but some, and write the log again where most of its rows are of no use."""
        with self._lock:
            is_kept = np.isin(self._heads, _heads_of(digests))
            self._is_there[self._by_head[~is_kept]] = False
            self._kept = kept = int(np.count_nonzero(self._is_there))
            if len(self._rows) - kept > max(MOST_DEAD, kept):
                self.rewrite([listed for listed in map(self.get, self.digests()) if listed is not None])

    def digests(self) -> list[str]:
        """List the chunks that are known, in the order of their digests."""
        with self._lock:
            return sorted({_hex(digest) for digest in self._rows["digest"][self._is_there].tolist()})

    def get(self, digest: str) -> Listed | None:
        """Describe a chunk; None if it is not known, or its row is not proved by the digest."""
        with self._lock:
            number = self._number(digest)
            if number is None:
                return None
            row = self._rows[number]
            key = self._key(row)
            if key is None or key.digest != digest:
                self._is_there[number] = False
                return None
            return Listed(key, int(row["nbytes"]), float(row["created"]))

    def groups(self) -> dict[tuple[str, tuple[int, ...]], list[str]]:
        """List digests by fingerprint and chunk prefix, without those of chains."""
        groups: dict[tuple[str, tuple[int, ...]], list[str]] = {}
        with self._lock:
            rows = self._rows[self._is_there & (self._rows["flags"] & _CHAIN == 0)]
            for number in np.unique(rows["group"]).tolist():
                members = rows[rows["group"] == number]
                key = self._key(members[-1])
                if key is not None:
                    digests = [_hex(digest) for digest in members["digest"].tolist()]
                    groups[key.fingerprint, key.chunk_prefix_ids] = digests
        return groups

    def links(self, fingerprint: str) -> list[ChunkKey]:
        """List the links of a model's chains, as far as is known."""
        with self._lock:
            rows = self._rows[self._is_there & (self._rows["flags"] & _CHAIN > 0)]
            keys = [self._key(row) for row in rows]
        return [key for key in keys if key is not None and key.fingerprint == fingerprint + CHAIN]

    def find(
        self,
        fingerprint: str,
        chunk_prefix_ids: Sequence[int],
        token_ids: Sequence[int],
        is_stored: Callable[[ChunkKey], bool],
    ) -> list[ChunkSpan]:
        """Find stored chunks of one model and prefix from left to right; of chunks that overlap the longest is whole.

        A chunk that `is_stored` does not know is passed over.
        """
        ids = np.frombuffer(pack_tokens(token_ids), np.int32)
        prefix = tuple(chunk_prefix_ids)
        keys: dict[bytes, ChunkKey | None] = {}

        def is_usable(run: Run) -> bool:
            if run.packed not in keys:
                keys[run.packed] = None
                with contextlib.suppress(ValueError):
                    key = ChunkKey(fingerprint, prefix, unpack_tokens(run.packed), self.namespace)
                    keys[run.packed] = key if is_stored(key) else None
            return keys[run.packed] is not None

        with self._lock:
            runs = set(self._runs(_group_of(fingerprint, prefix), ids, is_usable))
        spans = []
        for run in without_overlap(runs):
            key = keys[run.packed]
            if key is not None:
                spans.append(ChunkSpan(run.start, key, run.first, run.tokens))
        return spans

    def _runs(self, group: int, ids: np.ndarray, is_usable: Callable[[Run], bool]) -> Iterator[Run]:
        """Give the usable runs of stored tokens in a prompt; of those around one window the longest."""
        prompt = ids.tobytes()
        behind = hashes(ids, BEHIND)
        for width, is_whole in sorted(self._windows):
            # The rows with the window that is at each position of the prompt
            windows = _salted(hashes(ids, width), group, width, is_whole)
            first = np.searchsorted(self._sorted, windows)
            last = np.searchsorted(self._sorted, windows, "right")
            compared: dict[int, int] = {}  # up to where, by window: a text that repeats itself costs once
            for start in np.flatnonzero(first < last).tolist():
                window = int(windows[start])
                if start < compared.get(window, 0):
                    continue
                rows = self._rows[self._order[first[start] : last[start]]]
                if is_whole:
                    yield from filter(is_usable, self._whole(rows, prompt, start))
                    continue

                # Of very many chunks alike those come first whose tokens behind the window are the prompt's, too
                if len(rows) > _MOST_ALIKE:
                    yield from filter(is_usable, self._whole_among_many(rows, prompt, start))
                    next_hash = behind[start + width] if start + width < len(behind) else 0
                    rows = rows[np.argsort(rows["behind"] != next_hash, kind="stable")][:_MOST_ALIKE]

                # The longest run that can be used
                runs = [run_around(self._chunk_ids(row), prompt, start, int(row["offset"])) for row in rows]
                runs.sort(key=lambda run: -run.tokens)
                longest = next((run for run in runs if run.is_worth_reading and is_usable(run)), None)
                if longest is not None:
                    compared[window] = longest.stop
                    yield longest

    def _whole(self, rows: np.ndarray, prompt: bytes, start: int) -> Iterator[Run]:
        """Give the chunks all of whose tokens are at a position of a prompt."""
        for row in rows:
            packed = self._chunk_ids(row)
            if packed and prompt[4 * start : 4 * start + len(packed)] == packed:
                yield Run(start, packed, 0, len(packed) // 4)

    def _whole_among_many(self, rows: np.ndarray, prompt: bytes, window_start: int) -> Iterator[Run]:
        """Give what would be whole chunks of the lengths that there are; whether they are stored is asked behind."""
        lengths = np.unique(np.stack([rows["offset"], rows["tokens"]], axis=1), axis=0)
        for offset, tokens in lengths.tolist():
            start = window_start - offset
            packed = prompt[4 * max(0, start) : 4 * (start + tokens)]
            if start >= 0 and len(packed) == 4 * tokens:
                yield Run(start, packed, 0, tokens)

    def _clear(self) -> None:
        """Forget what was read of the log."""
        self._identity = None
        self._read_bytes = 0
        self._kept = 0  # rows of chunks that were there when the log was read, or last compared with a listing
        self._ids = bytearray()  # of rows that are in memory alone
        self._rows: np.ndarray[Any, Any] = np.empty(0, _ROW)
        self._is_there: np.ndarray[Any, Any] = np.empty(0, bool)  # the chunks of rows, as far as is known
        self._heads: np.ndarray[Any, Any] = np.empty(0, np.uint64)  # how the digests of rows begin, in order
        self._by_head: np.ndarray[Any, Any] = np.empty(0, np.int64)  # the numbers of their rows
        self._sorted = np.empty(0, np.uint64)  # the windows of all rows
        self._order = np.empty(0, np.int64)  # the numbers of their rows
        self._windows: set[tuple[int, bool]] = set()  # widths, and whether chunks are found by them only as a whole

    def _insert(self, rows: np.ndarray) -> None:
        """Add rows to the index."""
        if not len(rows):
            return
        first = len(self._rows)
        self._kept = self._kept if first else len(rows)
        self._rows = np.concatenate([self._rows, rows])
        self._is_there = np.concatenate([self._is_there, np.ones(len(rows), bool)])
        numbers = np.arange(first, first + len(rows))
        heads = np.frombuffer(rows["digest"].tobytes(), ">u8")[::4].astype(np.uint64)
        self._heads, self._by_head = _merged(self._heads, self._by_head, heads, numbers)
        self._sorted, self._order = _merged(self._sorted, self._order, rows["window"], numbers)
        kinds = np.unique(2 * rows["width"] + (rows["flags"] & _WHOLE)).tolist()
        self._windows |= {(kind // 2, bool(kind % 2)) for kind in kinds}

    def _number(self, digest: str) -> int | None:
        """Find the newest row of a chunk that is there."""
        raw = bytes.fromhex(digest)
        head = np.frombuffer(raw, ">u8")[0].astype(np.uint64)
        last = int(np.searchsorted(self._heads, head, "right")) - 1
        if last < 0 or self._heads[last] != head:
            return None
        number = int(self._by_head[last])
        is_same = _hex(self._rows["digest"][number]) == digest
        return number if is_same and self._is_there[number] else None

    def _key(self, row: np.void) -> ChunkKey | None:
        """Make the key of a row from the ids that it points to; None if they cannot be those of a chunk."""
        raw = self._read_ids(row, 0, _ids_bytes(row))
        text, prefix = int(row["fingerprint"]), int(row["prefix"])
        with contextlib.suppress(ValueError):  # also of a text that is none
            fingerprint = raw[:text].decode("utf-8", "surrogatepass")
            ids = unpack_tokens(raw[text:])
            return ChunkKey(fingerprint, ids[:prefix], ids[prefix:], self.namespace)
        return None

    def _chunk_ids(self, row: np.void) -> bytes:
        size = 4 * int(row["tokens"])
        packed = self._read_ids(row, _ids_bytes(row) - size, size)
        return packed if len(packed) == size else b""

    def _read_ids(self, row: np.void, start: int, size: int) -> bytes:
        """Read so many bytes of the ids of a row, from a start on; fewer where there are no more."""
        start += int(row["start"])
        if row["flags"] & _IN_MEMORY:
            return bytes(self._ids[start : start + size])
        if self._ids_path is None:
            return b""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, EntryFault):
            return _content(self._ids_path, start, min(size, _MOST_BYTES))
        return b""


def _merged(
    values: np.ndarray, numbers: np.ndarray, new_values: np.ndarray, new_numbers: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Insert values with their numbers into values in order; behind those that are equal."""
    order = np.argsort(new_values, kind="stable")
    at = np.searchsorted(values, new_values[order], "right")
    return np.insert(values, at, new_values[order]), np.insert(numbers, at, new_numbers[order])


def _heads_of(digests: Sequence[str]) -> np.ndarray:
    raw = bytes.fromhex("".join([digest[:16] for digest in digests]))
    return np.frombuffer(raw, ">u8").astype(np.uint64)


def _hex(digest: bytes) -> str:
    return bytes(digest).ljust(32, b"\0").hex()  # NumPy strips zeros at the end


def _rows_of(chunks: Sequence[Listed], start: int) -> tuple[np.ndarray, bytes]:
    """Make the rows of chunks, and the ids to which they point from a start on."""
    rows, parts = np.zeros(len(chunks), _ROW), []
    for row, (key, nbytes, created) in zip(rows, chunks, strict=True):
        fingerprint = key.fingerprint.encode("utf-8", "surrogatepass")
        packed = pack_tokens(key.token_ids)
        parts += [fingerprint, pack_tokens(key.chunk_prefix_ids), packed]
        ids = np.frombuffer(packed, np.int32)
        group = _group_of(key.fingerprint, key.chunk_prefix_ids)
        window = window_of(ids)
        offset = window or 0
        width = min(WINDOW, len(ids))
        flags = _WHOLE if window is None else 0
        behind = hashes(ids[offset + width :][:BEHIND], BEHIND)
        row["digest"] = bytes.fromhex(key.digest)
        row["start"] = start
        row["fingerprint"] = len(fingerprint)
        row["prefix"] = len(key.chunk_prefix_ids)
        row["tokens"] = len(key.token_ids)
        row["width"] = width
        row["offset"] = offset
        row["flags"] = flags | (_CHAIN if key.fingerprint.endswith(CHAIN) else 0)
        row["group"] = group
        row["window"] = _salted(hashes(ids[offset : offset + width], width), group, width, flags == _WHOLE)[0]
        row["behind"] = behind[0] if len(behind) else 0
        row["nbytes"] = nbytes
        row["created"] = created
        start += _ids_bytes(row)
    rows["check"] = _checks_of(rows)
    return rows, b"".join(parts)


def _ids_bytes(row: np.void) -> int:
    return int(row["fingerprint"]) + 4 * (int(row["prefix"]) + int(row["tokens"]))


def _salted(found: np.ndarray, group: int, width: int, is_whole: bool) -> np.ndarray:
    """Keep the windows of groups and of kinds apart."""
    salt = (2 * width + is_whole) * 0x9E3779B97F4A7C15 % (1 << 64)
    return found ^ np.uint64(group ^ salt)


def _group_of(fingerprint: str, chunk_prefix_ids: Sequence[int]) -> int:
    state = hashlib.sha256(fingerprint.encode("utf-8", "surrogatepass"))
    state.update(b"\0" + pack_tokens(chunk_prefix_ids))
    return int.from_bytes(state.digest()[:8], "little")


def _checks_of(rows: np.ndarray) -> np.ndarray:
    words = np.frombuffer(rows.tobytes(), np.uint64).reshape(len(rows), _WORDS)
    sums: np.ndarray = (words[:, :-1] * _CHECKS).sum(axis=1, dtype=np.uint64)
    return sums


def _are_sound(rows: np.ndarray) -> np.ndarray:
    """Say which rows are what was written, and can be: a file that others wrote may hold any numbers."""
    are_sound: np.ndarray = rows["check"] == _checks_of(rows)
    are_sound &= (rows["start"] < _MOST) & (rows["nbytes"] < _MOST) & np.isfinite(rows["created"])
    are_sound &= (rows["width"] > 0) & (rows["width"] <= WINDOW) & (rows["offset"] <= EDGE_TOKENS)
    return are_sound & (rows["tokens"] > 0)


def _private(path: str, flags: int) -> int:
    """Open a file that only its owner may read, and no link."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)


def _content(path: Path, start: int, size: int) -> bytes:
    """So many bytes of a file from a start on, fewer at its end; raises EntryFault where it is no regular file."""
    with contextlib.closing(open_regular(path)) as source:
        content = bytearray(max(0, min(size, source.stat.nbytes - start)))
        source.read_into(start, memoryview(content))
        return bytes(content)
