# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""One layer of a sequence cache: the storage of all sequences, and the active one laid out for attention."""

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from ..rotary.base import RotaryStyle

ROOM_TOKENS = 256  # spare columns; what outgrows them costs a copy
SPARE_SHARE = 16  # spare columns of a large buffer: a sixteenth of it


class Columns:
    """K or V, or a part of them, in a buffer with room to grow, `[1, kv_heads, capacity, …]`."""

    def __init__(self, like: Tensor, room_tokens: int = ROOM_TOKENS) -> None:
        """Take all but the tokens from `like`, `[1, kv_heads, tokens, …]`; hold nothing, and grow by some more."""
        self.buffer, self._room_tokens = like.new_empty((*like.shape[:2], 0, *like.shape[3:])), room_tokens

    def write(self, start: int, states: Tensor) -> Tensor:
        """Put `[1, kv_heads, tokens, …]` at column `start`; gives back all columns up to the last written."""
        stop = start + states.shape[2]
        if stop > self.buffer.shape[2]:
            capacity = stop + max(self._room_tokens, start // SPARE_SHARE)
            buffer = self.buffer.new_empty((*self.buffer.shape[:2], capacity, *self.buffer.shape[3:]))
            buffer[:, :, :start] = self.buffer[:, :, :start]
            self.buffer = buffer
        self.buffer[:, :, start:stop] = states
        return self.buffer[:, :, :stop]


class SequenceLayer(CacheLayerMixin):
    """K as it was computed and V, by cell; beside them, where these cannot serve as they are, a copy in order.

    `keys` and `values` are what attention is given, `[1, kv_heads, columns, width]`, the same for all sequences.
    """

    is_sliding = False
    is_croppable = True

    def __init__(self) -> None:
        super().__init__()
        self.length, self._first = 0, 0  # columns shown, and the cell of the first
        self._stored: tuple[Columns, Columns] | None = None
        self._laid: tuple[Columns | None, Columns | None] = (None, None)  # None: the storage itself is in order

    @property
    def nbytes(self) -> int:
        """Bytes of every buffer that the layer holds, spare room included."""
        columns = (*(self._stored or ()), *self._laid)
        return sum(part.buffer.nbytes for part in columns if part is not None)

    @property
    def view_tensors(self) -> tuple[Tensor, ...]:
        """What is held to show the columns, and is shared with other layers."""
        return ()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Remember dtype and device of the first states, `[1, kv_heads, tokens, width]`."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self._stored = (Columns(key_states), Columns(value_states))
        self.is_initialized = True

    def write(self, cell: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store new tokens, and show them behind those of the active sequences.

        Shapes: keys `[sequences, kv_heads, tokens, width]` → `[sequences, kv_heads, columns, width]`.
        """
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        self._first = self._first if self.length else cell
        shown = []
        for stored, laid, states in zip(self._stored or (), self._laid, (keys, values), strict=True):
            new = states if len(states) == 1 else states.transpose(0, 1).flatten(1, 2)[None]
            whole = stored.write(cell, new)[:, :, self._first :]
            shown.append(whole if laid is None else laid.write(self.length, new))
        self.keys, self.values = shown
        return shown[0].expand(len(keys), -1, -1, -1), shown[1].expand(len(keys), -1, -1, -1)

    def settle(self) -> None:
        """Called when all layers have stored the new tokens of a forward."""

    def stored(self, cells: Tensor) -> tuple[Tensor, Tensor]:
        """K and V of some cells, `[kv_heads, tokens, width]`, K rotated for the positions where it was computed."""
        parts = [part.buffer[0].index_select(1, cells.to(part.buffer.device)) for part in self._stored or ()]
        return parts[0], parts[1]

    def parts(self, cells: Tensor) -> dict[str, Tensor]:
        """What is held of some cells by name, in the form in which it is held; `cells` ascend, each once."""
        return dict(zip("kv", self.stored(cells), strict=True))

    def fixed_cells(self, count: int) -> int:
        """How many of the first `count` cells are in their last form; where `add` puts such cells."""
        return count

    def add(self, cell: int, parts: Mapping[str, Tensor]) -> None:
        """Hold cells that are no sequence's next, in the form that `parts` gives, behind the first `cell` ones."""
        keys, values = parts["k"][None], parts["v"][None]
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        for part, states in zip(self._stored or (), (keys, values), strict=True):
            part.write(cell, states)

    def keep(self, cells: Tensor) -> None:
        """Let the storage hold only some of its cells, as cells 0, 1, 2 …; `cells` ascend, each once."""
        kept = self.parts(cells)
        self.is_initialized = False
        self.add(0, kept)

    def lay(self, cells: Tensor, in_order: bool, style: type[RotaryStyle], turn: tuple[Tensor, Tensor] | None) -> None:
        """Say which columns attention is given, and copy those that cannot be shown as they are stored.

        Shapes: cells `[columns]`, turn `[tokens, pairs]`.
        """
        self._first = int(cells[0]) if in_order and len(cells) else 0
        if self._stored is None:
            return
        moves = [turn if place == style.slot else None for place in range(2)]
        self._laid = tuple(  # type: ignore[assignment]
            None if in_order and move is None else _written(part, cells, style, move)
            for part, move in zip(self._stored, moves, strict=True)
        )

    def show(self, tokens: int) -> None:
        """Let `keys` and `values` show the first `tokens` columns, and count so many."""
        self.length = tokens
        if self._stored is not None:
            stored, laid = (part.buffer[:, :, self._first :] for part in self._stored), self._laid
            parts = [one if copy is None else copy.buffer for one, copy in zip(stored, laid, strict=True)]
            self.keys, self.values = (part[:, :, :tokens] for part in parts)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Never called: the cache knows which cells are free."""
        raise NotImplementedError

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that `query_length` new tokens of one sequence will see."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """How many columns are shown: where one sequence is active and stored in order, its tokens."""
        return self.length

    def get_max_length(self) -> int:
        """No maximum: -1."""
        return -1


def _written(part: Columns, cells: Tensor, style: type[RotaryStyle], turn: tuple[Tensor, Tensor] | None) -> Columns:
    """Some cells in a buffer of their own, rotated by `turn` if there is one."""
    states = part.buffer[0].index_select(1, cells.to(part.buffer.device))
    if turn is not None:
        moved = torch.empty_like(states)
        style.move(states, (turn[0].to(states.device), turn[1].to(states.device)), out=moved)
        states = moved
    columns = Columns(states[None])
    columns.write(0, states[None])
    return columns
