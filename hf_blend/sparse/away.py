# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Blocks of a layer whose K and V are away from its device: only the selected ones are copied to it.

    host or disk | block 0 | block 1 | … | block n-1 | rest
    device       | selected blocks, in order | tail         and a representation of every block

When the selection changes, only its new blocks are copied.
"""

import torch
from torch import Tensor

from ..offload.layer import OffloadedLayer
from .blocks import KV, BlockedLayer
from .config import SparseConfig
from .lock import Selection, SparseMetrics
from .methods.base import BlockMethod


class AwayBlocks(BlockedLayer):
    """Blocks of one layer whose K and V may be away; else it works as a `BlockedLayer`."""

    def __init__(
        self, layer: OffloadedLayer, config: SparseConfig, method: BlockMethod, metrics: SparseMetrics
    ) -> None:
        super().__init__(layer, config, method)
        self._metrics = metrics
        layer.observer = self._observe

    @property
    def is_away(self) -> bool:
        """Whether blocks have to be copied to the device."""
        return bool(self._layer.is_away)

    def begin(self) -> None:
        """See `BlockedLayer.begin`; whole layers are read ahead no more."""
        super().begin()
        self._layer.memory.release()
        self._layer.sees_blocks = self._layer.visible is None

    def settle(self) -> None:
        """See `BlockedLayer.settle`."""
        super().settle()
        self._layer.sees_blocks = False

    def release(self) -> None:
        """Free the copy on the device: the next step attends to everything."""
        self._copy = None
        self._copied = None
        self._copied_tokens = 0

    def close(self) -> None:
        """End the session."""
        self._represented = None
        self.release()
        self._layer.sees_blocks = False
        self._layer.observer = None

    def whole(self) -> KV:
        """K and V of all tokens on the device, `[batch, kv_heads, tokens, head_dim]`."""
        return self._read(0, self._layer.length)

    def _read(self, start: int, end: int) -> KV:
        if not self.is_away:
            return super()._read(start, end)
        return self._layer.read(start, end)

    def _gathered(self, selection: Selection, capacity: int) -> KV:
        """See `BlockedLayer._gathered`; blocks of the old copy are moved, the others are read."""
        if not self.is_away:
            return super()._gathered(selection, capacity)
        keys, values = self._layer.read(0, 0)
        copy = (
            keys.new_empty((*keys.shape[:2], capacity, keys.shape[3])),
            values.new_empty((*values.shape[:2], capacity, values.shape[3])),
        )
        old_slots = self._slots()
        # Move what the old copy has
        moved: list[tuple[int, int, int]] = []  # row, old slot, new slot
        missing: dict[int, list[tuple[int, int]]] = {}  # by block: row, new slot
        for row, blocks in enumerate(selection.rows):
            for slot, block in enumerate(blocks):
                old_slot = old_slots.get((row, block))
                if old_slot is None:
                    missing.setdefault(block, []).append((row, slot))
                else:
                    moved.append((row, old_slot, slot))
        if moved and self._copy is not None:
            rows, before, after = torch.tensor(moved).unbind(dim=1)
            for new, old in zip(copy, self._copy, strict=True):
                self._by_block(new)[rows, :, after] = self._by_block(old)[rows, :, before]
        # Read the others
        for block, places in sorted(missing.items()):
            block_states = self._layer.read(block * self._size, (block + 1) * self._size)
            for into, states in zip(copy, block_states, strict=True):
                for row, slot in places:
                    into[row, :, slot * self._size : (slot + 1) * self._size] = states[row]
            self._metrics.loaded_blocks += len(places)
            self._metrics.loaded_bytes += sum(states.nbytes for states in block_states)
        return copy

    def _by_block(self, states: Tensor) -> Tensor:
        """View `[batch, kv_heads, columns, head_dim]` as `[batch, kv_heads, blocks, size, head_dim]`."""
        whole = states.shape[2] // self._size * self._size
        return states[:, :, :whole].unflatten(2, (-1, self._size))

    def _slots(self) -> dict[tuple[int, int], int]:
        """Where the blocks of each request are in the copy, by row and block; none if the context was cut since."""
        old = self._copied
        if old is None or self._copied_tokens < old.tail:
            return {}
        slots = {}
        for row, blocks in enumerate(old.rows):
            for slot, block in enumerate(blocks):
                slots[row, block] = slot
        return slots

    def _observe(self, keys: Tensor) -> None:
        """Represent blocks before the keys go away, `[batch, kv_heads, tokens, head_dim]`."""
        tokens = keys.shape[2]
        if tokens >= self._size:
            super().begin()
            self._represent(tokens // self._size, keys)
            self._layer.unchanged_tokens = tokens
