# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What each of some scattered rows sees: lines of a mask that are made a block at a time.

Sorted rows are taken in blocks, and a block reads keys only where one of its rows may look.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

BLOCK_ROWS = (128, 1024)  # rows per block on a CPU and on a GPU; fewer look at less in vain, more fill the kernels
BLOCK_BYTES = 32 << 20  # of the additive mask of one block
SMALL_MASK = 1 << 18  # rows x keys up to which one block is faster than several
KEPT_BYTES = 32 << 20  # of additive masks that are kept for all layers; larger ones are made where they are used
RUN_ROWS = 256  # neighbours from which on a kernel's own causal mask is worth a call
CAUSAL_MASK, CAUSAL_ROWS = (1 << 16, 1 << 19), 48  # on a CPU: rows x keys from and up to which to cut, and into what
SPAN_BLOCKS, SPAN_ROWS = 16, (64, 512)  # scattered rows are cut into so many blocks, or of so many rows


@dataclass(frozen=True)
class RowBlock:
    """Neighbouring rows and the keys that one of them may look at."""

    rows: slice
    keys: slice
    shared: int = 0
    is_run: bool = False


class RowLines(ABC):
    """The lines of a mask `[batch, heads or 1, rows, keys]`."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device
        self._biases: dict[tuple[object, ...], Tensor] = {}

    @abstractmethod
    def cut(self, rows: slice, keys: slice) -> Tensor:
        """The mask of some rows and keys, `[batch, heads or 1, rows, keys]`, in `dtype`."""

    @abstractmethod
    def to(self, device: torch.device) -> "RowLines":
        """The same lines on another device."""

    def plain(self) -> Tensor:
        """The whole mask."""
        return self.cut(slice(0, self.shape[2]), slice(0, self.shape[3]))

    @cached_property
    def blocks(self) -> list[RowBlock]:
        """Blocks in order; together they hold every row once."""
        rows, keys = self.shape[2:]
        if rows * keys <= SMALL_MASK:  # nobody is asked where they are
            return [RowBlock(slice(0, rows), slice(0, keys))]
        step = min(BLOCK_ROWS[self.device.type == "cuda"], max(64, BLOCK_BYTES // (4 * keys)))
        cut = [slice(start, min(start + step, rows)) for start in range(0, rows, step)]
        return [RowBlock(rows, slice(*end)) for rows, end in zip(cut, self._ends(cut), strict=True)]

    def bias(self, block: RowBlock, dtype: torch.dtype, repeats: int = 1) -> Tensor:
        """The additive mask of a block behind the keys that all its rows see.

        Shape: `[batch or 1, heads or 1, repeats * rows, keys]`.
        """
        place = (block.rows.start, block.rows.stop, block.shared, dtype, repeats)
        if place not in self._biases:
            keys = slice(max(block.keys.start, block.shared), block.keys.stop)
            made = self._additive(block.rows, keys, dtype)
            made = made.repeat(1, 1, repeats, 1) if repeats > 1 else made
            if sum(bias.nbytes for bias in self._biases.values()) + made.nbytes > KEPT_BYTES:
                return made
            self._biases[place] = made
        return self._biases[place]

    def _hidden(self, rows: slice, keys: slice) -> Tensor:
        """Where a boolean mask hides a key."""
        return self.cut(rows, keys).logical_not()

    def _additive(self, rows: slice, keys: slice, dtype: torch.dtype) -> Tensor:
        """A part of the mask as it is added to the scores."""
        if self.dtype != torch.bool:
            return self.cut(rows, keys).to(dtype)
        hidden = self._hidden(rows, keys)
        width = hidden.shape[3]  # kernels on a GPU read lines that begin at multiples of 16 bytes
        lines = torch.zeros((*hidden.shape[:3], -(-width // 8) * 8), dtype=dtype, device=hidden.device)[..., :width]
        return lines.masked_fill_(hidden, float("-inf"))

    def _ends(self, cut: list[slice]) -> list[tuple[int, int]]:
        """The first and the end of the keys that one of the rows of each block sees; asks the device once."""
        lines = []
        for rows in cut:
            part = self.cut(rows, slice(0, self.shape[3]))
            visible = part if part.dtype == torch.bool else part > torch.finfo(part.dtype).min / 2
            lines.append(visible.flatten(0, 2).any(0))
        seen = torch.stack(lines).to(torch.uint8)
        first, last = seen.argmax(1), seen.shape[1] - seen.flip(1).argmax(1)
        found = torch.stack((first, last, seen.amax(1)), dim=1).tolist()
        return [(start, end) if some else (0, seen.shape[1]) for start, end, some in found]


class MadeLines(RowLines):
    """The lines of a mask that is there."""

    def __init__(self, mask: Tensor) -> None:
        """Take a mask `[batch, heads or 1, rows, keys]`; no copy."""
        super().__init__(tuple(mask.shape), mask.dtype, mask.device)
        self._mask = mask

    def cut(self, rows: slice, keys: slice) -> Tensor:
        """See `RowLines.cut`; a view."""
        return self._mask[:, :, rows, keys]

    def to(self, device: torch.device) -> "MadeLines":
        """See `RowLines.to`."""
        return MadeLines(self._mask.to(device))


class ModelLines(RowLines):
    """Some rows' lines of the mask that a model made for all of them."""

    def __init__(self, mask: Tensor, rows: Tensor) -> None:
        """Take a mask `[batch or 1, heads or 1, tokens, keys]`, and the rows `[batch, kept]`."""
        super().__init__((rows.shape[0], mask.shape[1], rows.shape[1], mask.shape[3]), mask.dtype, mask.device)
        self._mask, self._rows = mask, rows.to(mask.device)

    def cut(self, rows: slice, keys: slice) -> Tensor:
        """See `RowLines.cut`."""
        mask, places = self._mask[..., keys], self._rows[:, rows]
        if places.shape[0] == 1:
            return mask.index_select(2, places[0])
        mask = mask.expand(places.shape[0], *mask.shape[1:])
        return torch.take_along_dim(mask, places[:, None, :, None], dim=2)

    def to(self, device: torch.device) -> "ModelLines":
        """See `RowLines.to`."""
        return ModelLines(self._mask.to(device), self._rows)


class LocalLines(RowLines):
    """Each row sees the keys up to its own column, within a window, where they are no padding."""

    def __init__(self, columns: Tensor, keys: int, window: int | None = None, real: Tensor | None = None) -> None:
        """Describe the lines.

        Shapes: columns `[batch, rows]`, real `[batch, …]`.
        """
        super().__init__((columns.shape[0], 1, columns.shape[1], keys), torch.bool, columns.device)
        self._columns, self._window, self._real = columns, window, real

    def cut(self, rows: slice, keys: slice) -> Tensor:
        """See `RowLines.cut`."""
        places, own = torch.arange(keys.start, keys.stop, device=self.device), self._columns[:, None, rows, None]
        seen = places <= own
        if self._window is not None:
            seen &= places > own - self._window
        if self._real is not None:
            real = self._real[:, -self.shape[3] :][:, None, None, keys]
            seen = seen & real.to(device=seen.device, dtype=torch.bool)
        return seen

    def to(self, device: torch.device) -> "LocalLines":
        """See `RowLines.to`."""
        return LocalLines(self._columns.to(device), self.shape[3], self._window, self._real)


class PackedLines(RowLines):
    """Each row sees nothing but its own chunk of several that are computed in one row of a batch."""

    def __init__(self, mask: Tensor | None, starts: Sequence[int], tokens: int, device: torch.device) -> None:
        """Describe the lines.

        Shapes: mask `[1, heads or 1, tokens, tokens]`.
        """
        columns = torch.arange(tokens, device=device)
        lines = LocalLines(columns[None], tokens) if mask is None else MadeLines(mask)
        super().__init__((1, *lines.shape[1:]), lines.dtype, lines.device)
        self._lines, self._starts, self._is_plain = lines, tuple(starts), mask is None
        self._chunks = torch.bucketize(columns, torch.tensor(self._starts, device=device), right=True)

    @cached_property
    def blocks(self) -> list[RowBlock]:
        """See `RowLines.blocks`; one for each chunk."""
        ends = (*self._starts[1:], self.shape[2])
        return [RowBlock(slice(*ends), slice(*ends)) for ends in zip(self._starts, ends, strict=True)]

    @cached_property
    def masks(self) -> list[Tensor | None]:
        """The mask of each block as the model makes it for its chunk alone; None where a causal kernel does."""
        if self._is_plain:
            return [None] * len(self._starts)
        cut = [self._lines.cut(block.rows, block.keys) for block in self.blocks]
        is_causal = (one.dtype == torch.bool and torch.equal(one, torch.ones_like(one).tril()) for one in cut)
        return [None if plain else one for one, plain in zip(cut, is_causal, strict=True)]

    def cut(self, rows: slice, keys: slice) -> Tensor:
        """See `RowLines.cut`."""
        seen, own = self._lines.cut(rows, keys), self._chunks[rows, None] == self._chunks[keys]
        return seen & own if seen.dtype == torch.bool else seen.masked_fill(~own, torch.finfo(seen.dtype).min)

    def to(self, device: torch.device) -> "PackedLines":
        """See `RowLines.to`."""
        moved = copy(self)
        moved.device, moved._lines, moved._chunks = device, self._lines.to(device), self._chunks.to(device)
        moved._biases = {}
        return moved


class CausalLines(LocalLines):
    """Each row of one batch entry sees the keys up to its own column; the host knows which that is."""

    def __init__(self, columns: Tensor, keys: int, ask: Callable[[], list[int]]) -> None:
        """Describe the lines.

        Shapes: columns `[1, rows]`.
        """
        super().__init__(columns, keys)
        self._ask = ask

    def _hidden(self, rows: slice, keys: slice) -> Tensor:
        places = torch.arange(keys.start, keys.stop, device=self.device)
        return places > self._columns[:, None, rows, None]

    @cached_property
    def _numbers(self) -> list[int]:
        return self._ask()

    @cached_property
    def blocks(self) -> list[RowBlock]:
        """See `RowLines.blocks`; on a CPU, where nobody has to wait for the columns, more of them."""
        least, most = CAUSAL_MASK
        if self.device.type != "cpu" or not least < self.shape[2] * self.shape[3] <= most:
            return super().blocks
        cut = _steps(0, self.shape[2], CAUSAL_ROWS)
        return [RowBlock(rows, slice(*end)) for rows, end in zip(cut, self._ends(cut), strict=True)]

    @cached_property
    def spans(self) -> list[RowBlock]:
        """Blocks for attention in two steps: first the keys that all rows of a block see, then the rest."""
        numbers, rows = self._numbers, self.shape[2]
        if rows * self.shape[3] <= CAUSAL_MASK[1]:
            return []
        step, cut, start = max(SPAN_ROWS[0], min(SPAN_ROWS[1], rows // SPAN_BLOCKS)), [], 0
        for run in _runs(numbers, RUN_ROWS):
            cut += _steps(start, run.start, step)
            cut.append(run)
            start = run.stop
        cut += _steps(start, rows, step)
        return [self._span(block) for block in cut]

    def _span(self, rows: slice) -> RowBlock:
        first, last = self._numbers[rows.start], self._numbers[rows.stop - 1]
        return RowBlock(rows, slice(0, last + 1), first, last - first == rows.stop - rows.start - 1)

    def _ends(self, cut: list[slice]) -> list[tuple[int, int]]:
        return [(0, self._numbers[rows.stop - 1] + 1) for rows in cut]

    def to(self, device: torch.device) -> "CausalLines":
        """See `RowLines.to`."""
        return CausalLines(self._columns.to(device), self.shape[3], self._ask)


def _runs(numbers: list[int], least: int) -> list[slice]:
    """Where at least so many numbers are neighbours."""
    gaps = [0, *(place for place in range(1, len(numbers)) if numbers[place] != numbers[place - 1] + 1), len(numbers)]
    return [slice(start, stop) for start, stop in pairwise(gaps) if stop - start >= least]


def _steps(start: int, stop: int, step: int) -> list[slice]:
    return [slice(one, min(one + step, stop)) for one in range(start, stop, step)]
