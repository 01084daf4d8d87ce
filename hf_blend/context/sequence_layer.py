# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""One layer of a sequence cache: K as it was computed and V by cell, and the columns of them that attention is given.

A plain layer copies the columns that attention cannot be given as they are stored. A quantised one keeps no copy: in
each forward its keys are unpacked, then rotated to their present positions. So a token is quantised once, as it was
computed, however often it moves.
"""

from collections.abc import Mapping
from dataclasses import dataclass

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
        self.length, self._first = 0, 0  # columns, and the cell of the first of those that are in order
        self._stored: tuple[Columns, Columns] | None = None
        self._copies: tuple[Columns | None, Columns | None] = (None, None)  # None: the storage itself is in order

    @property
    def nbytes(self) -> int:
        """Bytes of every buffer that the layer holds, spare room included; see `view_tensors` for what it shares."""
        columns = (*(self._stored or ()), *self._copies)
        return sum(column.buffer.nbytes for column in columns if column is not None)

    @property
    def view_tensors(self) -> tuple[Tensor, ...]:
        """Tensors about the columns that layers share with each other."""
        return ()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take heads, widths, dtype and device from the first states, `[1, kv_heads, tokens, width]`."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self._stored = (Columns(key_states[:1]), Columns(value_states[:1]))
        self.is_initialized = True

    def write(self, cell: int, keys: Tensor, values: Tensor) -> Pair:
        """Store new tokens, `[sequences, kv_heads, tokens, width]`, from a cell on; returns all columns with them."""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        self._first = self._first if self.length else cell
        columns = []
        for stored, copied, states in zip(self._stored or (), self._copies, (keys, values), strict=True):
            new = _in_a_row(states)
            in_order = stored.write(cell, new)[:, :, self._first :]
            columns.append(in_order if copied is None else copied.write(self.length, new))
        self.keys, self.values = columns
        return columns[0].expand(len(keys), -1, -1, -1), columns[1].expand(len(keys), -1, -1, -1)

    def commit(self) -> None:
        """Called when all layers have stored the new tokens of a forward."""

    def stored(self, cells: Tensor) -> Pair:
        """K and V of some cells, `[kv_heads, tokens, width]`, K rotated for the positions where it was computed."""
        parts = [column.buffer[0].index_select(1, cells.to(column.buffer.device)) for column in self._stored or ()]
        return parts[0], parts[1]

    def parts(self, cells: Tensor) -> dict[str, Tensor]:
        """The stored tensors of some cells, by name; `cells` ascend, each once."""
        return dict(zip("kv", self.stored(cells), strict=True))

    def fixed_cells(self, count: int) -> int:
        """How many of the first `count` cells are quantised, or need not be; `add` inserts such cells behind them."""
        return count

    def add(self, cell: int, parts: Mapping[str, Tensor]) -> None:
        """Store more cells, in the form that `parts` gives, behind the first `cell` ones."""
        keys, values = parts["k"][None], parts["v"][None]
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        for column, states in zip(self._stored or (), (keys, values), strict=True):
            column.write(cell, states)

    def keep(self, cells: Tensor) -> None:
        """Free all cells but some, which become cells 0, 1, 2 …; `cells` ascend, each once."""
        stored = self.parts(cells)
        self.is_initialized = False
        self.add(0, stored)

    def arrange(self, cells: Tensor, in_order: bool, style: type[RotaryStyle], by: Pair | None) -> None:
        """Set the cells of the columns, `[columns]`, and the table that rotates their keys, `[columns, pairs]`."""
        self._first = int(cells[0]) if in_order and len(cells) else 0
        if self._stored is not None:
            moves = [by if index == style.slot else None for index in range(2)]
            keys, values = (
                None if in_order and move is None else _copied(column, cells, style, move)
                for column, move in zip(self._stored, moves, strict=True)
            )
            self._copies = keys, values

    def show(self, columns: int) -> None:
        """Make `keys` and `values` the first columns."""
        self.length = columns
        if self._stored is not None:
            self.keys, self.values = (
                (stored.buffer[:, :, self._first :] if copied is None else copied.buffer)[:, :, :columns]
                for stored, copied in zip(self._stored, self._copies, strict=True)
            )

    def get_seq_length(self) -> int:
        """How many columns there are."""
        return self.length


@dataclass(frozen=True)
class _Index:
    """Cells in any order: ascending on the CPU and on the layer's device, and the column of each."""

    cells: Tensor
    on_device: Tensor
    order: Tensor | None  # None: as they ascend

    @classmethod
    def of(cls, cells: Tensor, device: torch.device) -> "_Index":
        if bool((cells.diff() >= 0).all()):
            return cls(cells, cells.to(device), None)
        ascending, order = cells.sort()
        return cls(ascending, ascending.to(device), order.argsort().to(device))

    def read(self, packed: PackedCells, out: Pair) -> None:
        """Unpack the first ones to `[1, kv_heads, cells, width]` each, as many as fit."""
        count = out[0].shape[2]
        if self.order is None:
            return packed.gather(self.cells[:count], self.on_device[:count], out)
        every = packed.like(len(self.cells))
        packed.gather(self.cells, self.on_device, every)
        for target, states in zip(out, every, strict=True):
            target.copy_(states.index_select(2, self.order[:count]))


class QuantisedSequenceLayer(MadeStates, SequenceLayer):
    """A `SequenceLayer` over `PackedCells`, whose `keys` and `values` are unpacked at every access."""

    _packed: PackedCells  # once there are any

    def __init__(self, bits: int) -> None:
        """Begin empty; `bits` is 8 or 4."""
        self._bits = bits
        self._index: _Index | None = None  # the first columns; behind them are the cells from `_first` on
        self._by: Pair | None = None  # what rotates the keys of the first columns
        self._style: type[RotaryStyle] | None = None
        super().__init__()

    @property
    def nbytes(self) -> int:
        """See `SequenceLayer.nbytes`."""
        return self._packed.nbytes if self.is_initialized else 0

    @property
    def view_tensors(self) -> tuple[Tensor, ...]:
        """Cells of the columns, and the tables that rotate their keys."""
        index = self._index and (self._index.cells, self._index.on_device, self._index.order)
        return tuple(tensor for tensor in (*(index or ()), *(self._by or ())) if tensor is not None)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """See `SequenceLayer.lazy_initialization`."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self._packed = PackedCells(self._bits, key_states[:1], value_states[:1])
        self.is_initialized = True

    def write(self, cell: int, keys: Tensor, values: Tensor) -> Pair:
        """See `SequenceLayer.write`; new tokens are returned as they are, and are stored for good in `commit`."""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        if self.length <= self._indexed:
            self._first = cell
        new = _in_a_row(keys), _in_a_row(values)
        columns = self._unpacked(new[0].shape[2])
        for states, column in zip(new, columns, strict=True):
            column[:, :, self.length :] = states
        self._packed.append(cell, *new, sequences=len(keys))
        return columns[0].expand(len(keys), -1, -1, -1), columns[1].expand(len(keys), -1, -1, -1)

    def commit(self) -> None:
        """Store the new tokens for good."""
        self._packed.commit()

    def stored(self, cells: Tensor) -> Pair:
        """See `SequenceLayer.stored`; unpacked."""
        out = self._packed.like(len(cells))
        _Index.of(cells, self.device).read(self._packed, out)
        return out[0][0], out[1][0]

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
        self._style, self._index, self._by = style, None, None
        if self.is_initialized:
            self._index = None if in_order else _Index.of(cells, self.device)
            self._by = None if by is None else (by[0].to(self.device), by[1].to(self.device))

    def show(self, columns: int) -> None:
        """Count the first columns."""
        self.length = columns

    @property
    def _indexed(self) -> int:
        """How many columns are those of the index."""
        return 0 if self._index is None else min(self.length, len(self._index.cells))

    def _look(self, index: int) -> Tensor | None:
        return self._unpacked(0)[index] if self.is_initialized else None

    def _unpacked(self, room: int) -> Pair:
        """All columns unpacked and rotated, with room for `room` more behind them."""
        out, length, count = self._packed.like(self.length + room), self.length, self._indexed
        if self._index is not None:
            self._index.read(self._packed, (out[0][:, :, :count], out[1][:, :, :count]))
        self._packed.read(self._first, self._first + length - count, [states[:, :, count:length] for states in out])
        if self._by is not None and self._style is not None:
            cos, sin = (table[:length] for table in self._by)
            states = out[self._style.slot][0, :, : len(cos)]
            self._style.move(states.clone(), (cos, sin), out=states)
        return out


def _in_a_row(states: Tensor) -> Tensor:
    """New tokens of several sequences one sequence after the other, `[1, kv_heads, sequences * tokens, width]`."""
    return states if len(states) == 1 else states.transpose(0, 1).flatten(1, 2)[None]


def _copied(column: Columns, cells: Tensor, style: type[RotaryStyle], by: Pair | None) -> Columns:
    """Some cells in a buffer of their own, rotated if they are to be."""
    states = column.buffer[0].index_select(1, cells.to(column.buffer.device))
    if by is not None:
        moved = torch.empty_like(states)
        style.move(states, (by[0].to(states.device), by[1].to(states.device)), out=moved)
        states = moved
    columns = Columns(states[None])
    columns.write(0, states[None])
    return columns
