# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Blocks of a layer whose K and V are away from its device: only the selected ones are copied to it.

    host or disk | block 0 | block 1 | … | block n-1 | rest
    device       | selected blocks, in order | tail         and a representation of every block

When the selection changes, only its new blocks are copied. They are read ahead on another thread: one step before a
lock is due, that step's query selects them.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from ..offload.layer import OffloadedLayer
from .blocks import KV, BlockedLayer
from .config import SparseConfig
from .layout import Layout
from .lock import Selection
from .methods.base import BlockMethod

Block = tuple[int, int]  # of a request: its row, its number


class AwayBlocks(BlockedLayer):
    """Blocks of one layer whose K and V may be away; else it works as a `BlockedLayer`."""

    def __init__(self, layer: OffloadedLayer, config: SparseConfig, method: BlockMethod, metrics: Any) -> None:
        super().__init__(layer, config, method)
        self._metrics, self._size = metrics, config.block_tokens
        self._has_stepped = False
        self._ahead: tuple[list[Block], Future[KV]] | None = None
        layer.observer = self._observe

    @property
    def is_away(self) -> bool:
        """Whether blocks have to be copied to the device."""
        return bool(self._layer.is_away)

    def begin(self) -> None:
        """See `BlockedLayer.begin`; what was read ahead of whole layers is dropped."""
        super().begin()
        self._layer.memory.release()
        self._layer.sees_blocks, self._has_stepped = self._layer.visible is None, True

    def settle(self) -> None:
        """See `BlockedLayer.settle`."""
        super().settle()
        self._layer.sees_blocks = False
        self._count()

    def release(self) -> None:
        """Free the copy on the device: the next step attends to everything."""
        self._copy = self._layout = None
        self._held = 0
        self._forget_ahead()
        self._count()

    def close(self) -> None:
        """End the session."""
        self._made = None
        self.release()
        self._layer.sees_blocks, self._layer.observer = False, None

    def whole(self) -> KV:
        """K and V of all tokens on the device, `[batch, kv_heads, tokens, head_dim]`."""
        return self._read(0, self._layer.length)

    def prefetch(self, selections: Sequence[Selection]) -> None:
        """Read, on another thread, the blocks of some selections that the copy lacks."""
        self._forget_ahead()
        if self._layout is None or len(self._layout.rows) != len(selections):
            return
        away = min(self._layer.away_tokens, self._layout.tail) // self._size
        copied = {(row, block) for row, blocks in enumerate(self._layout.rows) for block in blocks}
        chosen = [(row, block) for row, own in enumerate(selections) for block in own.blocks if block < away]
        coming = [block for block in chosen if block not in copied]
        if coming:
            self._ahead = coming, self._layer.memory.reader.submit(self._layer.there.blocks, coming, self._size)

    def _gathered(self, layout: Layout, capacity: int) -> KV:
        """See `BlockedLayer._gathered`; blocks of the old copy are moved, the others are read."""
        if not self.is_away:
            return super()._gathered(layout, capacity)
        slots = {(row, block): at for row, own in enumerate(layout.rows) for at, block in enumerate(own) if block >= 0}
        here = self._columns(len(layout.rows))
        keys, values = (kv.new_zeros((*kv.shape[:2], capacity, kv.shape[3])) for kv in self._layer.read(0, 0))
        copy = keys, values  # zeros, as a filler is hidden, but not from NaN
        moved = [block for block in slots if block in here]
        if moved:
            rows = torch.tensor([row for row, _ in moved])[:, None]
            columns = torch.tensor([here[block] for block in moved])[:, None] + torch.arange(self._size)
            for into, old in zip(copy, self._copy or (), strict=True):
                self._scatter(into, [slots[block] for block in moved], moved, old[rows, :, columns])
        for blocks, states in self._brought([block for block in slots if block not in here], copy):
            for into, new in zip(copy, states, strict=True):
                self._scatter(into, [slots[block] for block in blocks], blocks, new.to(into.device, non_blocking=True))
        return copy

    def _scatter(self, states: Tensor, slots: list[int], blocks: list[Block], some: Tensor) -> None:
        """Write blocks `[blocks, size, kv_heads, head_dim]` to slots of `[batch, kv_heads, columns, head_dim]`."""
        every = states[:, :, : states.shape[2] // self._size * self._size].unflatten(2, (-1, self._size))
        every[torch.tensor([row for row, _ in blocks]), :, torch.tensor(slots)] = some.transpose(1, 2)

    def _columns(self, batch: int) -> dict[Block, int]:
        """The blocks of the present copy that are still valid, and their first columns."""
        old, unchanged = self._layout, min(self._held, self._layer.unchanged_tokens)
        if old is None or self._copy is None or self._copy[0].shape[0] != batch or unchanged < old.tail:
            return {}
        behind = range(-(-old.tail // self._size), unchanged // self._size)
        tail = {block: old.fixed + block * self._size - old.tail for block in behind}
        rows = (tail | {block: slot * self._size for slot, block in enumerate(some)} for some in old.rows)
        return {(row, block): column for row, columns in enumerate(rows) for block, column in columns.items()}

    def _brought(self, missing: list[Block], copy: KV) -> list[tuple[list[Block], KV]]:
        """Read blocks, or take those that were read ahead; K and V are `[blocks, size, kv_heads, head_dim]`."""
        brought, size = list[tuple[list[Block], KV]](), self._size
        ahead, self._ahead = self._ahead, None
        indices = {block: index for index, block in enumerate(ahead[0])} if ahead else {}
        unchanged, away = self._layer.unchanged_tokens // size, self._layer.away_tokens // size
        ready = [block for block in missing if block in indices and block[1] < unchanged]
        rest = [block for block in missing if block not in indices or block[1] >= unchanged]
        there = [block for block in rest if block[1] < away]
        if ahead and ready:
            keys, values = ahead[1].result()
            chosen = [indices[block] for block in ready]
            brought.append((ready, (keys, values) if ready == ahead[0] else (keys[chosen], values[chosen])))
        if there:
            brought.append((there, self._layer.there.blocks(there, size)))
        for row, number in rest:
            if number >= away:  # the last ones, of which some tokens are not away
                keys, values = (kv[row].transpose(0, 1) for kv in self._layer.read(number * size, (number + 1) * size))
                brought.append(([(row, number)], (keys[None], values[None])))
        in_vain = len(indices) - len(ready)
        token_bytes = sum(states[0, :, :1].numel() * states.element_size() for states in copy)
        self._metrics.loaded_blocks += len(missing)
        self._metrics.prefetched_blocks += len(ready)
        self._metrics.loaded_bytes += (len(missing) + in_vain) * size * token_bytes
        return brought

    def _forget_ahead(self) -> None:
        if self._ahead is not None:
            self._ahead[1].exception()
            self._ahead = None

    def _observe(self, keys: Tensor) -> None:
        """Represent blocks before the keys go away, `[batch, kv_heads, tokens, head_dim]`."""
        count = keys.shape[2] // self._size
        if (self._has_stepped and self._layer.unchanged_tokens) or not count:
            return
        self._forget_ahead()  # it may be of tokens that were in these places
        self._made, self._held = None, 0
        blocks = keys[:, :, : count * self._size].unflatten(2, (count, self._size))
        self._prepared = self._method.prepare(blocks)
        self._made = self._method.represent(blocks, self._prepared)
        self._layer.unchanged_tokens = keys.shape[2]
        self._count()

    def _read(self, start: int, end: int) -> KV:
        if not self.is_away:
            return super()._read(start, end)
        return self._layer.read(start, end)

    def _count(self) -> None:
        """Report the bytes on the device to the memory."""
        self._layer.memory.count(("blocks", self._layer.index), sum(states.nbytes for states in self._copy or ()))
        self._layer.memory.count(("represented", self._layer.index), 0 if self._made is None else self._made.nbytes)
