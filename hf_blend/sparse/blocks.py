# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The blocks of one layer: a representation of each, and a compact copy of the selected ones.

    tokens    | block 0 | block 1 | … | block n-1 | rest          n complete blocks before the new tokens
    copy      | selected blocks, in order | all from the tail's first token on |

The layer's `unchanged_tokens` says how many first tokens stayed as they were when the cache was cropped or reordered.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .config import SparseConfig
from .layout import Layout
from .lock import Selection
from .methods.base import BlockMethod

KV = tuple[Tensor, Tensor]
ROOM_TOKENS = 128  # spare columns behind a compact copy


class BlockedLayer:
    """Blocks of one layer."""

    def __init__(self, layer: Any, config: SparseConfig, method: BlockMethod) -> None:
        self._layer, self._config, self._method = layer, config, method
        self._made: Tensor | None = None
        self._prepared: Any = None
        self._copy: KV | None = None
        self._layout: Layout | None = None  # of the copy, which holds the first `_held` tokens of the context
        self._held = 0
        layer.unchanged_tokens = 0

    @property
    def is_away(self) -> bool:
        """Whether blocks have to be copied to the device."""
        return False

    def begin(self) -> None:
        """Begin a sparse step: drop what the cache has changed since the last one."""
        unchanged = self._layer.unchanged_tokens
        self._held = min(self._held, unchanged)
        if self._made is not None:
            self._made = self._made[:, :, : unchanged // self._config.block_tokens]

    def release(self) -> None:
        """Called when the next step attends to everything."""

    def close(self) -> None:
        """End the session."""

    def whole(self) -> KV:
        """K and V of all tokens, `[batch, kv_heads, tokens, head_dim]`."""
        return self._layer.keys, self._layer.values

    def prefetch(self, selections: Sequence[Selection]) -> None:
        """Hint at the blocks that the next step will probably select."""

    def complete(self, past: int) -> int:
        """How many blocks are complete before the new tokens."""
        return past // self._config.block_tokens

    def scores(self, queries: Tensor, past: int) -> Tensor:
        """The method's score of every complete block: `[batch, heads, rows, head_dim]` → `[batch, rows, blocks]`."""
        blocks = self._represented(self.complete(past))
        batch, _, rows, width = queries.shape
        grouped = queries.reshape(batch, blocks.shape[1], -1, rows, width)
        scores = self._method.score(grouped, blocks, self._prepared).float()
        always = self._config.first_blocks, scores.shape[-1] - self._config.recent_blocks
        scores[..., : always[0]] = scores[..., max(0, always[1]) :] = math.inf
        return scores

    def count(self, past: int) -> int:
        """How many complete blocks a step attends to."""
        always = self._config.first_blocks + self._config.recent_blocks
        return min(self.complete(past), max(always, math.ceil(self._config.share * self.complete(past))))

    def select(self, scores: Tensor, past: int) -> Selection:
        """The blocks with the highest scores, `[blocks]`."""
        chosen = scores.topk(self.count(past)).indices.sort().values
        return Selection(tuple(chosen.tolist()), self.complete(past) * self._config.block_tokens)

    def attended(self, selections: Sequence[Selection]) -> tuple[Layout, Tensor, Tensor]:
        """The layout of a step, and the K and V that it attends to, `[batch, kv_heads, columns, head_dim]`."""
        layout, copied = self._layout, 0
        if layout is not None and layout.selections == tuple(selections):
            copied = min(self._held, self._layer.unchanged_tokens)
        else:
            layout = Layout(selections, self._config.block_tokens)
        total = self._layer.length
        used = layout.fixed + total - layout.tail
        if copied < layout.tail or self._copy is None or self._copy[0].shape[2] < used:
            self._copy, copied = self._gathered(layout, used + ROOM_TOKENS), layout.tail
        for copy, states in zip(self._copy, self._read(copied, total), strict=True):
            copy[:, :, layout.fixed + copied - layout.tail : used] = states
        self._layout, self._held = layout, total
        return layout, self._copy[0][:, :, :used], self._copy[1][:, :, :used]

    def settle(self) -> None:
        """End a step: the layer counts changes from now on."""
        self._layer.unchanged_tokens = self._layer.length

    def _gathered(self, layout: Layout, capacity: int) -> KV:
        """Buffers that begin with the selected blocks."""
        keys, values = self.whole()
        return self._buffer(keys, layout, capacity), self._buffer(values, layout, capacity)

    def _buffer(self, states: Tensor, layout: Layout, capacity: int) -> Tensor:
        batch, heads, tokens, width = states.shape
        blocks, size, count = layout.blocks.to(states.device), self._config.block_tokens, layout.blocks.shape[1]
        buffer, every = states.new_empty((batch, heads, capacity, width)), tokens // size
        for row in range(batch):  # whole blocks are copied in half the time of their tokens
            whole = states[row, :, : every * size].unflatten(1, (every, size)).flatten(2)
            chosen = buffer[row, :, : count * size].view(heads, count, size * width)  # none in less than a block
            torch.index_select(whole, 1, blocks[row], out=chosen)
        return buffer

    def _read(self, start: int, end: int) -> KV:
        """K and V of some tokens."""
        return self._layer.keys[:, :, start:end], self._layer.values[:, :, start:end]

    def _represented(self, count: int) -> Tensor:
        """The representations of the first blocks; those of new or changed blocks are computed."""
        size = self._config.block_tokens
        kept = 0 if self._made is None else min(self._made.shape[2], self._layer.unchanged_tokens // size)
        if kept < count or self._made is None:
            keys = self._read(kept * size, count * size)[0].unflatten(2, (count - kept, size))
            if kept == 0:
                self._prepared = self._method.prepare(keys)
            new = self._method.represent(keys, self._prepared)
            self._made = new if kept == 0 or self._made is None else torch.cat([self._made[:, :, :kept], new], dim=2)
        return self._made[:, :, :count]
