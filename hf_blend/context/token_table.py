# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The tokens of a sequence cache: their cells in the storage, their sequences, and the columns of a forward.

A cell is a token's index in the storage. It is written once: the token's id, and the position that its key is rotated
for (its origin). A sequence is a list of (cell, position). So a copy costs nothing, and a shift of one sequence leaves
the others alone, where llama.cpp moves a shared cell for all of them. All ranges are half-open ranges of positions.
"""

import torch
from torch import Tensor

Row = tuple[Tensor, Tensor]  # cells and positions, `[tokens]` each, in the order in which attention sees them
EVERY = -1  # sequence, where tokens are removed


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
        """Replace a sequence, by `[tokens]` each; one without tokens is none."""
        if len(cells):
            self._rows[sequence] = cells, positions
        else:
            self._rows.pop(sequence, None)

    def length(self, sequence: int) -> int:
        """How many tokens a sequence has."""
        return len(self.row(sequence)[0])

    def next_position(self, sequence: int) -> int:
        """The position behind a sequence's highest."""
        positions = self.row(sequence)[1]
        return int(positions.max()) + 1 if len(positions) else 0

    def write(self, sequence: int, positions: Tensor, ids: Tensor) -> None:
        """Append tokens to a sequence, in new cells; positions and ids are `[tokens]`."""
        cells = torch.arange(self.count, self.count + len(ids))
        self.insert(ids, positions)
        self._append(sequence, cells, positions)

    def insert(self, ids: Tensor, origins: Tensor) -> None:
        """Append cells of no sequence."""
        self.ids = torch.cat([self.ids, ids])
        self.origins = torch.cat([self.origins, origins])

    def remove(self, sequence: int, start: int = 0, stop: int | None = None) -> None:
        """Forget the tokens of a sequence, or of every one (-1), at positions `start <= p < stop`."""
        for number in self.sequences if sequence == EVERY else [sequence]:
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
        cells, positions = self.row(sequence)
        self._rows = {}
        self.set_row(sequence, cells, positions)

    def shift(self, sequence: int, start: int, stop: int | None, delta: int) -> None:
        """Move the tokens at positions `start <= p < stop` by `delta`; those that would go below 0 are forgotten."""
        cells, positions = self.row(sequence)
        moved = torch.where(_within(positions, start, stop), positions + delta, positions)
        self.set_row(sequence, cells[moved >= 0], moved[moved >= 0])

    def divide(self, sequence: int, start: int, stop: int | None, by: int) -> None:
        """Divide the positions `start <= p < stop` by a whole number of at least 1, rounding down."""
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

    def compact(self) -> Tensor | None:
        """Drop the cells of no sequence and number the others again.

        Returns:
            The cells that stay, `[cells]`, increasing; None if all do.
        """
        rows = [cells for cells, _ in self._rows.values()]
        kept = torch.cat([torch.empty(0, dtype=torch.long), *rows]).unique()
        if len(kept) == self.count:
            return None
        for number, (cells, positions) in self._rows.items():
            self._rows[number] = torch.searchsorted(kept, cells), positions
        self.ids = self.ids[kept]
        self.origins = self.origins[kept]
        return kept

    def ends_with(self, sequence: int) -> bool:
        """Whether the last cells of the storage are those of a sequence, in its order."""
        cells, _ = self.row(sequence)
        return torch.equal(cells, torch.arange(self.count - len(cells), self.count))

    def _append(self, sequence: int, cells: Tensor, positions: Tensor) -> None:
        old_cells, old_positions = self.row(sequence)
        self.set_row(sequence, torch.cat([old_cells, cells]), torch.cat([old_positions, positions]))


def _within(positions: Tensor, start: int, stop: int | None) -> Tensor:
    """Which positions are in a range; a `stop` that is None or below 0 is the end, as in llama.h."""
    inside = positions >= start
    if stop is None or stop < 0:
        return inside
    return inside & (positions < stop)
