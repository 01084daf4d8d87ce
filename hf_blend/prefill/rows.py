# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Which tokens are still computed: a sorted set of columns per batch entry, which shrinks from layer to layer."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from ..model.anatomy import gather_rows


@dataclass
class Rows:
    """The rows of the hidden states, by their columns in the prompt.

    Batch entries with fewer rows than others repeat their first one: it is computed twice to the same result, and the
    outcome of an entry does not depend on its neighbours.
    """

    columns: Tensor
    filler: Tensor | None
    counts: tuple[int, ...]
    is_all: bool = False
    _moved: dict[torch.device, Tensor] = field(default_factory=dict, repr=False)

    @classmethod
    def of(
        cls, selected: Tensor, counts: Sequence[int] | None = None, is_alike: bool = False
    ) -> tuple["Rows", Tensor]:
        """Keep the selected columns, `[batch, columns]` → `[batch, kept]`; if alike, each entry keeps those of all."""
        if is_alike:
            selected = selected.any(dim=0, keepdim=True).repeat(selected.shape[0], 1)
            counts = None
        lengths = tuple(selected.sum(dim=1).tolist() if counts is None else counts)
        width = max(lengths)
        device = selected.device
        # Stable, so that the selected columns come first and in order
        index = torch.argsort(selected.view(torch.uint8), dim=1, descending=True, stable=True)[:, :width]
        if min(lengths) == width:
            return cls(index, None, lengths), index
        is_filler = torch.arange(width, device=device) >= torch.tensor(lengths, device=device)[:, None]
        index = torch.where(is_filler, index[:, :1], index).sort(dim=1).values
        is_repeated = torch.zeros_like(index, dtype=torch.bool)
        is_repeated[:, 1:] = index[:, 1:] == index[:, :-1]  # sorted, a row that equals the one before it
        return cls(index, is_repeated, lengths), index

    @classmethod
    def at(cls, numbers: list[list[int]], device: torch.device) -> "Rows":
        """Rows at columns that the host knows, as many in each entry."""
        rows = cls(torch.tensor(numbers).to(device), None, (len(numbers[0]),) * len(numbers))
        rows.numbers = numbers
        return rows

    @classmethod
    def every(cls, grid: Tensor) -> "Rows":
        """All columns of a `[batch, columns]` grid."""
        columns = torch.arange(grid.shape[1], device=grid.device).expand(grid.shape[0], -1)
        return cls(columns, None, (grid.shape[1],) * grid.shape[0], is_all=True)

    @cached_property
    def numbers(self) -> list[list[int]]:
        """The columns of each entry, repetitions included, known to the host; asks the device once."""
        numbers: list[list[int]] = self.columns.tolist()
        return numbers

    def keep(
        self, selected: Tensor, counts: Sequence[int] | None = None, is_alike: bool = False
    ) -> tuple["Rows", Tensor]:
        """Keep some of these rows as `of` does, `[batch, rows]` → `[batch, kept]`."""
        rest, index = Rows.of(selected if self.filler is None else selected & ~self.filler, counts, is_alike)
        if self.is_all:
            return rest, index
        return Rows(self.columns.gather(1, index), rest.filler, rest.counts), index

    def last(self, count: int) -> tuple["Rows", Tensor]:
        """Keep the last `count` rows, none of which is a repetition; otherwise as `keep`."""
        width = self.columns.shape[1]
        index = torch.arange(width - count, width, device=self.columns.device).expand(self.columns.shape[0], -1)
        rest = Rows(self.columns[:, -count:], None, (count,) * self.columns.shape[0])
        if "numbers" in vars(self):
            rest.numbers = [numbers[-count:] for numbers in self.numbers]
        return rest, index

    def take(self, grid: Tensor) -> Tensor:
        """The entries of a `[batch, tokens]` grid at these rows: `[batch, rows]`."""
        return grid if self.is_all else grid.gather(1, self.columns)

    def take_pair(self, states: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """The columns of K and V `[batch, heads, tokens, width]` at these rows: `[batch, heads, rows, width]` each."""
        if self.is_all:
            return states
        keys = gather_rows(states[0].transpose(1, 2), self.columns)
        values = gather_rows(states[1].transpose(1, 2), self.columns)
        return keys.transpose(1, 2), values.transpose(1, 2)

    def write_states(self, states: Sequence[Tensor], rows: Sequence[Tensor]) -> None:
        """Write K and V `[batch, heads, rows, width]` to these rows' columns of `[batch, heads, tokens, width]`."""
        device = states[0].device
        columns = self._moved.get(device)
        if columns is None:
            columns = self.columns[0] if self.columns.shape[0] == 1 else self.columns
            columns = columns.to(device)
            self._moved[device] = columns
        for into, new in zip(states, rows, strict=True):
            if columns.dim() == 1:  # of a single entry
                into.index_copy_(2, columns, new)
            else:
                into.scatter_(2, columns[:, None, :, None].expand_as(new), new)

    def behind(self, table: Tensor, tokens: int) -> Tensor:
        """Append the rows' part of a table, `[batch or 1, past + tokens, width]`, to it: layers read its last rows."""
        own = gather_rows(table[:, -tokens:], self.columns)
        return torch.cat((table.expand(own.shape[0], -1, -1), own), dim=1)


def highest(scores: Tensor, eligible: Tensor, counts: Sequence[int]) -> Tensor:
    """Mark the highest of the eligible scores of each batch entry, `[batch, rows]`; of equal ones the earlier."""
    marks = torch.zeros_like(eligible)
    if not any(counts):
        return marks
    lowest = torch.finfo(torch.float32).min  # still above -inf, the score of what is not eligible
    scores = scores.float().nan_to_num(nan=lowest, neginf=lowest)
    scores = torch.where(eligible, scores, float("-inf"))
    order = torch.argsort(scores, dim=1, descending=True, stable=True)[:, : max(counts)]
    if min(counts) == max(counts):
        return marks.scatter_(1, order, True) & eligible
    ranks = torch.arange(max(counts), device=scores.device)
    is_chosen = ranks < torch.tensor(counts, device=scores.device)[:, None]
    return marks.scatter_(1, order, is_chosen) & eligible
