# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What attention is given of a storage that several sequences share: its columns, and which of them each one sees.

As in llama.cpp's unified cache, the columns are cells of the storage as they are, and cells of other sequences are
hidden by a mask, so that a batch of sequences reads a shared prefix once. Where most of the storage belongs to others,
or keys have moved, the columns are a copy of the cells that are needed, each once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .cells import Row

HIDDEN_SHARE = 0.5  # of the columns that may be hidden from all; where it is more, a copy is faster to look at


@dataclass(frozen=True)
class View:
    """Columns of keys and values."""

    cells: Tensor
    positions: Tensor
    in_order: bool
    seen: Tensor | None


def view_of(rows: Sequence[Row], origins: Tensor, count: int, may_hide: bool) -> View:
    """Find the columns for some sequences.

    Shapes: origins `[cells]`.
    """
    if len(rows) == 1 and torch.equal(rows[0][0], torch.arange(count - len(rows[0][0]), count)):
        return View(*rows[0], in_order=True, seen=None)
    if may_hide and all(torch.equal(origins[cells], positions) for cells, positions in rows):
        first = min((int(cells.min()) for cells, _ in rows if cells.numel()), default=count)
        seen = _marked([cells - first for cells, _ in rows], count - first)
        if int(seen.any(0).sum()) >= (1 - HIDDEN_SHARE) * (count - first):
            return View(torch.arange(first, count), origins[first:count], in_order=True, seen=seen)
    if len(rows) == 1:
        return View(*rows[0], in_order=False, seen=None)
    return _copied(rows)


def mask_of(seen: Tensor, real: Tensor) -> Tensor:
    """The mask of new tokens, which stand behind all columns, those of a sequence side by side.

    Shapes: seen `[sequences, columns]`, real `[sequences, tokens]` → `[sequences, 1, tokens, columns + sequences *
    tokens]`.
    """
    sequences, tokens = real.shape
    before = torch.ones((tokens, tokens), dtype=torch.bool, device=seen.device).tril()
    own = before & (real.to(seen.device)[:, None] | torch.eye(tokens, dtype=torch.bool, device=seen.device))
    new = own.new_zeros((sequences, tokens, sequences, tokens))
    places = torch.arange(sequences, device=seen.device)
    new[places, :, places] = own
    past = seen[:, None].expand(-1, tokens, -1)
    return torch.cat([past, new.flatten(2)], 2)[:, None]


def grown(seen: Tensor, real: Tensor) -> Tensor:
    """What each sequence sees behind a forward of new tokens, `[sequences, columns + sequences * tokens]`."""
    new = torch.diag_embed(real.to(seen.device).T).permute(1, 2, 0)  # [sequence, sequence that brought it, token]
    return torch.cat([seen, new.flatten(1)], 1)


def _copied(rows: Sequence[Row]) -> View:
    """Every cell at every position at which a sequence has it, once; ordered by cell."""
    cells, positions = (torch.cat(parts) for parts in zip(*rows, strict=True))
    places = int(positions.max()) + 1 if len(positions) else 1
    pairs, column = torch.unique(cells * places + positions, return_inverse=True)
    columns = column.split([len(row[0]) for row in rows])
    return View(pairs // places, pairs % places, in_order=False, seen=_marked(columns, len(pairs)))


def _marked(columns: Sequence[Tensor], count: int) -> Tensor:
    seen = torch.zeros((len(columns), count), dtype=torch.bool)
    for line, places in zip(seen, columns, strict=True):
        line[places] = True
    return seen
