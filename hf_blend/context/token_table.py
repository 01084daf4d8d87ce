# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The tokens of a sequence cache: their cells in the storage, their sequences, and the columns of a forward.

A cell is a token's index in the storage. It is written once: the token's id, and the position that its key is rotated
for (its origin). A sequence is a list of (cell, position). So a copy costs nothing, and a shift of one sequence leaves
the others alone, where llama.cpp moves a shared cell for all of them. All ranges are half-open ranges of positions.

Attention is given the cells as they are, as in llama.cpp's unified cache, and a mask hides those of other sequences.
So a batch of sequences reads a shared prefix once. Where most of the storage belongs to other sequences, or keys have
moved, the columns are a copy of the cells that are needed, each once.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import ConfigError

HIDDEN_SHARE = 0.5  # of the columns that may be hidden from all; where it is more, a copy is faster to look at

Row = tuple[Tensor, Tensor]  # cells and positions, `[tokens]` each, in the order in which attention sees them


class TokenTable:
    """Sequences by number, over cells 0, 1, 2 … of a storage.

    Attributes:
        ids: the token id of each cell, `[cells]`.
        origins: the position that the key of each cell is rotated for, `[cells]`.
    """

    def __init__(self) -> None:
        self.ids = torch.empty(0, dtype=torch.long)
        self.origins = torch.empty(0, dtype=torch.long)
        self._rows: dict[int, Row] = {}

    @property
    def count(self) -> int:
        """How many cells the storage has."""
        return len(self.ids)

    @property
    def sequences(self) -> list[int]:
        """The numbers of the sequences, in increasing order."""
        return sorted(self._rows)

    def row(self, sequence: int) -> Row:
        """Cells and positions of a sequence, `[tokens]` each; one that was never written to is empty."""
        empty = torch.empty(0, dtype=torch.long)
        return self._rows.get(sequence, (empty, empty))

    def set_row(self, sequence: int, cells: Tensor, positions: Tensor) -> None:
        """Replace a sequence, by `[tokens]` each."""
        self._rows[sequence] = cells, positions

    def length(self, sequence: int) -> int:
        """How many tokens a sequence has."""
        return len(self.row(sequence)[0])

    def next_position(self, sequence: int) -> int:
        """The position behind a sequence's highest."""
        positions = self.row(sequence)[1]
        return int(positions.max()) + 1 if len(positions) else 0

    def write(self, sequences: Sequence[int], positions: Tensor, ids: Tensor, real: Tensor) -> None:
        """Append tokens to several sequences, in new cells; those of a sequence are neighbours.

        Shapes: positions, ids and real `[sequences, tokens]`; where `real` is False, the token is padding.
        """
        cells = torch.arange(self.count, self.count + real.numel()).view(real.shape)
        self.insert(self.count, ids.flatten(), positions.flatten())
        for row, number in enumerate(sequences):
            self._append(number, cells[row][real[row]], positions[row][real[row]])

    def insert(self, cell: int, ids: Tensor, origins: Tensor) -> None:
        """Insert cells of no sequence in front of `cell`, which gets a higher number."""
        for number, (cells, positions) in self._rows.items():
            self._rows[number] = cells + len(ids) * (cells >= cell), positions
        self.ids = torch.cat([self.ids[:cell], ids, self.ids[cell:]])
        self.origins = torch.cat([self.origins[:cell], origins, self.origins[cell:]])

    def forget(self, sequences: Iterable[int]) -> None:
        """Forget sequences, as if they had never been written to."""
        for number in sequences:
            self._rows.pop(number, None)

    def remove(self, sequence: int | None, start: int = 0, stop: int | None = None) -> None:
        """Forget the tokens of a sequence, or of all (None), at positions `start <= p < stop` (None: to the end)."""
        for number in self.sequences if sequence is None else [sequence]:
            cells, positions = self.row(number)
            stays = ~_within(positions, start, stop)
            self.set_row(number, cells[stays], positions[stays])

    def copy(self, source: int, target: int, start: int = 0, stop: int | None = None) -> None:
        """Add tokens of a sequence to another, at the same positions; the storage is shared."""
        cells, positions = self.row(source)
        is_new = ~torch.isin(cells, self.row(target)[0])
        copied = _within(positions, start, stop) & is_new
        self._append(target, cells[copied], positions[copied])

    def keep(self, sequence: int) -> None:
        """Forget every other sequence."""
        self._rows = {sequence: self.row(sequence)}

    def shift(self, sequence: int, start: int, stop: int | None, delta: int) -> None:
        """Move the tokens at positions `start <= p < stop` by `delta`; those that would go below 0 are forgotten."""
        cells, positions = self.row(sequence)
        moved = torch.where(_within(positions, start, stop), positions + delta, positions)
        self.set_row(sequence, cells[moved >= 0], moved[moved >= 0])

    def divide(self, sequence: int, start: int, stop: int | None, by: int) -> None:
        """Divide the positions `start <= p < stop` by a whole number of at least 1, rounding down."""
        if by < 1:
            raise ConfigError(f"positions are to be divided by {by}, but a whole number from 1 on is expected.")
        cells, positions = self.row(sequence)
        divided = torch.where(_within(positions, start, stop), positions // by, positions)
        self.set_row(sequence, cells, divided)

    def crop(self, sequence: int, tokens: int) -> None:
        """Forget the last `tokens` of a sequence, whatever their positions; all where it has fewer."""
        cells, positions = self.row(sequence)
        left = max(0, len(cells) - tokens)
        cropped = cells[left:]
        self.set_row(sequence, cells[:left], positions[:left])
        if not len(cropped) or int(cropped.max()) + 1 < self.count:
            return
        # The cropped cells are at the end of the storage, which is free again where no sequence has it
        end = self.count - len(cropped)
        for row, _ in self._rows.values():
            if len(row):
                end = max(end, int(row.max()) + 1)
        self.ids = self.ids[:end]
        self.origins = self.origins[:end]

    def used_cells(self) -> Tensor:
        """The cells of all sequences, ascending, each once."""
        return _joined([cells for cells, _ in self._rows.values()]).unique()

    def compact(self) -> Tensor:
        """Drop the cells of no sequence and number the others again; returns the cells that stay, `[cells]`."""
        kept = self.used_cells()
        for number, (cells, positions) in self._rows.items():
            self._rows[number] = torch.searchsorted(kept, cells), positions
        self.ids = self.ids[kept]
        self.origins = self.origins[kept]
        return kept

    def view(self, sequences: Sequence[int], may_hide: bool) -> "View":
        """The columns that attention is given for some sequences; `may_hide`: a mask can hide cells of others."""
        rows = [self.row(number) for number in sequences]
        cells, positions = rows[0]
        if len(rows) == 1 and torch.equal(cells, torch.arange(self.count - len(cells), self.count)):
            return View(cells, positions, in_order=True, visible=None)
        if may_hide and all(torch.equal(self.origins[row], at) for row, at in rows):
            # Nothing has moved: the cells themselves, from the first that is needed on
            first = min((int(row.min()) for row, _ in rows if len(row)), default=self.count)
            visible = _marked([row - first for row, _ in rows], self.count - first)
            if int(visible.any(0).sum()) >= (1 - HIDDEN_SHARE) * (self.count - first):
                return View(torch.arange(first, self.count), self.origins[first:], in_order=True, visible=visible)
        if len(rows) == 1:
            return View(cells, positions, in_order=False, visible=None)
        return _copied_columns(rows)

    def _append(self, sequence: int, cells: Tensor, positions: Tensor) -> None:
        old_cells, old_positions = self.row(sequence)
        self.set_row(sequence, torch.cat([old_cells, cells]), torch.cat([old_positions, positions]))


@dataclass(frozen=True)
class View:
    """Columns of keys and values: cells and positions, `[columns]`; `visible` to each sequence, None: all to all."""

    cells: Tensor
    positions: Tensor
    in_order: bool
    visible: Tensor | None


def mask_of(visible: Tensor, real: Tensor) -> Tensor:
    """Which columns new tokens see. New tokens are behind all columns, those of a sequence side by side.

    Shapes: visible `[sequences, columns]`, real `[sequences, tokens]` → `[sequences, 1, tokens, columns + sequences *
    tokens]`.
    """
    sequences, tokens = real.shape
    columns = visible.shape[1]
    mask = visible.new_zeros((sequences, 1, tokens, columns + sequences * tokens))
    mask[..., :columns] = visible[:, None, None]
    before = torch.ones((tokens, tokens), dtype=torch.bool, device=visible.device).tril()
    itself = torch.eye(tokens, dtype=torch.bool, device=visible.device)
    for number in range(sequences):
        start = columns + number * tokens
        # Padding sees itself, so that its softmax is over something
        mask[number, 0, :, start : start + tokens] = before & (real[number].to(visible.device) | itself)
    return mask


def grown(visible: Tensor, real: Tensor) -> Tensor:
    """The visible columns after a forward of new tokens, `[sequences, columns + sequences * tokens]`."""
    sequences, tokens = real.shape
    new = visible.new_zeros((sequences, sequences * tokens))
    for number in range(sequences):
        new[number, number * tokens : (number + 1) * tokens] = real[number].to(visible.device)
    return torch.cat([visible, new], 1)


def _copied_columns(rows: Sequence[Row]) -> View:
    """Every cell at every position at which a sequence has it, once; ordered by cell."""
    cells = _joined([row for row, _ in rows])
    positions = _joined([at for _, at in rows])
    positions_count = int(positions.max()) + 1 if len(positions) else 1
    pairs, column = torch.unique(cells * positions_count + positions, return_inverse=True)
    columns = column.split([len(row) for row, _ in rows])
    visible = _marked(columns, len(pairs))
    return View(pairs // positions_count, pairs % positions_count, in_order=False, visible=visible)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([torch.empty(0, dtype=torch.long), *parts])


def _marked(columns: Sequence[Tensor], count: int) -> Tensor:
    marked = torch.zeros((len(columns), count), dtype=torch.bool)
    for line, marked_columns in zip(marked, columns, strict=True):
        line[marked_columns] = True
    return marked


def _within(positions: Tensor, start: int, stop: int | None) -> Tensor:
    inside = positions >= max(0, start)
    return inside if stop is None else inside & (positions < stop)
