# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""K and V that are away from their device, in host memory or in files, and how they are brought back.

Tokens are the first axis, so that a file grows at its end: new tokens cost their own bytes, however long the context.
Each read is compared with the digests that were taken of the tokens when they were written.
"""

import copy
import os
import shutil
import tempfile
import threading
import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import xxhash
from filelock import FileLock, Timeout
from torch import Tensor

from ..cache.layers import Pair
from ..cache.quantised_layer import GROUP_TOKENS, column, pack, unpack
from ..errors import OffloadError

PREFIX, LOCK = "hf-blend-kv-", "in-use"
PIECE_TOKENS = 64  # a file has a digest for each so many tokens, which are the least that is read
SPARE = 8  # memory that grows takes an eighth more than it needs, so that not every growth copies it


class Folder:
    """A folder of its own for the files of one cache; gone with the cache, or with the process."""

    def __init__(self, parent: str | os.PathLike[str]) -> None:
        try:
            Path(parent).mkdir(parents=True, exist_ok=True)
            _remove_abandoned(Path(parent))
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        except OSError as error:
            raise OffloadError(
                f"offload_folder={str(parent)!r} cannot be used: {error}. Give a folder that can be written to."
            ) from error
        self._lock, self._owner = FileLock(self.path / LOCK, thread_local=False), os.getpid()
        self._lock.acquire(timeout=0)
        weakref.finalize(self, _remove, self.path, self._lock, self._owner)

    @property
    def is_own(self) -> bool:
        """Whether it is there, and is not the parent's of a forked child."""
        return self._owner == os.getpid() and self.path.is_dir()


def _remove(path: Path, lock: FileLock, owner: int) -> None:
    if os.getpid() == owner:  # not in a forked child
        shutil.rmtree(path, ignore_errors=True)
        lock.release()


def _remove_abandoned(parent: Path) -> None:
    """Delete the folders of processes that were killed: nobody holds their locks."""
    for path in parent.glob(f"{PREFIX}*/{LOCK}"):
        lock = FileLock(path)
        try:
            lock.acquire(timeout=0)
        except (Timeout, OSError):
            continue
        shutil.rmtree(path.parent, ignore_errors=True)
        lock.release()


class States:
    """Tensors that grow by tokens, `[tokens, …]`, in memory or in files of a folder."""

    def __init__(self, parent: str | os.PathLike[str] | None) -> None:
        self._parent, self._folder = parent, None if parent is None else Folder(parent)
        self._pools: dict[str, Tensor] = {}  # those in memory, with room behind their tokens
        self._rows: dict[str, tuple[torch.Size, torch.dtype]] = {}  # of a token, of those in files
        self._digests: dict[str, list[tuple[int, int]]] = {}  # of pieces in a file: (tokens up to here, digest)

    @property
    def disk_bytes(self) -> int:
        """Bytes in files."""
        return sum(ends[-1][0] * self._row_bytes(name) for name, ends in self._digests.items() if ends)

    def pool_bytes(self, name: str) -> int:
        """Bytes of a tensor in memory, with the room behind its tokens."""
        return self._pools[name].nbytes if name in self._pools else 0

    def create(self, name: str, like: Tensor, device: torch.device | None) -> None:
        """Make an empty tensor like another, `[tokens, …]`, on a device; in a file if `device` is None."""
        self.remove(name)
        if device is not None:
            self._pools[name] = torch.empty((0, *like.shape[1:]), dtype=like.dtype, device=device)
            return
        if self._folder is None:
            raise OffloadError(
                f"{name} goes to the disk, but offload_folder is None, expected a folder. Give offload_folder=…, or "
                "allow more in max_memory."
            )
        self._rows[name], self._digests[name] = (like.shape[1:], like.dtype), []
        self._write(name, b"", 0)

    def append(self, name: str, tokens: int, states: Tensor) -> None:
        """Append tokens, `[new, …]`, to a tensor that has `tokens` of them."""
        end = tokens + len(states)
        if name in self._pools:
            pool = self._pools[name]
            if len(pool) < end:
                self._pools[name] = pool.new_empty((end + end // SPARE, *pool.shape[1:]))
                self._pools[name][:tokens] = pool[:tokens]
            self._pools[name][tokens:end] = states
            return
        data, width = _bytes(states), self._row_bytes(name)
        self._write(name, data, tokens * width)
        cuts = [tokens, *range(tokens - tokens % PIECE_TOKENS + PIECE_TOKENS, end, PIECE_TOKENS), end]
        for first, last in pairwise(cuts):
            piece = data[(first - tokens) * width : (last - tokens) * width]
            self._digests[name].append((last, xxhash.xxh3_64_intdigest(piece)))

    def crop(self, name: str, tokens: int) -> None:
        """Keep only the first tokens of a tensor."""
        ends = self._digests.get(name)
        if ends is None or not ends or ends[-1][0] <= tokens:
            return
        count = bisect_right(ends, tokens, key=lambda piece: piece[0])
        start = ends[count - 1][0] if count else 0
        rest = self.read(name, [(start, tokens)])[0] if tokens > start else None  # verified
        del ends[count:]
        if rest is not None:
            ends.append((tokens, xxhash.xxh3_64_intdigest(_bytes(rest))))

    def read(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[Tensor]:
        """Some of the tokens of a tensor, `[tokens, …]` each, without the others."""
        if name in self._pools:
            return [self._pools[name][start:end] for start, end in ranges]
        with self._reading(name) as file:
            return [self._read(name, file, start, end) for start, end in ranges]

    def fill(self, name: str, out: Tensor) -> None:
        """Write all tokens of a tensor to one of that length, on any device."""
        if name in self._pools or out.device.type != "cpu":
            out.copy_(self.read(name, [(0, len(out))])[0])
        else:
            with self._reading(name) as file:
                self._read(name, file, 0, len(out), out)

    @contextmanager
    def _reading(self, name: str) -> Iterator[int]:
        try:
            with self._path(name).open("rb", buffering=0) as file:
                yield file.fileno()
        except OSError as error:
            raise OffloadError(f"{name} cannot be read from {self._path(name)}: {error}. {AGAIN}") from error

    def _read(self, name: str, file: int, start: int, end: int, out: Tensor | None = None) -> Tensor:
        """Read and verify whole pieces; into `out`, if it is given, which must begin and end with a piece."""
        ends, width, (row, dtype) = self._digests[name], self._row_bytes(name), self._rows[name]
        first = bisect_right(ends, start, key=lambda piece: piece[0])
        last = bisect_left(ends, end, key=lambda piece: piece[0])
        begin, behind = ends[first - 1][0] if first else 0, ends[last][0]
        states = torch.empty((behind - begin, *row), dtype=dtype) if out is None else out
        data = _bytes(states)
        if os.preadv(file, [data], begin * width) != len(data):
            raise self._other(name, begin, behind)
        piece = begin
        for stop, digest in ends[first : last + 1]:
            if xxhash.xxh3_64_intdigest(data[(piece - begin) * width : (stop - begin) * width]) != digest:
                raise self._other(name, piece, stop)
            piece = stop
        return states[start - begin : end - begin]

    def _other(self, name: str, start: int, end: int) -> OffloadError:
        return OffloadError(
            f"tokens {start} to {end - 1} of {name}, read from {self._path(name)}, are not what was written there. "
            f"{AGAIN}"
        )

    def remove(self, name: str) -> None:
        """Forget a tensor and delete its file."""
        self._pools.pop(name, None)
        self._digests.pop(name, None)
        if self._rows.pop(name, None) is not None and self._folder is not None and self._folder.is_own:
            self._path(name).unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self._folder.path / f"{name}.dat"  # type: ignore[union-attr]

    def _own(self) -> None:
        """Make a new folder if the old one was deleted, or is that of the parent of a forked process; copy its files.

        A file that could not be copied is refused when it is read.
        """
        if self._folder is not None and self._parent is not None and not self._folder.is_own:
            folder = Folder(self._parent)
            for name in self._rows:
                with suppress(OSError):
                    shutil.copyfile(self._path(name), folder.path / self._path(name).name)
            self._folder = folder

    def _row_bytes(self, name: str) -> int:
        row, dtype = self._rows[name]
        return row.numel() * dtype.itemsize

    def _write(self, name: str, data: Any, offset: int) -> None:
        self._own()
        path = self._path(name)
        try:
            with path.open("r+b" if path.exists() else "w+b", buffering=0) as file:
                file.seek(offset)
                view = memoryview(data)
                while view:
                    view = view[file.write(view) :]
        except OSError as error:
            raise OffloadError(f"{name} cannot be written to {path}: {error}. Free space there. {AGAIN}") from error


AGAIN = "Call reset() of the cache and run the prompt again."


def _bytes(states: Tensor) -> Any:
    """The bytes of a tensor in host memory, without a copy where it is contiguous."""
    return states.detach().to("cpu").contiguous().view(-1).view(torch.uint8).numpy().data if states.numel() else b""


class AwayLayer:
    """K and V of one layer that are away from its device; with `bits` they are packed in whole groups."""

    def __init__(self, index: int, states: States, some: Pair, place: torch.device | None, bits: int | None) -> None:
        """Make an empty layer like some tokens, `[tokens, batch, kv_heads, head_dim]` each, at least one group."""
        self._prefix, self._states, self.tokens = f"layer.{index}.", states, 0
        self._place, self._bits, self._lock = place, bits, threading.RLock()
        self.like = some[0][:0].clone(), some[1][:0].clone()  # on the device that computes the layer
        self._names = tuple(parts := self._parts(some[0][:GROUP_TOKENS], some[1][:GROUP_TOKENS]))
        for name, like in parts.items():
            states.create(self._prefix + name, like, place)

    @property
    def nbytes_here(self) -> int:
        """Bytes on the device that computes the layer, where packed tokens may be."""
        is_here = self._bits is not None and self._place is not None and is_same(self._place, self.like[0].device)
        return sum(self._states.pool_bytes(self._prefix + name) for name in self._names) if is_here else 0

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Append tokens, `[new, batch, kv_heads, head_dim]` each; none are appended if that fails."""
        with self._lock:
            try:
                for name, new in self._parts(keys, values).items():
                    self._states.append(self._prefix + name, column(name, self.tokens), new)
            except BaseException:
                for name in self._names:
                    self._states.crop(self._prefix + name, column(name, self.tokens))
                raise
            self.tokens += len(keys)

    def bring(self, rows: int) -> Pair:
        """K and V on the device, `[rows, batch, kv_heads, head_dim]`; what is behind the tokens is undefined."""
        with self._lock:
            if self._bits is not None:
                return self._unpacked(self._kept([(0, self.tokens)], self.like[0].device)[0], rows)
            keys, values = (like.new_empty((rows, *like.shape[1:])) for like in self.like)
            for name, states in zip(self._names, (keys, values), strict=True):
                self._states.fill(self._prefix + name, states[: self.tokens])
        return keys, values

    def read(self, start: int, end: int) -> Pair:
        """K and V of some tokens on the device, `[tokens, batch, kv_heads, head_dim]`."""
        with self._lock:
            return self._read([(start, end)], self.like[0].device)[0]

    def blocks(self, some: Sequence[tuple[int, int]], size: int) -> Pair:
        """K and V of some blocks, (request, number) each, `[blocks, size, kv_heads, head_dim]`, in host memory."""
        is_pinned = self.like[0].is_cuda and torch.cuda.is_available()  # a copy from there need not wait
        keys, values = (
            torch.empty((len(some), size, *like.shape[2:]), dtype=like.dtype, pin_memory=is_pinned)
            for like in self.like
        )
        numbers = sorted({number for _, number in some})
        with self._lock:
            fetched = self._read([(number * size, number * size + size) for number in numbers])
            by_number = dict(zip(numbers, fetched, strict=True))
            for place, (row, number) in enumerate(some):
                keys[place], values[place] = by_number[number][0][:, row], by_number[number][1][:, row]
        return keys, values

    def changed(self, states: States, change: Callable[[Tensor], Tensor]) -> "AwayLayer":
        """A layer with the same tokens in these or other states, after a change of the batch; no bit changes."""
        twin = copy.copy(self)
        twin._states, twin.like = states, (along_batch(change, self.like[0]), along_batch(change, self.like[1]))
        with self._lock:
            for name in self._names:
                [kept] = self._states.read(self._prefix + name, [(0, column(name, self.tokens))])
                kept_change = along_batch(change, kept)
                states.create(self._prefix + name, kept_change, self._place)
                states.append(self._prefix + name, 0, kept_change)
        return twin

    def crop(self, tokens: int) -> None:
        """Keep only the first tokens."""
        with self._lock:
            for name in self._names:
                self._states.crop(self._prefix + name, column(name, tokens))
            self.tokens = min(self.tokens, tokens)

    def remove(self) -> None:
        """Forget all tokens and delete the files."""
        with self._lock:
            for name in self._names:
                self._states.remove(self._prefix + name)
            self.tokens = 0

    def _parts(self, keys: Tensor, values: Tensor) -> dict[str, Tensor]:
        """The tensors that are stored for some tokens, by name, `[tokens or groups, batch, …]`."""
        if self._bits is None:
            return {"keys": keys, "values": values}
        packed = pack(self._bits, as_states(keys), as_states(values))
        return {name: tensor.movedim(2, 0) for name, tensor in packed.items()}

    def _kept(self, ranges: Sequence[tuple[int, int]], device: torch.device | None) -> list[tuple[Tensor, ...]]:
        """The stored tensors of some tokens, on a device or where they are."""
        parts = (
            self._states.read(self._prefix + name, [(column(name, start), column(name, end)) for start, end in ranges])
            for name in self._names
        )
        return [tuple(tensor.to(device or tensor.device) for tensor in some) for some in zip(*parts, strict=True)]

    def _read(self, ranges: Sequence[tuple[int, int]], device: torch.device | None = None) -> list[Pair]:
        """K and V of some tokens, `[tokens, batch, kv_heads, head_dim]`, on a device or where they are kept."""
        if self._bits is None:
            return [(keys, values) for keys, values in self._kept(ranges, device)]
        whole = [(start - start % GROUP_TOKENS, end + -end % GROUP_TOKENS) for start, end in ranges]
        pairs = (self._unpacked(parts, 0) for parts in self._kept(whole, device))
        cuts = (slice(start - first, end - first) for (start, end), (first, _) in zip(ranges, whole, strict=True))
        return [(keys[cut], values[cut]) for (keys, values), cut in zip(pairs, cuts, strict=True)]

    def _unpacked(self, parts: Sequence[Tensor], rows: int) -> Pair:
        """K and V, with room for so many rows."""
        packed = {name: tensor.movedim(0, 2) for name, tensor in zip(self._names, parts, strict=True)}
        tokens, device = packed["v.bytes"].shape[2], parts[0].device
        keys, values = (
            template.new_empty((max(rows, tokens), *template.shape[1:]), device=device) for template in self.like
        )
        unpack(packed, as_states(keys[:tokens]), as_states(values[:tokens]))
        return keys, values


def as_states(rows: Tensor) -> Tensor:
    """View `[tokens, batch, kv_heads, head_dim]` as `[batch, kv_heads, tokens, head_dim]`."""
    return rows.permute(1, 2, 0, 3)


def along_batch(change: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """Apply a change of the first axis to the batch of `[tokens, batch, …]`."""
    return change(rows.transpose(0, 1)).transpose(0, 1)


def is_same(device: torch.device, other: torch.device) -> bool:
    """Return True for two names of one device."""
    return device.type == other.type and (device.index or 0) == (other.index or 0)
