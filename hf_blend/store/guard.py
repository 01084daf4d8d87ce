# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Notices that tensors which were handed out have been written to.

Chunks in memory are shared with everyone who asks for them, for a copy would cost more than all the rest of a hit.
torch has no tensors that cannot be written to; so what is handed out again is compared with what it was: the count of
in-place writes, address and shape of each tensor, and on the CPU some bytes of each, for writes through `.data` or
numpy that nobody counts. A write of a few values through those two can pass unseen, any other is found.
"""

from collections.abc import Iterable
from operator import attrgetter
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

__all__ = ["Guard"]

_PIECES = 4  # of each tensor, or of each layer of stacked ones
_PIECE_BYTES = 64
_SHAPE, _VERSION = attrgetter("shape"), attrgetter("_version")


class Guard:
    """Remembers what tensors are like now."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._tensors = list(tensors)
        self._pieces = [piece for tensor in self._tensors for piece in _pieces(tensor)]
        self._versioned = [tensor for tensor in self._tensors if not tensor.is_inference()]
        self._before = self._marks()

    def is_intact(self) -> bool:
        """Return True if nothing was written to the tensors since, as far as that can be seen."""
        return bool(self._marks() == self._before)

    def _marks(self) -> Any:
        return (  # by map, which calls no function of ours: each hit takes this way
            list(map(Tensor.data_ptr, self._tensors)),
            list(map(_SHAPE, self._tensors)),
            list(map(_VERSION, self._versioned)),
            xxhash.xxh3_64_intdigest(b"".join(map(np.ndarray.tobytes, self._pieces))),
        )


def _pieces(tensor: Tensor) -> list[np.ndarray]:
    """Some bytes of a tensor on the CPU, evenly spaced up to the last, `[pieces, bytes]`; none of other tensors."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or not tensor.numel():
        return []
    data = tensor.detach().view(-1).view(torch.uint8).numpy()
    width = min(_PIECE_BYTES, len(data))
    count = min(_PIECES * (tensor.shape[0] if tensor.ndim == 4 else 1), 1 + len(data) - width)
    step = (len(data) - width) // max(1, count - 1)
    first = len(data) - width - step * (count - 1)  # so that the last piece ends with the tensor
    return [np.lib.stride_tricks.as_strided(data[first:], (count, width), (max(1, step), 1))]
