# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Blocks of a layer whose K and V are away from its device: only those that are looked at are brought.

    host or disk | block 0 | block 1 | … | block n-1 | rest
    device       | selected blocks, in order | tail         and a representation of every block

A selection that changes brings the blocks that it has not got. They are read ahead on another thread: a step before a
lock is compared, its own query says which they will be.
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
        self._made = None
        self.release()
        self._layer.sees_blocks, self._layer.observer = False, None

    def whole(self) -> KV:
        """K and V of all tokens, brought, `[batch, kv_heads, tokens, head_dim]`."""
        return self._read(0, self._layer.length)

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
            self._ahead = coming, self._layer.memory.reading().submit(self._layer.there.blocks, coming, self._size)

    def _gathered(self, layout: Layout, capacity: int) -> KV:
        """See `BlockedLayer._gathered`; blocks that the copy has are moved, the others are brought."""
        if not self.is_away:
            return super()._gathered(layout, capacity)
        here = self._columns(len(layout.rows))
        missing = [sorted({*blocks} - {-1, *there}) for blocks, there in zip(layout.rows, here, strict=True)]
        keys, values = (one.new_zeros((*one.shape[:2], capacity, one.shape[3])) for one in self._layer.read(0, 0))
        copy = keys, values  # zeros, as a filler is hidden, but not from NaN
        for row, (blocks, there) in enumerate(zip(layout.rows, here, strict=True)):
            moved = {slot: there[one] for slot, one in enumerate(blocks) if one in there}
            columns = (torch.tensor([*moved.values()], dtype=torch.long)[:, None] + torch.arange(self._size)).flatten()
            for old, part in zip(self._copy or (), copy, strict=False):
                some = old[row].index_select(1, columns.to(old.device)).unflatten(1, (-1, self._size))
                self._scatter(part[row], [*moved], some)
        for row, found in enumerate(self._brought(missing, copy)):
            slots = {one: slot for slot, one in enumerate(layout.rows[row])}
            for blocks, states in found:
                for part, some in zip(copy, states, strict=True):
                    self._scatter(part[row], [slots[one] for one in blocks], some)
        return copy

    def _columns(self, batch: int) -> list[dict[int, int]]:
        """For each request the blocks that the copy has, and their first columns."""
        old, known = self._layout, min(self._held, self._layer.unchanged_tokens)
        if old is None or self._copy is None or self._copy[0].shape[0] != batch or known < old.tail:
            return [{} for _ in range(batch)]
        behind = range(-(-old.tail // self._size), known // self._size)
        tail = {one: old.fixed + one * self._size - old.tail for one in behind}
        return [tail | {one: slot * self._size for slot, one in enumerate(row) if one >= 0} for row in old.rows]

    def _brought(self, missing: Blocks, copy: KV) -> list[list[tuple[list[int], KV]]]:
        """For each request blocks and their K and V, `[kv_heads, blocks, size, head_dim]`, read ahead or now."""
        found: list[list[tuple[list[int], KV]]] = [[] for _ in missing]
        ahead, self._ahead = self._ahead, None
        expected = ahead[0] if ahead is not None and len(ahead[0]) == len(missing) else [[] for _ in missing]
        known = self._layer.unchanged_tokens // self._size
        ready = [
            [one for one in some if one in absent and one < known]
            for some, absent in zip(expected, missing, strict=True)
        ]
        rest = [[one for one in absent if one not in some] for some, absent in zip(ready, missing, strict=True)]
        away = self._layer.away_tokens // self._size
        there = [[one for one in blocks if one < away] for blocks in rest]
        sources: list[tuple[Blocks, Blocks, list[KV]]] = []
        if ahead is not None and any(ready):
            sources.append((expected, ready, ahead[1].result()))
        if any(there):
            sources.append((there, there, self._layer.there.blocks(there, self._size)))
        for held, selected, blocks in sources:
            for row, (names, states) in enumerate(zip(selected, blocks, strict=True)):
                index = torch.tensor([held[row].index(one) for one in names], dtype=torch.long)
                some = states if names == held[row] else (states[0][index], states[1][index])
                keys, values = (part.to(copy[0].device, non_blocking=True).permute(2, 0, 1, 3) for part in some)
                found[row].append((names, (keys, values)))
        for row, absent in enumerate(rest):
            for one in set(absent) - set(there[row]):  # the last ones, of which some tokens are not away
                keys, values = self._layer.read(one * self._size, (one + 1) * self._size)
                found[row].append(([one], (keys[row][:, None], values[row][:, None])))
        prefetched, read = sum(map(len, ready)), sum(map(len, rest))
        in_vain = sum(map(len, ahead[0])) - prefetched if ahead is not None else 0
        token_bytes = sum(part[0, :, :1].numel() * part.element_size() for part in copy)
        self._metrics.loaded_blocks += prefetched + read
        self._metrics.prefetched_blocks += prefetched
        self._metrics.loaded_bytes += (prefetched + read + in_vain) * self._size * token_bytes
        return found

    def _scatter(self, states: Tensor, slots: list[int], blocks: Tensor) -> None:
        """Write blocks `[kv_heads, blocks, size, head_dim]` to slots of `[kv_heads, columns, head_dim]`."""
        every = states[:, : states.shape[1] // self._size * self._size].unflatten(1, (-1, self._size))
        every.index_copy_(1, torch.tensor(slots, dtype=torch.long, device=states.device), blocks)

    def _forget_ahead(self) -> None:
        if self._ahead is not None:
            self._ahead[1].exception()
            self._ahead = None

    def _observe(self, keys: Tensor) -> None:
        """Represent blocks while all keys of the layer are on its device, `[batch, kv_heads, tokens, head_dim]`."""
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
        """Note what is on the device."""
        self._layer.memory.count(("blocks", self._layer.index), sum(part.nbytes for part in self._copy or ()))
        self._layer.memory.count(("represented", self._layer.index), 0 if self._made is None else self._made.nbytes)
