# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""One layer of a sequence cache that holds K and V in 8 or 4 bits, unpacked for as long as a forward looks at them.

Nothing unpacked is kept between forwards, nor is anything that was rotated: at every look keys are unpacked and then
rotated to where they are now. So however often a token moves, it was quantised once, as it was computed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..rotary.base import RotaryStyle
from .packed_cells import PackedCells
from .sequence_layer import SequenceLayer


@dataclass(frozen=True)
class _Index:
    """Cells that are no neighbours: ascending on the CPU and on the layer's device, and where each one is shown."""

    cells: Tensor
    on_device: Tensor
    order: Tensor | None  # None: as they ascend

    @classmethod
    def of(cls, cells: Tensor, device: torch.device) -> "_Index":
        if bool((cells.diff() >= 0).all()):
            return cls(cells, cells.to(device), None)
        ordered, place = cells.sort()
        return cls(ordered, ordered.to(device), place.argsort().to(device))

    def read(self, held: PackedCells, out: tuple[Tensor, ...]) -> None:
        """Unpack the first ones to `[1, kv_heads, cells, width]` each, as many as fit."""
        count = out[0].shape[2]
        if self.order is None:
            return held.gather(self.cells[:count], self.on_device[:count], out)
        whole = held.like(len(self.cells))
        held.gather(self.cells, self.on_device, whole)
        for part, states in zip(out, whole, strict=True):
            part.copy_(states.index_select(2, self.order[:count]))


class QuantisedSequenceLayer(SequenceLayer):
    """A `SequenceLayer` over `PackedCells`. `keys` and `values` are unpacked at every look."""

    _cells: PackedCells  # once there are any

    def __init__(self, bits: int) -> None:
        """Begin empty; `bits` is 8 or 4."""
        self._bits = bits
        self._index: _Index | None = None  # the first columns; behind them are the cells from `_first` on
        self._turn: tuple[Tensor, Tensor] | None = None  # of the first columns
        self._style: type[RotaryStyle] | None = None
        super().__init__()

    @property
    def keys(self) -> Tensor | None:
        """K as attention is given it, `[1, kv_heads, columns, width]`."""
        return self._shown(0)[0] if self.is_initialized else None

    @keys.setter
    def keys(self, value: Any) -> None:
        """Nothing: what is held is packed."""

    @property
    def values(self) -> Tensor | None:
        """V as attention is given it, `[1, kv_heads, columns, width]`."""
        return self._shown(0)[1] if self.is_initialized else None

    @values.setter
    def values(self, value: Any) -> None:
        """Nothing: what is held is packed."""

    @property
    def nbytes(self) -> int:
        """Bytes of every buffer that the layer holds, spare room included; see `view_tensors` for what it shares."""
        return self._cells.nbytes if self.is_initialized else 0

    @property
    def view_tensors(self) -> tuple[Tensor, ...]:
        """Cells of the columns, and the tables that rotate their keys."""
        index = self._index and (self._index.cells, self._index.on_device, self._index.order)
        return tuple(part for part in (*(index or ()), *(self._turn or ())) if part is not None)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Remember the form of the first states, `[1, kv_heads, tokens, width]`."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self._cells = PackedCells(self._bits, key_states[:1], value_states[:1])
        self.is_initialized = True

    def write(self, cell: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """See `SequenceLayer.write`; the new tokens are seen as they are, and count from `settle` on."""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        if self.length <= self._indexed:
            self._first = cell
        new = [states if len(states) == 1 else states.transpose(0, 1).flatten(1, 2)[None] for states in (keys, values)]
        shown = self._shown(new[0].shape[2])
        for states, part in zip(new, shown, strict=True):
            part[:, :, self.length :] = states
        self._cells.append(cell, new[0], new[1], sequences=len(keys))
        return shown[0].expand(len(keys), -1, -1, -1), shown[1].expand(len(keys), -1, -1, -1)

    def settle(self) -> None:
        """Hold the new tokens."""
        self._cells.commit()

    def stored(self, cells: Tensor) -> tuple[Tensor, Tensor]:
        """K and V of some cells, `[kv_heads, tokens, width]`, unpacked; K rotated for where it was computed."""
        keys, values = out = self._cells.like(len(cells))
        _Index.of(cells, self.device).read(self._cells, out)
        return keys[0], values[0]

    def parts(self, cells: Tensor) -> dict[str, Tensor]:
        """See `PackedCells.parts`."""
        return self._cells.parts(cells)

    def fixed_cells(self, count: int) -> int:
        """How many of the first `count` cells are in few bits."""
        return min(count, self._cells.packed_cells) if self.is_initialized else 0

    def add(self, cell: int, parts: Mapping[str, Tensor]) -> None:
        """See `SequenceLayer.add` and `PackedCells.extend`."""
        if not self.is_initialized:
            self.lazy_initialization(parts["k"][None], parts["v"][None])
        self._cells.extend(cell, parts)

    def lay(self, cells: Tensor, in_order: bool, style: type[RotaryStyle], turn: tuple[Tensor, Tensor] | None) -> None:
        """See `SequenceLayer.lay`; nothing is copied."""
        self._first = int(cells[0]) if in_order and len(cells) else 0
        self._style, self._index, self._turn = style, None, None
        if self.is_initialized:
            self._index = None if in_order else _Index.of(cells, self.device)
            self._turn = None if turn is None else (turn[0].to(self.device), turn[1].to(self.device))

    def show(self, tokens: int) -> None:
        """Count the first `tokens` columns."""
        self.length = tokens

    @property
    def _indexed(self) -> int:
        """How many columns are those of the index."""
        return 0 if self._index is None else min(self.length, len(self._index.cells))

    def _shown(self, room: int) -> tuple[Tensor, Tensor]:
        """All columns unpacked and rotated, and room for some more behind them."""
        out, length, count = self._cells.like(self.length + room), self.length, self._indexed
        if self._index is not None:
            self._index.read(self._cells, tuple(part[:, :, :count] for part in out))
        self._cells.read(self._first, self._first + length - count, tuple(part[:, :, count:length] for part in out))
        if self._turn is not None and self._style is not None:
            cos, sin = (table[:length] for table in self._turn)
            states = out[self._style.slot][0, :, : len(cos)]
            self._style.move(states.clone(), (cos, sin), out=states)
        return out
