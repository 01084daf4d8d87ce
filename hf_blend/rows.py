# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Which tokens still flow through the layers: a sorted set of columns per batch entry, made smaller on the way."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .anatomy import gather_rows


@dataclass(frozen=True)
class Rows:
    """The rows of the hidden states, by the columns at which they stand.

    Batch entries with fewer rows than others repeat their first one: it is computed twice to the same result, and the
    outcome of an entry does not depend on its neighbours.

    Attributes:
        columns: `[batch, rows]`, sorted, counted from the first new token.
        filler: `[batch, rows]`, True for the repetitions.
    """

    columns: Tensor
    filler: Tensor

    @classmethod
    def of(cls, wanted: Tensor) -> tuple["Rows", Tensor]:
        """Keep the wanted places of a grid.

        Args:
            wanted: `[batch, places]`, at least one True in each entry.

        Returns:
            The kept places as rows, and the same places as an index `[batch, kept]`.
        """
        counts = wanted.sum(dim=1, keepdim=True)
        width = int(counts.max())
        order = torch.argsort((~wanted).to(torch.uint8), dim=1, stable=True)[:, :width]
        filler = torch.arange(width, device=wanted.device) >= counts
        index = torch.where(filler, order[:, :1], order)
        index = index.sort(dim=1).values
        # behind the sort a repetition is any row equal to the one before it
        repeated = torch.zeros_like(filler)
        repeated[:, 1:] = index[:, 1:] == index[:, :-1]
        return cls(index, repeated), index

    @classmethod
    def every(cls, grid: Tensor) -> "Rows":
        """All places of a `[batch, places]` grid."""
        return cls.of(torch.ones_like(grid, dtype=torch.bool))[0]

    def keep(self, wanted: Tensor) -> tuple["Rows", Tensor]:
        """Keep some of these rows.

        Args:
            wanted: `[batch, rows]`, at least one True in each entry.

        Returns:
            The smaller set, and the index `[batch, kept]` of its rows among these.
        """
        kept, index = Rows.of(wanted & ~self.filler)
        return Rows(self.columns.gather(1, index), kept.filler), index

    def take(self, grid: Tensor) -> Tensor:
        """The entries of a `[batch, tokens]` grid at these rows: `[batch, rows]`."""
        return grid.gather(1, self.columns)

    def take_states(self, states: Tensor) -> Tensor:
        """The columns of `[batch, heads, tokens, width]` at these rows: `[batch, heads, rows, width]`."""
        return gather_rows(states.transpose(1, 2), self.columns).transpose(1, 2)

    def take_pair(self, states: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """`take_states` of K and of V."""
        return self.take_states(states[0]), self.take_states(states[1])

    def write_states(self, states: Tensor, rows: Tensor) -> None:
        """Write `[batch, heads, rows, width]` to these rows' columns of `[batch, heads, tokens, width]`."""
        columns = self.columns.to(states.device)
        if columns.shape[0] == 1:
            states.index_copy_(2, columns[0], rows)
        else:
            states.scatter_(2, columns[:, None, :, None].expand_as(rows), rows)


def highest(scores: Tensor, eligible: Tensor, counts: Tensor) -> Tensor:
    """Mark the highest scores of each batch entry, the earlier of equal ones first.

    Args:
        scores: `[batch, places]` float32; NaN counts as lowest.
        eligible: `[batch, places]`, which may be marked.
        counts: `[batch]`, how many to mark.

    Returns:
        `[batch, places]` boolean, exactly `counts` True in each entry (or all eligible, if fewer).
    """
    lowest = torch.finfo(torch.float32).min  # above what is not eligible: that may never take the place of what is
    scores = scores.float().nan_to_num(nan=lowest).masked_fill(~eligible, float("-inf"))
    order = torch.argsort(scores, dim=1, descending=True, stable=True)
    ranked = torch.arange(scores.shape[1], device=scores.device) < counts.to(scores.device)[:, None]
    return torch.zeros_like(eligible).scatter_(1, order, ranked) & eligible
