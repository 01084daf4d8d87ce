# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Masks over some of the columns that a forward would attend to."""

from typing import Any

import torch
from torch import Tensor

from ..model.attention import is_flash


def is_cut(mask: Any, name: str) -> bool:
    """Whether the columns of a mask, of an attention function of that name, can be cut."""
    return mask is None or (isinstance(mask, Tensor) and mask.dim() == 4 and not is_flash(name))


def cut_mask(mask: Tensor | None, columns: Tensor, query: Tensor, total: int, name: str) -> Tensor | None:
    """The lines of a mask at some of `total` columns, of which the last ones are the rows' own.

    Shapes: mask `[batch or 1, 1, rows, total]`, columns `[batch, kept]`, query `[batch, heads, rows, head_dim]` →
    `[batch, 1, rows, kept]`; None where every row sees all of them, or where flash attention hides what is behind it.
    """
    rows = query.shape[2]
    if mask is None and (rows == 1 or is_flash(name)):
        return None
    if mask is None:
        positions = torch.arange(total - rows, total)
        causal = columns[:, None] <= positions[:, None]
        return as_taken(causal[:, None].to(query.device), query, name)
    index = columns[:, None, None].to(mask.device).expand(-1, mask.shape[1], rows, -1)
    return mask.expand(len(columns), -1, -1, -1).gather(-1, index)


def narrowed(mask: Tensor, seen: Tensor) -> Tensor:
    """A mask, boolean or added to the scores, that hides what is not `seen` as well."""
    if mask.dtype == torch.bool:
        return mask & seen
    return mask.masked_fill(~seen, torch.finfo(mask.dtype).min)


def as_taken(mask: Tensor, query: Tensor, name: str) -> Tensor:
    """A mask as the attention of this name takes it: only sdpa takes a boolean one, others add it to the scores."""
    if name == "sdpa" or mask.dtype != torch.bool:
        return mask
    return narrowed(torch.zeros(mask.shape, dtype=query.dtype, device=query.device), mask)
