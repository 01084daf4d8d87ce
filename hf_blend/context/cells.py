# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Which tokens a sequence holds, and where: bookkeeping for a cache whose sequences share tokens.

A cell is one token's place in the storage, written once. A sequence is a list of (cell, position). So a copy costs
nothing, and a shift of one sequence leaves every other alone, where llama.cpp moves a shared cell for all of them.
Ranges are half-open ranges of positions.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from ..errors import ConfigError

Row = tuple[Tensor, Tensor]  # cells and positions, `[tokens]` each, in the order in which attention sees them


class TokenTable:
    """Sequences by number, over cells 0, 1, 2 … of some storage."""

    def __init__(self) -> None:
        self._rows: dict[int, Row] = {}
        self.count = 0  # cells ever given out and not compacted away

    @classmethod
    def of(cls, rows: dict[int, Row], storage: Tensor) -> "TokenTable":
        """Sequences by number over a storage that has as many cells as `storage` has entries."""
        cells = cls()
        cells._rows = {number: (row.clone(), at.clone()) for number, (row, at) in rows.items()}
        cells.count = len(storage)
        return cells

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._rows))

    def row(self, sequence: int) -> Row:
        """Cells and positions of a sequence, `[tokens]` each; a sequence that nobody wrote to is empty."""
        empty = torch.empty(0, dtype=torch.long)
        return self._rows.get(sequence, (empty, empty))

    def next_position(self, sequence: int) -> int:
        """Where the next token of a sequence goes: behind its highest position."""
        positions = self.row(sequence)[1]
        return int(positions.max()) + 1 if positions.numel() else 0

    def append(self, sequence: int, tokens: int) -> Tensor:
        """Give a sequence new tokens behind its last.

        Shape: `[tokens]`.
        """
        positions = torch.arange(tokens) + self.next_position(sequence)
        self._extend(sequence, torch.arange(self.count, self.count + tokens), positions)
        self.count += tokens
        return positions

    def bring(self, sequences: Sequence[int], positions: Tensor, real: Tensor) -> None:
        """Give several sequences new tokens, whose cells are the last of the storage, those of a sequence together.

        Shapes: positions `[sequences, tokens]`, real `[sequences, tokens]`.
        """
        cells = torch.arange(self.count, self.count + real.numel()).view(real.shape)
        for row, number in enumerate(sequences):
            self._extend(number, cells[row][real[row]], positions[row][real[row]])
        self.count += real.numel()

    def take(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Let each target hold just what its source held before, at the same positions; the storage is shared."""
        self._rows |= dict(zip(targets, [self.row(source) for source in sources], strict=True))

    def hold(self, sequence: int, cells: Tensor, positions: Tensor) -> None:
        """Let a sequence hold just these, `[tokens]` each; cells behind the last are new ones of the storage."""
        self._rows[sequence] = cells, positions
        self.count = max(self.count, int(cells.max()) + 1 if cells.numel() else 0)

    def insert(self, cell: int, cells: int) -> None:
        """Renumber the cells from `cell` on, so that the storage has room for some more in front of them."""
        self._rows = {number: (held + cells * (held >= cell), at) for number, (held, at) in self._rows.items()}
        self.count += cells

    def forget(self, sequences: Iterable[int]) -> None:
        """Forget sequences, as if nobody had written to them."""
        for number in sequences:
            self._rows.pop(number, None)

    def remove(self, sequence: int | None, start: int = 0, stop: int | None = None) -> None:
        """Forget the tokens of a sequence, or of all (None), at positions `start <= p < stop` (None: to the end)."""
        for number in list(self) if sequence is None else [sequence]:
            self._change(number, start, stop, lambda positions: torch.full_like(positions, -1))

    def copy(self, source: int, target: int, start: int = 0, stop: int | None = None) -> None:
        """Let a sequence hold the tokens of another too, at the same positions; the storage is shared."""
        cells, positions = self.row(source)
        there = _within(positions, start, stop) & ~torch.isin(cells, self.row(target)[0])
        self._extend(target, cells[there], positions[there])

    def keep(self, sequence: int) -> None:
        """Forget every other sequence."""
        self._rows = {sequence: self.row(sequence)}

    def shift(self, sequence: int, start: int, stop: int | None, delta: int) -> None:
        """Move the tokens at positions `start <= p < stop` by `delta`; those that would go below 0 are forgotten."""
        self._change(sequence, start, stop, lambda positions: positions + delta)

    def divide(self, sequence: int, start: int, stop: int | None, by: int) -> None:
        """Divide the positions `start <= p < stop` by a whole number of at least 1, rounding down."""
        if by < 1:
            raise ConfigError(f"positions are to be divided by {by}, but a whole number from 1 on is expected.")
        self._change(sequence, start, stop, lambda positions: positions // by)

    def crop(self, sequence: int, tokens: int) -> None:
        """Forget the last `tokens` columns of a sequence, whatever their positions; all where it has fewer."""
        cells, positions = self.row(sequence)
        left = max(0, len(cells) - tokens)
        gone = cells[left:]
        self._rows[sequence] = cells[:left], positions[:left]
        held = max((int(row.max()) + 1 for row, _ in self._rows.values() if row.numel()), default=0)
        if gone.numel() and int(gone.max()) + 1 == self.count:
            self.count = max(held, self.count - len(gone))  # the end of the storage is free again

    def held(self) -> Tensor:
        """The cells that some sequence holds, ascending, each once."""
        empty = torch.empty(0, dtype=torch.long)
        return torch.unique(torch.cat([empty, *(cells for cells, _ in self._rows.values())]))

    def compact(self) -> Tensor:
        """Close the holes that tokens of no sequence leave in the storage.

        Shape: `[kept]`.
        """
        kept = self.held()
        self._rows = {number: (torch.searchsorted(kept, cells), at) for number, (cells, at) in self._rows.items()}
        self.count = len(kept)
        return kept

    def _extend(self, sequence: int, cells: Tensor, positions: Tensor) -> None:
        old_cells, old_positions = self.row(sequence)
        self._rows[sequence] = torch.cat([old_cells, cells]), torch.cat([old_positions, positions])

    def _change(self, sequence: int, start: int, stop: int | None, change: Callable[[Tensor], Tensor]) -> None:
        cells, positions = self.row(sequence)
        moved = torch.where(_within(positions, start, stop), change(positions), positions)
        self._rows[sequence] = cells[moved >= 0], moved[moved >= 0]


def _within(positions: Tensor, start: int, stop: int | None) -> Tensor:
    inside = positions >= max(0, start)
    return inside if stop is None else inside & (positions < stop)
