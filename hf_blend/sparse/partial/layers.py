# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The layers of a chunk in blocks, which are read as far as they are needed."""

from collections.abc import Callable, Sequence
from typing import overload

import torch
from torch import Tensor

from ...store.chunk import KV, ChunkKV
from ...store.stream import FAULTS, LazyLayers
from .blocked import BlockReader

Recompute = Callable[[], ChunkKV]


class PartialLayers(LazyLayers):
    """The layers of a chunk in blocks: whole where a layer is asked for, in part for the partial loader.

    What was read stays until `forget`, so that no byte of it is read twice in a request.
    """

    def __init__(self, reader: BlockReader, replace: Callable[[BaseException, Recompute | None], ChunkKV]) -> None:
        self.reader = reader
        self._replace = replace  # computes the chunk after a fault
        self._instead: ChunkKV | None = None
        self._back = reader.order.argsort()
        self._states: dict[tuple[int, int], Tensor] = {}  # by layer and part
        self._blocks: dict[tuple[int, int], list[set[int]]] = {}  # likewise: blocks given out, by head

    def __len__(self) -> int:
        return len(self.reader.layer_table)

    @overload
    def __getitem__(self, index: int) -> KV: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[KV]: ...
    def __getitem__(self, index: int | slice) -> KV | Sequence[KV]:
        """(K, V) of a layer, `[kv_heads, tokens, head_dim]` each."""
        if isinstance(index, slice):
            return [self[layer] for layer in range(*index.indices(len(self)))]
        index, every, heads = range(len(self))[index], range(self.reader.blocks), range(self.reader.heads)
        if not self.is_whole(index):
            for which in (0, 1):
                self.reader.expect(index, which, heads, every)
        return self.read(index, 0, heads, every), self.read(index, 1, heads, every)

    def is_whole(self, layer: int) -> bool:
        """Return True if all of a layer was read, from the blocks or behind a fault, and is in memory."""
        read_blocks, blocks = [self._blocks.get((layer, which), [set()]) for which in (0, 1)], self.reader.blocks
        return all(len(head_blocks) == blocks for heads in read_blocks for head_blocks in heads)

    def forget(self, before: int) -> None:
        """Let go of what was read of the layers before one."""
        for index in [index for index in self._blocks if index[0] < before]:
            del self._blocks[index]
            self._states.pop(index, None)

    def read(self, layer: int, which: int, heads: Sequence[int], blocks: Sequence[int]) -> Tensor:
        """Some heads and blocks of a layer's keys (0) or values (1), `[heads, tokens of the blocks, width]`.

        Tokens are as `reader.tokens_of` says, but in the chunk's order if all blocks are requested.
        """
        is_all = len(blocks) == self.reader.blocks
        read_blocks = self._blocks.setdefault((layer, which), [set() for _ in range(self.reader.heads)])
        if self._instead is None:
            try:
                positions = self._back if is_all else self.reader.positions_of(blocks)
                return _heads(self._read(layer, which, heads, blocks), heads).index_select(1, positions)
            except FAULTS as fault:
                self._instead = self._replace(fault, self.recompute)
        for head in heads:
            read_blocks[head].update(blocks)
        states = _heads(self._instead.layers[layer][which], heads)
        return states if is_all else states[:, self.reader.tokens_of(blocks)]

    def _read(self, layer: int, which: int, heads: Sequence[int], blocks: Sequence[int]) -> Tensor:
        """`[kv_heads, tokens, width]` in the order of the blocks; at least the requested heads and blocks are read."""
        if (layer, which) not in self._states:
            self._states[layer, which] = self.reader.empty(which)
        states, read_blocks = self._states[layer, which], self._blocks[layer, which]
        missing: dict[tuple[int, ...], list[int]] = {}
        for head in heads:
            if lacking := tuple(block for block in blocks if block not in read_blocks[head]):
                missing.setdefault(lacking, []).append(head)
        for lacking, those in missing.items():
            new, positions = self.reader.read_blocks(layer, which, those, lacking), self.reader.positions_of(lacking)
            if those == list(range(those[0], those[-1] + 1)):  # copying to neighbours takes less
                states[those[0] : those[-1] + 1].index_copy_(1, positions, new)
            else:
                states[torch.tensor(those)[:, None], positions] = new
            for head in those:
                read_blocks[head].update(lacking)
        return states


def _heads(states: Tensor, heads: Sequence[int]) -> Tensor:
    """Some heads of `[kv_heads, tokens, width]`; a view where they are neighbours."""
    return states[heads.start : heads.stop] if isinstance(heads, range) else states[list(heads)]
