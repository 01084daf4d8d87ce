# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""One layer of a sequence cache: the storage of all sequences, and the active one laid out for attention."""

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from ..rotary.base import RotaryStyle

ROOM_TOKENS = 256  # spare columns; what outgrows them costs one copy per doubling


class Columns:
    """K or V in a buffer with room to grow, `[1, kv_heads, capacity, width]`."""

    def __init__(self, like: Tensor) -> None:
        """Take heads, width, dtype and device from `like`, `[1, kv_heads, tokens, width]`; hold nothing."""
        self.buffer = like.new_empty((*like.shape[:2], 0, like.shape[3]))

    def write(self, start: int, states: Tensor) -> Tensor:
        """Put `[1, kv_heads, tokens, width]` at column `start`; gives back all columns up to the last written."""
        stop = start + states.shape[2]
        if stop > self.buffer.shape[2]:
            shape = (*self.buffer.shape[:2], stop + max(ROOM_TOKENS, start), self.buffer.shape[3])
            buffer = self.buffer.new_empty(shape)
            buffer[:, :, :start] = self.buffer[:, :, :start]
            self.buffer = buffer
        self.buffer[:, :, start:stop] = states
        return self.buffer[:, :, :stop]


class SequenceLayer(CacheLayerMixin):
    """K as it was computed and V, by cell; beside them, where these cannot serve as they lie, a copy laid in order."""

    is_sliding = False
    is_croppable = True

    def __init__(self) -> None:
        super().__init__()
        self.length = 0
        self._stored: tuple[Columns, Columns] | None = None
        self._laid: tuple[Columns | None, Columns | None] = (None, None)  # None: the storage itself is in order

    @property
    def nbytes(self) -> int:
        """Bytes of every buffer that the layer holds, spare room included."""
        columns = (*(self._stored or ()), *self._laid)
        return sum(part.buffer.nbytes for part in columns if part is not None)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Remember dtype and device of the first states, `[1, kv_heads, tokens, width]`."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self._stored = (Columns(key_states), Columns(value_states))
        self.is_initialized = True

    def write(self, cell: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store new tokens, and show them behind those of the active sequence.

        Args:
            cell: the first cell that they get; the others follow.
            keys: `[1, kv_heads, tokens, width]`, rotated for their positions.
            values: likewise.

        Returns:
            All K and V of the active sequence, the new ones last; `length` does not change before `show`.
        """
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        shown = []
        for stored, laid, states in zip(self._stored or (), self._laid, (keys, values), strict=True):
            whole = stored.write(cell, states)
            shown.append(whole if laid is None else laid.write(self.length, states))
        self.keys, self.values = shown
        return shown[0], shown[1]

    def stored(self, cells: Tensor) -> tuple[Tensor, Tensor]:
        """K and V of some cells, `[kv_heads, tokens, width]`, K rotated for the positions where it was computed."""
        parts = [part.buffer[0].index_select(1, cells.to(part.buffer.device)) for part in self._stored or ()]
        return parts[0], parts[1]

    def restore(self, keys: Tensor, values: Tensor) -> None:
        """Let the storage hold just these, `[kv_heads, tokens, width]`, as cells 0, 1, 2 …."""
        self.lazy_initialization(keys[None], values[None])
        for part, states in zip(self._stored or (), (keys, values), strict=True):
            part.write(0, states[None])

    def lay(self, cells: Tensor, in_order: bool, style: type[RotaryStyle], turn: tuple[Tensor, Tensor] | None) -> None:
        """Write the active sequence in the order in which attention sees it.

        Args:
            cells: its cells, `[tokens]`.
            in_order: the cells are 0 … tokens - 1 and there are no others, so the storage can be shown as it is.
            style: how the layer rotates, and in which of K and V: latent attention has its rotated key among the V.
            turn: (cos, sin) from where each key was computed to where it is now, `[tokens, pairs]`; None if all
                are where they were computed.
        """
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
            parts = [laid or stored for stored, laid in zip(self._stored, self._laid, strict=True)]
            self.keys, self.values = (part.buffer[:, :, :tokens] for part in parts)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Never called: the cache knows which cells are free."""
        raise NotImplementedError

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that `query_length` new tokens will see."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """How many tokens the active sequence has."""
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
