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
        positions = torch.arange(total - rows, total, device=columns.device)
        causal = (columns[:, None] <= positions[:, None])[:, None].to(query.device)
        if name == "sdpa":
            return causal
        added = torch.zeros(causal.shape, dtype=query.dtype, device=query.device)  # to the scores
        return added.masked_fill(~causal, torch.finfo(query.dtype).min)
    index = columns[:, None, None].to(mask.device).expand(-1, mask.shape[1], rows, -1)
    return mask.expand(len(columns), -1, -1, -1).gather(-1, index)
