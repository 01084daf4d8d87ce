# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""One layer of a sequence cache: K as it was computed and V by cell, and the columns of them that attention is given.

A plain layer copies the columns that attention cannot be given as they are stored. A quantised one keeps no copy: in
each forward its keys are unpacked, then rotated to their present positions. So a token is quantised once, as it was
computed, however often it moves.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from ..cache.layers import Columns, MadeStates, Pair
from ..cache.quantised_layer import PackedCells
from ..rotary.base import RotaryStyle


class SequenceLayer(DynamicLayer):
    """K and V by cell, `[1, kv_heads, cells, width]`, and copies of the columns where these differ from the cells.

    `keys` and `values` are the columns that attention is given, `[1, kv_heads, columns, width]`, for all sequences.
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
        self._stored = [Columns(key_states[:1]), Columns(value_states[:1])]
        self.is_initialized = True

    def write(self, cell: int, keys: Tensor, values: Tensor) -> Pair:
        """Store new tokens, `[sequences, kv_heads, tokens, width]`, from a cell on; returns all columns with them."""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        if not self.length:
            self._first = cell
        columns = []
        for stored, copy, states in zip(self._stored, self._copies, (keys, values), strict=True):
            new = _in_a_row(states)
            cells = stored.write(cell, new)
            columns.append(cells[:, :, self._first :] if copy is None else copy.write(self.length, new))
        self.keys, self.values = columns
        sequences = len(keys)
        return self.keys.expand(sequences, -1, -1, -1), self.values.expand(sequences, -1, -1, -1)

    def commit(self) -> None:
        """Called when all layers have stored the new tokens of a forward."""

    def parts(self, cells: Tensor) -> dict[str, Tensor]:
        """The stored tensors of some cells by name, `[kv_heads, tokens, width]`; `cells` ascend, each once."""
        keys, values = (column.buffer[0].index_select(1, cells.to(self.device)) for column in self._stored)
        return {"k": keys, "v": values}

    def fixed_cells(self, count: int) -> int:
        """How many of the first `count` cells are quantised, or need not be; `add` inserts such cells behind them."""
        return count

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


class QuantisedSequenceLayer(MadeStates, SequenceLayer):
    """A `SequenceLayer` over `PackedCells`, whose `keys` and `values` are unpacked at every access."""

    _packed: PackedCells  # once there are any

    def __init__(self, bits: int) -> None:
        """Begin empty; `bits` is 8 or 4."""
        self._bits = bits
        self._index: Tensor | None = None  # the cells of the first columns; behind are the cells from `_first` on
        self._by: Pair | None = None  # what rotates the keys of the first columns
        self._style: type[RotaryStyle] | None = None
        super().__init__()

    @property
    def nbytes(self) -> int:
        """See `SequenceLayer.nbytes`."""
        return self._packed.nbytes if self.is_initialized else 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """See `SequenceLayer.lazy_initialization`."""
        self.dtype = key_states.dtype
        self.device = key_states.device
        self._packed = PackedCells(self._bits, key_states[:1], value_states[:1])
        self.is_initialized = True

    def write(self, cell: int, keys: Tensor, values: Tensor) -> Pair:
        """See `SequenceLayer.write`; new tokens are returned as they are, and are stored for good in `commit`."""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        if self.length <= self._indexed:
            self._first = cell
        new_keys, new_values = _in_a_row(keys), _in_a_row(values)
        all_keys, all_values = self._unpacked(new_keys.shape[2])
        all_keys[:, :, self.length :] = new_keys
        all_values[:, :, self.length :] = new_values
        sequences = len(keys)
        self._packed.append(cell, new_keys, new_values, sequences=sequences)
        return all_keys.expand(sequences, -1, -1, -1), all_values.expand(sequences, -1, -1, -1)

    def commit(self) -> None:
        """Store the new tokens for good."""
        self._packed.commit()

    def parts(self, cells: Tensor) -> dict[str, Tensor]:
        """See `PackedCells.parts`."""
        return self._packed.parts(cells)

    def fixed_cells(self, count: int) -> int:
        """How many of the first `count` cells are quantised."""
        return min(count, self._packed.state.packed) if self.is_initialized else 0

    def add(self, cell: int, parts: Mapping[str, Tensor]) -> None:
        """See `SequenceLayer.add` and `PackedCells.extend`."""
        if not self.is_initialized:
            self.lazy_initialization(parts["k"][None], parts["v"][None])
        self._packed.extend(cell, parts)

    def arrange(self, cells: Tensor, in_order: bool, style: type[RotaryStyle], by: Pair | None) -> None:
        """See `SequenceLayer.arrange`; nothing is copied."""
        self._first = int(cells[0]) if in_order and len(cells) else 0
        self._style = style
        self._index = self._by = None
        if self.is_initialized:
            self._index = None if in_order else cells
            if by is not None:
                self._by = by[0].to(self.device), by[1].to(self.device)

    def show(self, columns: int) -> None:
        """Count the first columns."""
        self.length = columns

    @property
    def _indexed(self) -> int:
        """How many columns are those of the index."""
        return 0 if self._index is None else min(self.length, len(self._index))

    def _materialise(self, index: int) -> Tensor | None:
        return self._unpacked(0)[index] if self.is_initialized else None

    def _unpacked(self, room: int) -> Pair:
        """All columns unpacked and rotated, with room for `room` more behind them."""
        out = self._packed.like(self.length + room)
        count = self._indexed
        if self._index is not None:
            self._gather(self._index, [states[:, :, :count] for states in out])
        behind = [states[:, :, count : self.length] for states in out]
        self._packed.read(self._first, self._first + self.length - count, behind)
        if self._by is not None and self._style is not None:
            cos, sin = (table[: self.length] for table in self._by)
            states = out[self._style.slot][0, :, : len(cos)]
            self._style.move(states.clone(), (cos, sin), out=states)
        return out

    def _gather(self, cells: Tensor, out: list[Tensor]) -> None:
        """Unpack cells in any order to `[1, kv_heads, cells, width]` each, as many of the first as fit."""
        ascending, order = cells.sort()
        every = self._packed.like(len(cells))
        self._packed.gather(ascending, ascending.to(self.device), every)
        columns = order.argsort().to(self.device)
        for target, states in zip(out, every, strict=True):
            target.copy_(states.index_select(2, columns[: target.shape[2]]))


def _in_a_row(states: Tensor) -> Tensor:
    """New tokens of several sequences one sequence after the other, `[1, kv_heads, sequences * tokens, width]`."""
    return states if len(states) == 1 else states.transpose(0, 1).flatten(1, 2)[None]


def _rotated(states: Tensor, style: type[RotaryStyle], by: Pair) -> Tensor:
    """Keys `[kv_heads, tokens, width]`, rotated by a table `[tokens, pairs]`."""
    cos, sin = by
    rotated = torch.empty_like(states)
    style.move(states, (cos.to(states.device), sin.to(states.device)), out=rotated)
    return rotated
