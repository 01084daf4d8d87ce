# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""One layer of a sequence cache: K as it was computed and V by cell, and the columns of them that attention is given.

Columns that attention cannot be given as they are stored are copied.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from ..cache.layers import Columns, Pair
from ..rotary.base import RotaryStyle


class SequenceLayer(DynamicLayer):
    """K and V by cell, `[1, kv_heads, cells, width]`, and copies of the columns where these differ from the cells.

    `keys` and `values` are the columns that attention is given, `[1, kv_heads, columns, width]`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.record_past = False  # by this name transformers switches it off
        self.length = 0  # columns
        self._first = 0  # the cell of the first of those that are in order
        self._stored: list[Columns] = []  # K and V by cell
        self._copies: list[Columns | None] = [None, None]  # None: the storage itself is in order

    @property
    def nbytes(self) -> int:
        """Bytes of every buffer that the layer holds, spare room included."""
        total = 0
        for column in (*self._stored, *self._copies):
            if column is not None:
                total += column.buffer.nbytes
        return total

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take heads, widths, dtype and device from the first states, `[1, kv_heads, tokens, width]`."""
        self.dtype = key_states.dtype
        self.device = key_states.device
        self._stored = [Columns(key_states), Columns(value_states)]
        self.is_initialized = True

    def write(self, cell: int, keys: Tensor, values: Tensor) -> Pair:
        """Store new tokens, `[1, kv_heads, tokens, width]`, from a cell on; returns all columns with them."""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        if not self.length:
            self._first = cell
        columns = []
        for stored, copy, states in zip(self._stored, self._copies, (keys, values), strict=True):
            cells = stored.write(cell, states)
            if copy is None:
                columns.append(cells[:, :, self._first :])
            else:
                columns.append(copy.write(self.length, states))
        self.keys, self.values = columns
        return self.keys, self.values

    def parts(self, cells: Tensor) -> dict[str, Tensor]:
        """The stored tensors of some cells by name, `[kv_heads, tokens, width]`; `cells` ascend, each once."""
        keys, values = (column.buffer[0].index_select(1, cells.to(self.device)) for column in self._stored)
        return {"k": keys, "v": values}

    def add(self, cell: int, parts: Mapping[str, Tensor]) -> None:
        """Store more cells, in the form that `parts` gives, behind the first `cell` ones."""
        keys, values = parts["k"][None], parts["v"][None]
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        for column, states in zip(self._stored, (keys, values), strict=True):
            column.write(cell, states)

    def keep(self, cells: Tensor) -> None:
        """Free all cells but some, which become cells 0, 1, 2 …; `cells` ascend, each once."""
        stored = self.parts(cells)
        self.is_initialized = False
        self.add(0, stored)

    def arrange(self, cells: Tensor, in_order: bool, style: type[RotaryStyle], by: Pair | None) -> None:
        """Set the cells of the columns, `[columns]`, and the table that rotates their keys, `[columns, pairs]`."""
        self._first = int(cells[0]) if in_order and len(cells) else 0
        self._copies = [None, None]
        for index, column in enumerate(self._stored):
            moves = by if index == style.slot else None
            if in_order and moves is None:
                continue
            states = column.buffer[0].index_select(1, cells.to(self.device))
            if moves is not None:
                states = _rotated(states, style, moves)
            copy = Columns(states[None])
            copy.write(0, states[None])
            self._copies[index] = copy

    def show(self, columns: int) -> None:
        """Make `keys` and `values` the first columns."""
        self.length = columns
        shown = []
        for stored, copy in zip(self._stored, self._copies, strict=False):
            buffer = stored.buffer[:, :, self._first :] if copy is None else copy.buffer
            shown.append(buffer[:, :, :columns])
        if shown:
            self.keys, self.values = shown

    def get_seq_length(self) -> int:
        """How many columns there are."""
        return self.length


def _rotated(states: Tensor, style: type[RotaryStyle], by: Pair) -> Tensor:
    """Keys `[kv_heads, tokens, width]`, rotated by a table `[tokens, pairs]`."""
    cos, sin = by
    rotated = torch.empty_like(states)
    style.move(states, (cos.to(states.device), sin.to(states.device)), out=rotated)
    return rotated
