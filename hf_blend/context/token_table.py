# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The tokens of a sequence cache: their cells in the storage, their sequences, and the columns of a forward.

A cell is a token's index in the storage. It is written once: the token's id, the position that its key is rotated for
(its origin), and the number of its author. A sequence is a list of (cell, position). So a copy costs nothing, and a
shift of one sequence leaves the others alone, where llama.cpp moves a shared cell for all of them. All ranges are
half-open ranges of positions.

Attention is given the cells as they are, as in llama.cpp's unified cache, and a mask hides those of other sequences.
So a batch of sequences reads a shared prefix once. Where most of the storage belongs to other sequences, or keys have
moved, the columns are a copy of the cells that are needed, each once.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import ConfigError

HIDDEN_SHARE = 0.5  # of the columns that may be hidden from all; where it is more, a copy is faster to look at

Row = tuple[Tensor, Tensor]  # cells and positions, `[tokens]` each, in the order in which attention sees them


class TokenTable:
    """Sequences by number, over cells 0, 1, 2 … of a storage; of each cell it has id, origin and author."""

    def __init__(self, rows: Mapping[int, Row] | None = None, cells: Tensor | None = None) -> None:
        """Begin with some sequences over `cells`, `[3, cells]`: id, origin and author of each."""
        self._rows = dict(rows or {})
        self._cells = torch.empty((3, 0), dtype=torch.long) if cells is None else cells

    @property
    def ids(self) -> Tensor:
        """The token id of each cell, `[cells]`."""
        return self._cells[0]

    @property
    def origins(self) -> Tensor:
        """The position that the key of each cell is rotated for, `[cells]`."""
        return self._cells[1]

    @property
    def authors(self) -> Tensor:
        """The number of who computed each cell, `[cells]`."""
        return self._cells[2]

    def about(self, cells: Tensor) -> Tensor:
        """Ids, origins and authors of some cells, `[3, cells]`."""
        return self._cells[:, cells]

    @property
    def count(self) -> int:
        """How many cells the storage has."""
        return self._cells.shape[1]

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._rows))

    def row(self, sequence: int) -> Row:
        """Cells and positions of a sequence, `[tokens]` each; one that was never written to is empty."""
        empty = torch.empty(0, dtype=torch.long)
        return self._rows.get(sequence, (empty, empty))

    def next_position(self, sequence: int) -> int:
        """The position behind a sequence's highest."""
        positions = self.row(sequence)[1]
        return int(positions.max()) + 1 if positions.numel() else 0

    def write(self, sequences: Sequence[int], positions: Tensor, ids: Tensor, real: Tensor, author: int = 0) -> None:
        """Append tokens to several sequences, in new cells; those of a sequence are neighbours.

        Shapes: positions, ids and real `[sequences, tokens]`; where `real` is False, the token is padding.
        """
        cells = torch.arange(self.count, self.count + real.numel()).view(real.shape)
        self.insert(self.count, described(ids.flatten(), positions.flatten(), author))
        for row, number in enumerate(sequences):
            self._extend(number, cells[row][real[row]], positions[row][real[row]])

    def take(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Replace each target by its source, at the same positions; the storage is shared."""
        self._rows |= dict(zip(targets, [self.row(source) for source in sources], strict=True))

    def hold(self, sequence: int, cells: Tensor, positions: Tensor) -> None:
        """Replace a sequence, by `[tokens]` each."""
        self._rows[sequence] = cells, positions

    def insert(self, cell: int, new: Tensor) -> None:
        """Insert cells of no sequence, `[3, cells]`, in front of `cell`, which gets a higher number."""
        self._rows = {number: (own + new.shape[1] * (own >= cell), at) for number, (own, at) in self._rows.items()}
        self._cells = torch.cat([self._cells[:, :cell], new, self._cells[:, cell:]], 1)

    def forget(self, sequences: Iterable[int]) -> None:
        """Forget sequences, as if they had never been written to."""
        for number in sequences:
            self._rows.pop(number, None)

    def remove(self, sequence: int | None, start: int = 0, stop: int | None = None) -> None:
        """Forget the tokens of a sequence, or of all (None), at positions `start <= p < stop` (None: to the end)."""
        for number in list(self) if sequence is None else [sequence]:
            self._change(number, start, stop, lambda positions: torch.full_like(positions, -1))

    def copy(self, source: int, target: int, start: int = 0, stop: int | None = None) -> None:
        """Add tokens of a sequence to another, at the same positions; the storage is shared."""
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
        """Forget the last `tokens` of a sequence, whatever their positions; all where it has fewer."""
        cells, positions = self.row(sequence)
        left = max(0, len(cells) - tokens)
        gone, self._rows[sequence] = cells[left:], (cells[:left], positions[:left])
        if gone.numel() and int(gone.max()) + 1 == self.count:
            end_cell = max((int(row.max()) + 1 for row, _ in self._rows.values() if row.numel()), default=0)
            end = max(end_cell, self.count - len(gone))  # the end of the storage is free again
            self._cells = self._cells[:, :end]

    def used_cells(self) -> Tensor:
        """The cells of all sequences, ascending, each once."""
        return torch.unique(torch.cat([self.ids[:0], *(cells for cells, _ in self._rows.values())]))

    def compact(self) -> Tensor:
        """Drop the cells of no sequence and number the others again; returns the cells that stay, `[cells]`."""
        kept = self.used_cells()
        self._rows = {number: (torch.searchsorted(kept, cells), at) for number, (cells, at) in self._rows.items()}
        self._cells = self._cells[:, kept]
        return kept

    def view(self, sequences: Sequence[int], may_hide: bool) -> "View":
        """The columns that attention is given for some sequences; `may_hide`: a mask can hide cells of others."""
        rows = [self.row(number) for number in sequences]
        if len(rows) == 1 and torch.equal(rows[0][0], torch.arange(self.count - len(rows[0][0]), self.count)):
            return View(*rows[0], in_order=True, visible=None)
        if may_hide and all(torch.equal(self.origins[cells], positions) for cells, positions in rows):
            first = min((int(cells.min()) for cells, _ in rows if cells.numel()), default=self.count)
            visible = _marked([cells - first for cells, _ in rows], self.count - first)
            if int(visible.any(0).sum()) >= (1 - HIDDEN_SHARE) * (self.count - first):
                return View(torch.arange(first, self.count), self.origins[first:], in_order=True, visible=visible)
        return View(*rows[0], in_order=False, visible=None) if len(rows) == 1 else _copied(rows)

    def _extend(self, sequence: int, cells: Tensor, positions: Tensor) -> None:
        old_cells, old_positions = self.row(sequence)
        self._rows[sequence] = torch.cat([old_cells, cells]), torch.cat([old_positions, positions])

    def _change(self, sequence: int, start: int, stop: int | None, change: Callable[[Tensor], Tensor]) -> None:
        cells, positions = self.row(sequence)
        moved = torch.where(_within(positions, start, stop), change(positions), positions)
        self._rows[sequence] = cells[moved >= 0], moved[moved >= 0]


@dataclass(frozen=True)
class View:
    """Columns of keys and values: cells and positions, `[columns]`; `visible` to each sequence, None: all to all."""

    cells: Tensor
    positions: Tensor
    in_order: bool
    visible: Tensor | None


def described(ids: Tensor, origins: Tensor, author: int) -> Tensor:
    """Cells of one author as a table has them, `[3, cells]`, from `[cells]` each."""
    return torch.stack([ids, origins, torch.full_like(ids, author)])


def mask_of(visible: Tensor, real: Tensor) -> Tensor:
    """The mask of new tokens, which are behind all columns, those of a sequence side by side.

    Shapes: visible `[sequences, columns]`, real `[sequences, tokens]` → `[sequences, 1, tokens, columns + sequences *
    tokens]`.
    """
    sequences, tokens = real.shape
    before = torch.ones((tokens, tokens), dtype=torch.bool, device=visible.device).tril()
    own = before & (real.to(visible.device)[:, None] | torch.eye(tokens, dtype=torch.bool, device=visible.device))
    new = own.new_zeros((sequences, tokens, sequences, tokens))
    numbers = torch.arange(sequences, device=visible.device)
    new[numbers, :, numbers] = own
    past = visible[:, None].expand(-1, tokens, -1)
    return torch.cat([past, new.flatten(2)], 2)[:, None]


def grown(visible: Tensor, real: Tensor) -> Tensor:
    """The visible columns after a forward of new tokens, `[sequences, columns + sequences * tokens]`."""
    new = torch.diag_embed(real.to(visible.device).T).permute(1, 2, 0)  # [sequence, sequence of the token, token]
    return torch.cat([visible, new.flatten(1)], 1)


def _copied(rows: Sequence[Row]) -> View:
    """Every cell at every position at which a sequence has it, once; ordered by cell."""
    cells, positions = (torch.cat(parts) for parts in zip(*rows, strict=True))
    most = int(positions.max()) + 1 if len(positions) else 1
    pairs, column = torch.unique(cells * most + positions, return_inverse=True)
    columns = column.split([len(row[0]) for row in rows])
    return View(pairs // most, pairs % most, in_order=False, visible=_marked(columns, len(pairs)))


def _marked(columns: Sequence[Tensor], count: int) -> Tensor:
    marked = torch.zeros((len(columns), count), dtype=torch.bool)
    for line, own in zip(marked, columns, strict=True):
        line[own] = True
    return marked


def _within(positions: Tensor, start: int, stop: int | None) -> Tensor:
    inside = positions >= max(0, start)
    return inside if stop is None else inside & (positions < stop)
