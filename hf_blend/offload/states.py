# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""K and V that are away from their device, in accelerate's offload format, brought back by accelerate's hook.

Tokens are the first axis, so that a file grows at its end: new tokens cost their own bytes, however long the context.
Writes are ours, because accelerate's writer rewrites a file in place and leaves a torn one behind when it is
interrupted. Each read is compared with the digests that were taken of the tokens when they were written.
"""

import os
import shutil
import tempfile
import threading
import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import xxhash
from accelerate.hooks import AlignDevicesHook
from accelerate.utils import OffloadedWeightsLoader, PrefixedDataset
from filelock import FileLock, Timeout
from torch import Tensor

from ..errors import OffloadError
from .placement import LayerStates

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
        self._lock = FileLock(self.path / LOCK, thread_local=False)
        self._lock.acquire(timeout=0)
        weakref.finalize(self, _remove, self.path, self._lock, os.getpid())


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


class States(OffloadedWeightsLoader):
    """Tensors that grow by tokens, in memory or in files of a folder; a mapping from which accelerate brings them.

    A tensor is `[rows, …]`: the tokens that were appended, then room with undefined contents.
    """

    def __init__(self, parent: str | os.PathLike[str] | None) -> None:
        super().__init__(state_dict={}, index={})
        self._folder = None if parent is None else Folder(parent)
        self._digests: dict[str, list[tuple[int, int]]] = {}  # of pieces on disk: (tokens up to here, digest)
        self._pools: dict[str, Tensor] = {}  # what `state_dict` shows the first rows of

    @property
    def tokens_on_disk(self) -> dict[str, int]:
        """How many tokens of each tensor are in a file."""
        return {name: ends[-1][0] if ends else 0 for name, ends in self._digests.items()}

    @property
    def disk_bytes(self) -> int:
        """Bytes in files."""
        return sum(held * self._row_bytes(name) for name, held in self.tokens_on_disk.items())

    def create(self, name: str, like: Tensor, device: torch.device | None) -> None:
        """Begin an empty tensor.

        Shapes: like `[tokens, …]`.
        """
        self.remove(name)
        if device is not None:
            pool = torch.empty((0, *like.shape[1:]), dtype=like.dtype, device=device)
            self._pools[name] = self.state_dict[name] = pool
            return
        if self._folder is None:
            raise OffloadError(
                f"{name} goes to the disk, but offload_folder is None, expected a folder. Give offload_folder=…, or "
                "allow more in max_memory."
            )
        self.save_folder = str(self._folder.path)
        self.index[name] = {"dtype": str(like.dtype).removeprefix("torch."), "shape": [0, *like.shape[1:]]}
        self._digests[name] = []
        self._write(name, b"", 0)

    def append(self, name: str, held: int, states: Tensor) -> None:
        """Put tokens behind those that a tensor holds.

        Shapes: states `[new, …]`.
        """
        if name in self.state_dict:
            self.reserve(name, held + len(states))
            self.state_dict[name][held : held + len(states)] = states
            return
        data, width = _bytes(states), self._row_bytes(name)
        self._write(name, data, held * width)
        end = held + len(states)
        cuts = [held, *range(held - held % PIECE_TOKENS + PIECE_TOKENS, end, PIECE_TOKENS), end]
        for first, last in pairwise(cuts):
            piece = data[(first - held) * width : (last - held) * width]
            self._digests[name].append((last, xxhash.xxh3_64_intdigest(piece)))
        self.reserve(name, end)

    def reserve(self, name: str, rows: int) -> None:
        """Make a tensor so many rows long, at least as many as it has tokens; what is read then has room for more."""
        if name in self.state_dict:
            pool, held = self._pools[name], self.state_dict[name]
            if len(pool) < rows:
                pool = pool.new_empty((rows + rows // SPARE, *pool.shape[1:]))
                pool[: len(held)] = held
                self._pools[name] = pool
            self.state_dict[name] = pool[:rows]
            return
        os.truncate(self._path(name), rows * self._row_bytes(name))  # a hole: no block of the disk is used
        self.index[name]["shape"][0] = rows

    def crop(self, name: str, tokens: int) -> None:
        """Keep the first so many tokens."""
        ends = self._digests.get(name)
        if ends is None or not ends or ends[-1][0] <= tokens:
            return
        count = bisect_right(ends, tokens, key=lambda piece: piece[0])
        start = ends[count - 1][0] if count else 0
        rest = self.read(name, [(start, tokens)])[0] if tokens > start else None  # verified
        del ends[count:]
        if rest is not None:
            ends.append((tokens, xxhash.xxh3_64_intdigest(_bytes(rest))))
        self.reserve(name, tokens)

    def forget(self, name: str, held: int) -> None:
        """Take back the last `append`, as far as it came, behind so many tokens."""
        ends = self._digests.get(name)
        while ends and ends[-1][0] > held:
            ends.pop()

    def read(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[Tensor]:
        """Some of the tokens of a tensor, without the others.

        Shape: `[tokens, …]`.
        """
        if name in self.state_dict:
            return [self.state_dict[name][start:end] for start, end in ranges]
        try:
            with self._path(name).open("rb", buffering=0) as file:
                return [self._read(name, file.fileno(), start, end) for start, end in ranges]
        except OSError as error:
            raise OffloadError(f"{name} cannot be read from {self.save_folder}: {error}. {AGAIN}") from error

    def _read(self, name: str, file: int, start: int, end: int) -> Tensor:
        ends, width, info = self._digests[name], self._row_bytes(name), self.index[name]
        first = bisect_right(ends, start, key=lambda piece: piece[0])
        last = bisect_left(ends, end, key=lambda piece: piece[0])
        begin, behind = ends[first - 1][0] if first else 0, ends[last][0]
        shape = (behind - begin, *info["shape"][1:])
        states = torch.empty(shape, dtype=getattr(torch, info["dtype"]))
        data = _bytes(states)
        if os.preadv(file, [data], begin * width) == len(data):
            self._verify(name, data, begin, ends[first : last + 1])
        else:
            raise self._other(name, begin, behind)
        return states[start - begin : end - begin]

    def _verify(self, name: str, data: Any, start: int, pieces: Sequence[tuple[int, int]]) -> None:
        begin, width = start, self._row_bytes(name)
        for end, digest in pieces:
            if xxhash.xxh3_64_intdigest(data[(start - begin) * width : (end - begin) * width]) != digest:
                raise self._other(name, start, end)
            start = end

    def _other(self, name: str, start: int, end: int) -> OffloadError:
        return OffloadError(
            f"tokens {start} to {end - 1} of {name}, read from {self._path(name)}, are not what was written there. "
            f"{AGAIN}"
        )

    def remove(self, name: str) -> None:
        """Forget a tensor and delete its file."""
        self.state_dict.pop(name, None)
        self._pools.pop(name, None)
        self._digests.pop(name, None)
        if self.index.pop(name, None) is not None:
            self._path(name).unlink(missing_ok=True)

    def __getitem__(self, name: str) -> Tensor:
        """A tensor as accelerate reads it, verified."""
        try:
            states: Tensor = super().__getitem__(name)
        except (OSError, ValueError) as error:
            raise OffloadError(f"{name} cannot be read from {self.save_folder}: {error}. {AGAIN}") from error
        if pieces := self._digests.get(name):
            self._verify(name, _bytes(states[: pieces[-1][0]]), 0, pieces)
        return states

    def __len__(self) -> int:
        return len(self.state_dict) + len(self.index)

    def __iter__(self) -> Any:
        return iter((*self.state_dict, *self.index))

    def _path(self, name: str) -> Path:
        return Path(self.save_folder) / f"{name}.dat"

    def _row_bytes(self, name: str) -> int:
        info = self.index[name]
        width = torch.Size(info["shape"][1:]).numel()
        return width * getattr(torch, info["dtype"]).itemsize

    def _write(self, name: str, data: Any, offset: int) -> None:
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
    """K and V of one layer away from its device; brought by accelerate's hook for one use at a time."""

    def __init__(self, index: int, states: States, keys: Tensor, values: Tensor, place: torch.device | None) -> None:
        """Begin an empty layer.

        Shapes: keys `[tokens, batch, kv_heads, head_dim]`.
        """
        self._prefix, self._states, self.tokens = f"layer.{index}.", states, 0
        self._like = (keys.new_empty((0, *keys.shape[1:])), values.new_empty((0, *values.shape[1:])))
        self._lock = threading.Lock()
        self.place = place
        for name, like in zip(("keys", "values"), self._like, strict=True):
            states.create(self._prefix + name, like, place)

    @property
    def like(self) -> tuple[Tensor, Tensor]:
        """K and V of no token, `[batch, kv_heads, 0, head_dim]` each, on the device that computes the layer."""
        return self._like[0].permute(1, 2, 0, 3), self._like[1].permute(1, 2, 0, 3)

    @property
    def row_bytes(self) -> int:
        """Bytes of a token."""
        return sum(like.shape[1:].numel() * like.element_size() for like in self._like)

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Put tokens behind those it holds, `[new, batch, kv_heads, head_dim]` each."""
        with self._lock:
            try:
                for name, new in (("keys", keys), ("values", values)):
                    self._states.append(self._prefix + name, self.tokens, new)
            except BaseException:
                for name in ("keys", "values"):
                    self._states.forget(self._prefix + name, self.tokens)
                raise
            self.tokens += len(keys)

    def bring(self, rows: int) -> tuple[Tensor, Tensor]:
        """K and V on the device, `[rows, batch, kv_heads, head_dim]`; what is behind the tokens is undefined.

        accelerate's hook brings them to host memory. From there they go to a GPU without it: the hook would empty the
        allocator's cache, and so wait for the device, for every tensor.
        """
        keys, values = self._like
        with self._lock:
            for name in ("keys", "values"):
                self._states.reserve(self._prefix + name, rows)
            shapes = ((rows, *keys.shape[1:]), (rows, *values.shape[1:]))
            module = LayerStates(*shapes, keys.dtype)
            weights: Mapping[str, Tensor] = PrefixedDataset(self._states, self._prefix)
            where = "cpu" if self.place is None else self.place
            hook = AlignDevicesHook(where, offload=True, weights_map=weights)
            hook.pre_forward(hook.init_hook(module))  # called directly: attached, it makes a cycle with the module
            brought = module()
            hook.post_forward(module, None)
        return brought[0].to(keys.device), brought[1].to(values.device)

    def read(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """K and V of some tokens on the device, `[tokens, batch, kv_heads, head_dim]`."""
        with self._lock:
            found = [self._states.read(self._prefix + name, [(start, end)])[0] for name in ("keys", "values")]
            return found[0].to(self._like[0].device), found[1].to(self._like[1].device)

    def blocks(self, rows: Sequence[Sequence[int]], size: int) -> list[tuple[Tensor, Tensor]]:
        """K and V of some blocks of `size` tokens of each request, in host memory; pinned where a GPU computes.

        Shape: `[blocks, size, kv_heads, head_dim]`.
        """
        with self._lock:
            keys, values = (list(self._gathered(name, rows, size)) for name in ("keys", "values"))
        return list(zip(keys, values, strict=True))

    def _gathered(self, name: str, rows: Sequence[Sequence[int]], size: int) -> Iterator[Tensor]:
        name, like = self._prefix + name, self._like[name == "values"]
        some = sorted({block for blocks in rows for block in blocks})
        found = self._states.read(name, [(block * size, block * size + size) for block in some])
        places = {block: place for place, block in enumerate(some)}
        for row, blocks in enumerate(rows):
            shape, is_pinned = (len(blocks), size, *like.shape[2:]), like.is_cuda and torch.cuda.is_available()
            gathered = torch.empty(shape, dtype=like.dtype, pin_memory=is_pinned)  # a copy from there need not wait
            for target, block in zip(gathered, blocks, strict=True):
                target.copy_(found[places[block]][:, row])
            yield gathered

    def crop(self, tokens: int) -> None:
        """Keep the first so many tokens."""
        with self._lock:
            for name in ("keys", "values"):
                self._states.crop(self._prefix + name, tokens)
            self.tokens = min(self.tokens, tokens)

    def remove(self) -> None:
        """Forget all tokens and delete the files."""
        with self._lock:
            for name in ("keys", "values"):
                self._states.remove(self._prefix + name)
            self.tokens = 0
