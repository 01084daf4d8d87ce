# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The columns that a batch attends to when its requests have selected different blocks, and their mask.

columns    | block | block | … | tail, tail + 1, …          as many for every request; a request with fewer blocks
has fillers, which are hidden from it
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..model.attention import is_flash
from .lock import Selection


class Layout:
    """The columns that are made of some selections."""

    def __init__(self, selections: Sequence[Selection], block_tokens: int) -> None:
        self.selections, self._size = tuple(selections), block_tokens
        self.tail = min(selection.tail for selection in selections)
        inside = [[block for block in own.blocks if block * block_tokens < self.tail] for own in selections]
        most = max(map(len, inside))
        self.rows = [blocks + [-1] * (most - len(blocks)) for blocks in inside]
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
        """Which columns each request attends to, `[batch, columns]` bool; None: all."""
        tails = {selection.tail for selection in self.selections}
        if len(tails) == 1 and all(block >= 0 for row in self.rows for block in row):
            return None
        seen = torch.ones((len(self.rows), self.fixed + total - self.tail), dtype=torch.bool)
        for row, (blocks, selection) in enumerate(zip(self.rows, self.selections, strict=True)):
            seen[row, : self.fixed] = (torch.tensor(blocks) >= 0).repeat_interleave(self._size)
            for block in set(range(self.tail // self._size, selection.tail // self._size)) - set(selection.blocks):
                start = self.fixed + block * self._size - self.tail
                seen[row, start : start + self._size] = False
        return seen


def cut_mask(mask: Tensor | None, layout: Layout, query: Tensor, total: int, name: str) -> Any:
    """The lines of a mask at the columns of a layout.

    Shapes: mask `[batch or 1, 1, rows, keys]`, query `[batch, heads, rows, head_dim]` → `[batch, 1, rows, columns]`.
    """
    rows, seen = query.shape[2], layout.seen(total)
    if mask is None and seen is None and (rows == 1 or is_flash(name)):
        return None
    if is_flash(name):
        return NotImplemented
    if rows == 1 and seen is None and mask is not None and mask.dtype == torch.bool and bool(mask.all()):
        return mask[..., : layout.fixed + total - layout.tail]  # as true as the whole, without looking for it
    columns = layout.columns(total)
    past = torch.arange(total - rows, total)
    allowed = columns[:, None] <= past[:, None]
    allowed = (allowed if seen is None else allowed & seen[:, None])[:, None].to(query.device)
    if mask is None:
        return as_taken(allowed, query, name)
    index = columns[:, None, None].to(mask.device).expand(-1, mask.shape[1], rows, -1)
    lines = mask.expand(len(columns), -1, -1, -1).gather(-1, index)
    return narrowed(lines, allowed)


def narrowed(mask: Tensor, seen: Tensor) -> Tensor:
    """A mask, boolean or added to the scores, that hides what is not `seen` as well."""
    return mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, torch.finfo(mask.dtype).min)


def as_taken(mask: Tensor, query: Tensor, name: str) -> Tensor:
    """A mask as the attention of this name takes it: only sdpa takes a boolean one, others add it to the scores."""
    if name == "sdpa" or mask.dtype != torch.bool:
        return mask
    return narrowed(torch.zeros(mask.shape, dtype=query.dtype, device=query.device), mask)


def is_cut(mask: Any, name: str) -> bool:
    """Whether the columns of a mask, of an attention function of that name, can be cut."""
    return mask is None or (isinstance(mask, Tensor) and mask.dim() == 4 and not is_flash(name))


def kept_mass(query: Tensor, key: Tensor, layout: Layout, scaling: float | None) -> float:
    """Share of one step's attention that falls on the columns looked at, mean over requests and heads."""
    batch, heads, _, width = query.shape
    grouped = query.reshape(batch, key.shape[1], -1, width).float()
    scores = grouped @ key.float().transpose(2, 3) * (width**-0.5 if scaling is None else scaling)
    weights = scores.softmax(dim=-1).flatten(1, 2)
    index = layout.columns(key.shape[2]).to(key.device)
    seen = layout.seen(key.shape[2])
    taken = weights.gather(-1, index[:, None].expand(-1, heads, -1))
    return float((taken if seen is None else taken * seen[:, None].to(key.device)).sum(-1).mean())
