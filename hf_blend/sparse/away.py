# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Blocks of a layer whose K and V are away from its device: only those that are looked at are brought.

    host or disk | block 0 | block 1 | … | block n-1 | rest
    device       | slot 0 | slot 1 | … | tail         and a representation of every block

A selection that changes brings the blocks that it has not got, into the slots of those that it drops. They are read
ahead on another thread: a step before a lock is compared, its own query says which they will be.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from ..offload.layer import OffloadedLayer
from .blocks import KV, ROOM_TOKENS, BlockedLayer
from .config import SparseConfig
from .layout import Layout
from .lock import Selection
from .methods.base import BlockMethod

Blocks = list[list[int]]  # of each request


class AwayBlocks(BlockedLayer):
    """Blocks of one layer that may be away.

    While all of the layer is on its device, this is a `BlockedLayer`.
    """

    def __init__(self, layer: OffloadedLayer, config: SparseConfig, method: BlockMethod, metrics: Any) -> None:
        super().__init__(layer, config, method)
        self._metrics, self._size = metrics, config.block_tokens
        self._has_stepped = False
        self._ahead: tuple[Blocks, Future[list[KV]]] | None = None
        layer.observer = self._observe

    @property
    def is_away(self) -> bool:
        """Whether blocks have to be brought."""
        return bool(self._layer.is_away)

    def begin(self) -> None:
        """A step that looks at blocks begins."""
        super().begin()
        self._layer.memory.release()
        self._layer.sees_blocks, self._has_stepped = self._layer.visible is None, True

    def settle(self) -> None:
        """A step is over."""
        super().settle()
        self._layer.sees_blocks = False
        self._count()

    def release(self) -> None:
        """Hold nothing on the device: the next step looks at everything."""
        self._copy = self._layout = None
        self._held = 0
        self._forget_ahead()
        self._count()

    def close(self) -> None:
        """The session is over."""
        self.release()
        self._made = None
        self._count()
        self._layer.sees_blocks, self._layer.observer = False, None

    def whole(self) -> KV:
        """K and V of all tokens, brought, `[batch, kv_heads, tokens, head_dim]`."""
        keys, values = self._layer.read(0, self._layer.length)
        return keys, values

    def prefetch(self, selections: Sequence[Selection]) -> None:
        """Read ahead what selections would bring, on another thread."""
        self._forget_ahead()
        if self._layout is None or len(self._layout.rows) != len(selections):
            return
        held = [set(blocks) for blocks in self._layout.rows]
        away = min(self._layer.away_tokens, self._layout.tail) // self._size
        coming = [
            [block for block in one.blocks if block < away and block not in have]
            for one, have in zip(selections, held, strict=True)
        ]
        if any(coming):
            self._ahead = coming, self._layer.blocks_ahead(coming, self._size)

    def attended(self, selections: Sequence[Selection]) -> tuple[Layout, Tensor, Tensor]:
        """See `BlockedLayer.attended`."""
        if not self.is_away:
            return super().attended(selections)
        total, known = self._layer.length, min(self._held, self._layer.unchanged_tokens)
        layout = self._layout
        if layout is None or layout.selections != tuple(selections) or known < layout.tail or self._copy is None:
            layout, known = self._change(Layout(selections, self._size), known)
        used = layout.fixed + total - layout.tail
        copy = self._grown(used)
        if known < total:
            for part, new in zip(copy, self._layer.read(known, total), strict=True):
                part[:, :, used - (total - known) : used] = new
        self._layout, self._held = layout, total
        return layout, copy[0][:, :, :used], copy[1][:, :, :used]

    def _grown(self, used: int) -> KV:
        """The copy, with room for so many columns."""
        keys, values = self._copy  # type: ignore[misc]
        if keys.shape[2] < used:
            self._copy = keys, values = self._room(keys, used), self._room(values, used)
            self._count()
        return keys, values

    @staticmethod
    def _room(states: Tensor, used: int) -> Tensor:
        batch, heads, held, width = states.shape
        grown = states.new_zeros((batch, heads, used + ROOM_TOKENS, width))  # a filler is hidden, but not from NaN
        grown[:, :, :held] = states
        return grown

    def _change(self, new: Layout, known: int) -> tuple[Layout, int]:
        """Bring the blocks of a layout that are not there, into slots that are free; the tail follows them."""
        old = self._layout
        if old is None or self._copy is None or self._copy[0].shape[0] != len(new.rows) or known < old.tail:
            old, known, self._copy = None, 0, self._layer.read(0, 0)
        count, here = new.fixed // self._size, self._columns(old, known)
        rows, moved, missing = [], [], []
        for row, blocks in enumerate(new.rows):
            placed = [-1] * count
            slots = 0 if old is None else min(old.fixed, new.fixed)
            stay = [one for one in blocks if one >= 0 and here[row].get(one, slots) < slots]
            for one in stay:
                placed[here[row][one] // self._size] = one
            free = [slot for slot, one in enumerate(placed) if one < 0]
            absent: dict[int, int] = {}
            for slot, one in zip(free, sorted(set(blocks) - {-1, *stay}), strict=False):
                placed[slot] = one
                if one in here[row]:
                    moved.append((row, slot, self._taken(row, here[row][one])))
                else:
                    absent[one] = slot
            rows.append(placed)
            missing.append(absent)
        tail = None
        if old is not None and old.tail <= new.tail < known:
            first, behind = old.fixed + new.tail - old.tail, old.fixed + known - old.tail
            tail = [part[:, :, first:behind].clone() for part in self._copy]
        copy = self._grown(new.fixed + self._layer.length - new.tail)
        for row, slot, block in moved:
            for part, states in zip(copy, block, strict=True):
                part[row, :, slot * self._size : (slot + 1) * self._size] = states
        self._bring(copy, missing)
        if tail is not None:
            for part, states in zip(copy, tail, strict=True):
                part[:, :, new.fixed : new.fixed + states.shape[2]] = states
        return Layout(new.selections, self._size, rows), known if tail is not None else new.tail

    def _columns(self, old: Layout | None, known: int) -> list[dict[int, int]]:
        """For each request where the copy has a block: its first column."""
        if old is None:
            return [{} for _ in range(len(self._copy[0]))] if self._copy is not None else []
        size, found = self._size, []
        behind = range(-(-old.tail // size), known // size)
        for blocks in old.rows:
            slots = {one: slot * size for slot, one in enumerate(blocks) if one >= 0 and (one + 1) * size <= known}
            found.append({one: old.fixed + one * size - old.tail for one in behind} | slots)
        return found

    def _taken(self, row: int, column: int) -> KV:
        keys, values = self._copy  # type: ignore[misc]
        columns = slice(column, column + self._size)
        return keys[row, :, columns].clone(), values[row, :, columns].clone()

    def _bring(self, copy: KV, missing: list[dict[int, int]]) -> None:
        """Write blocks into their slots; those that were read ahead are not read again."""
        ahead, self._ahead = self._ahead, None
        ready: list[dict[int, int]] = [{} for _ in missing]
        if ahead is not None and len(ahead[0]) == len(missing):
            ready = [
                {one: place for place, one in enumerate(some) if one in absent}
                for some, absent in zip(ahead[0], missing, strict=True)
            ]
            for row, (block, some) in enumerate(zip(ahead[1].result(), ready, strict=True)):
                self._scatter(copy, row, {missing[row][one]: place for one, place in some.items()}, block)
        rest = [[one for one in absent if one not in some] for absent, some in zip(missing, ready, strict=True)]
        away = self._layer.away_tokens // self._size
        there = [[one for one in blocks if one < away] for blocks in rest]
        if any(there):
            for row, (block, blocks) in enumerate(zip(self._layer.blocks(there, self._size), there, strict=True)):
                self._scatter(copy, row, {missing[row][one]: place for place, one in enumerate(blocks)}, block)
        for row, blocks in enumerate(rest):
            for one in set(blocks) - set(there[row]):  # the last ones, of which some tokens are not away
                slot = missing[row][one] * self._size
                for part, new in zip(copy, self._layer.read(one * self._size, (one + 1) * self._size), strict=True):
                    part[row, :, slot : slot + self._size] = new[row]
        token_bytes = sum(part[0, :, :1].numel() * part.element_size() for part in copy)
        prefetched, read = sum(map(len, ready)), sum(map(len, rest))
        in_vain = sum(map(len, ahead[0])) - prefetched if ahead is not None else 0
        self._metrics.loaded_blocks += prefetched + read
        self._metrics.prefetched_blocks += prefetched
        self._metrics.loaded_bytes += (prefetched + read + in_vain) * self._size * token_bytes

    def _scatter(self, copy: KV, row: int, places: dict[int, int], block: KV) -> None:
        """Write blocks `[blocks, size, kv_heads, head_dim]` into slots; `places` is slot → which of them."""
        if not places:
            return
        slots, chosen = torch.tensor(list(places)), list(places.values())
        for part, states in zip(copy, block, strict=True):
            some = states if chosen == list(range(len(states))) else states[chosen]
            every = part[row, :, : part.shape[2] // self._size * self._size].unflatten(1, (-1, self._size))
            every.index_copy_(1, slots.to(part.device), some.to(part.device, non_blocking=True).permute(2, 0, 1, 3))

    def _forget_ahead(self) -> None:
        if self._ahead is not None:
            self._ahead[1].exception()
            self._ahead = None

    def _observe(self, keys: Tensor) -> None:
        """Represent blocks while all keys of the layer are on its device, `[batch, kv_heads, tokens, head_dim]`."""
        count = keys.shape[2] // self._size
        if (self._has_stepped and self._layer.unchanged_tokens) or not count:
            return
        self._made, self._held = None, 0
        blocks = keys[:, :, : count * self._size].unflatten(2, (count, self._size))
        self._prepared = self._method.prepare(blocks)
        self._made = self._method.represent(blocks, self._prepared)
        self._layer.unchanged_tokens = keys.shape[2]
        self._count()

    def _keys(self, start: int, end: int) -> Tensor:
        if not self.is_away:
            return super()._keys(start, end)
        keys: Tensor = self._layer.read(start, end)[0]
        return keys

    def _count(self) -> None:
        """Note what is on the device."""
        self._layer.count("blocks", sum(part.nbytes for part in self._copy or ()))
        self._layer.count("represented", 0 if self._made is None else self._made.nbytes)
