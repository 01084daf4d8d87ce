# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The blocks of one layer: a representation of each, and a compact copy of the selected ones.

    tokens    | block 0 | block 1 | … | block n-1 | rest          n complete blocks before the new tokens
    copy      | selected blocks, in order | all from the tail's first token on |

The layer's `unchanged_tokens` says how many first tokens stayed as they were when the cache was cropped or reordered.
"""

import math
from typing import Any

import torch
from torch import Tensor

from .config import SparseConfig
from .lock import Selection
from .methods.base import BlockMethod

KV = tuple[Tensor, Tensor]
ROOM_TOKENS = 128  # spare columns behind a compact copy


class BlockedLayer:
    """Blocks of one layer."""

    def __init__(self, layer: Any, config: SparseConfig, method: BlockMethod) -> None:
        self._layer = layer
        self._config = config
        self._method = method
        self._size = config.block_tokens
        self._represented: Tensor | None = None  # `[batch, kv_heads, blocks, …]`
        self._prepared: Any = None
        self._copy: KV | None = None
        self._copied: Selection | None = None  # what is in the copy
        self._copied_tokens = 0  # of the context, up to which the copy has the tail
        layer.unchanged_tokens = 0

    def begin(self) -> None:
        """Begin a sparse step: drop what the cache has changed since the last one."""
        unchanged = self._layer.unchanged_tokens
        self._copied_tokens = min(self._copied_tokens, unchanged)
        blocks = unchanged // self._size
        if self._represented is not None:
            self._represented = self._represented[:, :, :blocks] if blocks else None  # another batch may be cached now

    def settle(self) -> None:
        """End a step: the layer counts changes from now on."""
        self._layer.unchanged_tokens = self._layer.length

    def complete(self, past: int) -> int:
        """How many blocks are complete before the new tokens."""
        return past // self._size

    def scores(self, queries: Tensor, past: int) -> Tensor:
        """The method's score of every complete block: `[batch, heads, rows, head_dim]` → `[batch, rows, blocks]`."""
        blocks = self._represent(self.complete(past))
        batch, _, rows, width = queries.shape
        grouped = queries.reshape(batch, blocks.shape[1], -1, rows, width)
        scores = self._method.score(grouped, blocks, self._prepared).float()
        # Some are always looked at
        recent = max(0, scores.shape[-1] - self._config.recent_blocks)
        scores[..., : self._config.first_blocks] = math.inf
        scores[..., recent:] = math.inf
        return scores

    def select(self, scores: Tensor, past: int) -> Selection:
        """The blocks with the highest scores, `[batch, blocks]`."""
        complete = self.complete(past)
        always = self._config.first_blocks + self._config.recent_blocks
        count = min(complete, max(always, math.ceil(self._config.share * complete)))
        chosen = scores.topk(count).indices.sort().values
        rows = tuple(tuple(blocks) for blocks in chosen.tolist())
        return Selection(rows, complete * self._size)

    def attended(self, selection: Selection) -> KV:
        """The K and V that a step attends to, `[batch, kv_heads, columns, head_dim]`: the blocks, then the tail."""
        total = self._layer.length
        fixed = len(selection.rows[0]) * self._size
        used = fixed + total - selection.tail
        # Gather the blocks, unless the copy has them
        start = self._copied_tokens
        copy = self._copy
        if copy is None or self._copied != selection or start < selection.tail or copy[0].shape[2] < used:
            keys = self._gathered(self._layer.keys, selection, used + ROOM_TOKENS)
            copy = keys, self._gathered(self._layer.values, selection, used + ROOM_TOKENS)
            start = selection.tail
        # Append the tail's tokens
        copy[0][:, :, fixed + start - selection.tail : used] = self._layer.keys[:, :, start:total]
        copy[1][:, :, fixed + start - selection.tail : used] = self._layer.values[:, :, start:total]
        self._copy = copy
        self._copied = selection
        self._copied_tokens = total
        return copy[0][:, :, :used], copy[1][:, :, :used]

    def _gathered(self, states: Tensor, selection: Selection, capacity: int) -> Tensor:
        """A buffer that begins with the selected blocks of K or V."""
        batch, heads, tokens, width = states.shape
        buffer = states.new_empty((batch, heads, capacity, width))
        blocks = torch.tensor(selection.rows, dtype=torch.long, device=states.device)
        count = blocks.shape[1]
        every = tokens // self._size
        for row in range(batch):  # whole blocks are copied in half the time of their tokens
            whole = states[row, :, : every * self._size].unflatten(1, (every, self._size)).flatten(2)
            chosen = buffer[row, :, : count * self._size].view(heads, count, self._size * width)
            torch.index_select(whole, 1, blocks[row], out=chosen)
        return buffer

    def _represent(self, count: int) -> Tensor:
        """The representations of the first blocks; those of new or changed blocks are computed."""
        known = self._represented
        first = 0 if known is None else known.shape[2]
        if known is None or first < count:
            keys = self._layer.keys[:, :, first * self._size : count * self._size]
            blocks = keys.unflatten(2, (count - first, self._size))
            if first == 0:
                self._prepared = self._method.prepare(blocks)
            new = self._method.represent(blocks, self._prepared)
            known = new if known is None else torch.cat([known, new], dim=2)
            self._represented = known
        return known[:, :, :count]
