# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The layers of a chunk in blocks, which are read as far as they are needed."""

import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ...store.chunk import KV, ChunkKV
from ...store.stream import FAULTS, LazyLayers
from .blocked import BlockReader

Recompute = Callable[[], ChunkKV]


class PartialLayers(LazyLayers):
    """The layers of a chunk in blocks: whole where a layer is asked for, in part for the partial loader.

    What was read whole stays until `forget`: K and V of a layer are asked for one after the other.
    """

    def __init__(self, reader: BlockReader, replace: Callable[[BaseException, Recompute | None], ChunkKV]) -> None:
        self.reader = reader
        self._replace = replace  # computes the chunk after a fault
        self._instead: ChunkKV | None = None
        self._whole: dict[int, KV] = {}  # by layer

    def __len__(self) -> int:
        return len(self.reader.layer_table)

    def __getitem__(self, index: Any) -> Any:
        """(K, V) of a layer, `[kv_heads, tokens, head_dim]` each."""
        index = range(len(self))[operator.index(index)]
        if index not in self._whole:
            heads = range(self.reader.heads)
            blocks = range(self.reader.blocks)
            self._whole[index] = self.read(index, 0, heads, blocks), self.read(index, 1, heads, blocks)
        return self._whole[index]

    def is_whole(self, layer: int) -> bool:
        """Return True if all of a layer was read and is in memory."""
        return layer in self._whole

    def forget(self, before: int) -> None:
        """Let go of what was read of the layers before one."""
        self._whole = {layer: states for layer, states in self._whole.items() if layer >= before}

    def read(self, layer: int, which: int, heads: Sequence[int], blocks: Sequence[int]) -> Tensor:
        """Some heads and blocks of a layer's keys (0) or values (1), `[heads, tokens of the blocks, width]`.

        Tokens are as `reader.tokens_of` says, but in the chunk's order if all blocks are requested.
        """
        is_all = len(blocks) == self.reader.blocks
        if self._instead is None:
            try:
                states = self.reader.read_blocks(layer, which, heads, blocks)
                return states.index_select(1, self.reader.back) if is_all else states
            except FAULTS as fault:
                self._instead = self._replace(fault, self.recompute)
        states = self._instead.layers[layer][which][list(heads)]
        return states if is_all else states[:, self.reader.tokens_of(blocks)]
