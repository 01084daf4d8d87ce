# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Notices that tensors which were handed out have been written to.

Chunks in memory are shared with everyone who asks for them, for a copy would cost more than all the rest of a hit.
torch has no tensors that cannot be written to; so what is handed out again is compared with what it was: the count of
in-place writes, address and shape of each tensor, and on the CPU some bytes of each, for writes through `.data` or
numpy that nobody counts. A write of a few values through those two can pass unseen, any other is found.
"""

from collections.abc import Iterable

import torch
import xxhash
from torch import Tensor

__all__ = ["Guard"]

_PIECES = 4  # of each tensor
_PIECE_BYTES = 64


class Guard:
    """Remembers what tensors are like now.

    Args:
        tensors: to be watched; they are kept alive.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._tensors = list(tensors)
        self._pieces = [piece for tensor in self._tensors for piece in _pieces(tensor)]
        self._before = self._marks()

    def is_intact(self) -> bool:
        """Say whether nothing was written to the tensors since, as far as that can be seen."""
        return self._marks() == self._before

    def _marks(self) -> tuple[object, ...]:
        seen = [(_writes(one), one.data_ptr(), one.shape) for one in self._tensors]
        return seen, xxhash.xxh3_64_intdigest(b"".join(self._pieces))


def _writes(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _pieces(tensor: Tensor) -> list[memoryview]:
    """Some bytes of a tensor on the CPU, evenly spaced, the first and the last among them."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or not tensor.numel():
        return []
    data = memoryview(tensor.detach().view(-1).view(torch.uint8).numpy())
    last = max(0, len(data) - _PIECE_BYTES)
    starts = sorted({last * number // (_PIECES - 1) for number in range(_PIECES)})
    return [data[start : start + _PIECE_BYTES] for start in starts]
