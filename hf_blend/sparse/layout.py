# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Where the tokens that a batch looks at stand, when its requests have selected different blocks.

columns    | block | block | … | tail, tail + 1, …          the same number for every request; where a request
has fewer blocks, a filler that it does not see
"""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from .lock import Selection


class Layout:
    """The columns that are made of some selections."""

    def __init__(
        self, selections: Sequence[Selection], block_tokens: int, rows: list[list[int]] | None = None
    ) -> None:
        self.selections, self._size = tuple(selections), block_tokens
        self.tail = min(one.tail for one in selections)
        inside = [[block for block in one.blocks if block * block_tokens < self.tail] for one in selections]
        most = max(map(len, inside))
        self.rows = rows or [blocks + [-1] * (most - len(blocks)) for blocks in inside]
        self.fixed = most * block_tokens

    @cached_property
    def blocks(self) -> Tensor:
        """The blocks before the tail, `[batch, blocks]`; block 0 where there is a filler."""
        return torch.tensor(self.rows, dtype=torch.long).reshape(len(self.rows), -1).clamp_min(0)

    @cached_property
    def inside(self) -> Tensor:
        """Tokens of the columns before the tail, `[batch, fixed]`; token 0 where there is a filler."""
        return (self.blocks[:, :, None] * self._size + torch.arange(self._size)).flatten(1)

    def columns(self, total: int) -> Tensor:
        """Tokens of all columns, `[batch, columns]`, of a context of `total` tokens."""
        return torch.cat([self.inside, torch.arange(self.tail, total).expand(len(self.rows), -1)], dim=1)

    def seen(self, total: int) -> Tensor | None:
        """Which columns a request looks at, `[batch, columns]`; None for all."""
        tails = {one.tail for one in self.selections}
        if len(tails) == 1 and all(block >= 0 for row in self.rows for block in row):
            return None
        seen = torch.ones((len(self.rows), self.fixed + total - self.tail), dtype=torch.bool)
        for row, (blocks, one) in enumerate(zip(self.rows, self.selections, strict=True)):
            seen[row, : self.fixed] = (torch.tensor(blocks) >= 0).repeat_interleave(self._size)
            for block in set(range(self.tail // self._size, one.tail // self._size)) - set(one.blocks):
                start = self.fixed + block * self._size - self.tail
                seen[row, start : start + self._size] = False
        return seen
