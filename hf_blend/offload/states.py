# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""K and V that are away from their device, in host memory or in files, and how they are brought back.

Tokens are the first axis, so that a tensor grows at its end: new tokens cost their own bytes, however long the
context. A file is mapped into memory and has no name: nobody else can open it, and it goes with its tensor or process.
"""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from ..cache.layers import Pair
from ..errors import OffloadError

SPARE = 8  # a tensor that grows takes an eighth more than it needs, so that not every growth copies it


class AwayLayer:
    """K and V of one layer that are away from its device, `[tokens, batch, kv_heads, head_dim]` each."""

    def __init__(self, keys: Tensor, values: Tensor, device: torch.device | None, folder: str | None) -> None:
        """Begin empty and like some tokens, on a device; in files of the folder if `device` is None."""
        self.like = keys[:0].clone(), values[:0].clone()  # on the device that computes the layer
        self.tokens = 0
        self._device = device
        self._folder = folder
        self._process = os.getpid()
        self._pools = [like.to(device or "cpu") for like in self.like]  # with room behind the tokens

    @property
    def disk_bytes(self) -> int:
        """Bytes of the tokens in files."""
        if self._device is not None:
            return 0
        return sum(pool[: self.tokens].nbytes for pool in self._pools)

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Append tokens, `[new, batch, kv_heads, head_dim]` each; none are appended if that fails."""
        self._check_process()
        end = self.tokens + len(keys)
        for which, new in enumerate((keys, values)):
            pool = self._pools[which]
            if len(pool) < end:
                grown = self._empty(pool, end + end // SPARE)
                grown[: self.tokens] = pool[: self.tokens]
                pool = self._pools[which] = grown
            pool[self.tokens : end] = new
        self.tokens = end

    def crop(self, tokens: int) -> None:
        """Keep only the first tokens."""
        self.tokens = min(self.tokens, tokens)

    def bring(self, rows: int) -> Pair:
        """K and V on the device, `[rows, batch, kv_heads, head_dim]`; what is behind the tokens is undefined."""
        self._check_process()
        keys, values = (like.new_empty((rows, *like.shape[1:])) for like in self.like)
        for states, pool in zip((keys, values), self._pools, strict=True):
            states[: self.tokens] = pool[: self.tokens]
        return keys, values

    def changed(self, change: Callable[[Tensor], Tensor]) -> "AwayLayer":
        """A layer with the same tokens after a change of the batch."""
        keys, values = (along_batch(change, like) for like in self.like)
        twin = AwayLayer(keys, values, self._device, self._folder)
        keys, values = (along_batch(change, pool[: self.tokens]) for pool in self._pools)
        twin.append(keys, values)
        return twin

    def _empty(self, like: Tensor, tokens: int) -> Tensor:
        if self._device is not None:
            return like.new_empty((tokens, *like.shape[1:]))
        if self._folder is None:
            raise OffloadError(
                "K and V go to the disk, but offload_folder is None, expected a folder. Give offload_folder=…."
            )
        nbytes = tokens * like.shape[1:].numel() * like.element_size()
        try:
            with tempfile.NamedTemporaryFile(dir=self._folder, prefix="hf-blend-kv-") as file:
                _reserve(file.fileno(), nbytes)
                data = torch.from_file(file.name, shared=True, size=nbytes, dtype=torch.uint8)
        except OSError as error:
            raise OffloadError(
                f"{nbytes:,} bytes of K and V cannot be written to {self._folder}: {error}. Free space there. Call "
                "reset() of the cache and run the prompt again."
            ) from error
        return data.view(like.dtype).view(tokens, *like.shape[1:])

    def _check_process(self) -> None:
        """Refuse to share files and memory with the parent of a forked process, which may write to them."""
        if os.getpid() != self._process:
            raise OffloadError(
                "K and V that are away were used in a forked process, expected the process that computed them. Call "
                "reset() of the cache and run the prompt again."
            )


def check_folder(folder: str | None) -> None:
    """Refuse a folder in which no file can be made; it is made if it is not there."""
    if folder is None:
        return
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise OffloadError(
            f"offload_folder={folder!r} cannot be used: {error}. Give a folder that can be written to."
        ) from error


def _reserve(file: int, nbytes: int) -> None:
    """Take room on the disk now: writing to a mapped file that finds none would end the process."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, nbytes)
    else:
        for start in range(0, nbytes, 1 << 20):
            os.write(file, bytes(min(1 << 20, nbytes - start)))


def as_states(rows: Tensor) -> Tensor:
    """View `[tokens, batch, kv_heads, head_dim]` as `[batch, kv_heads, tokens, head_dim]`."""
    return rows.permute(1, 2, 0, 3)


def along_batch(change: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """Apply a change of the first axis to the batch of `[tokens, batch, …]`."""
    return change(rows.transpose(0, 1)).transpose(0, 1)


def is_same(device: torch.device, other: torch.device) -> bool:
    """Return True for two names of one device."""
    return device.type == other.type and (device.index or 0) == (other.index or 0)
