# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Looking at some columns of a context: the lines of the mask there, and the share of attention they hold."""

from typing import Any

import torch
from torch import Tensor

from ..model.attention import is_flash
from .layout import Layout


def cut_mask(mask: Tensor | None, layout: Layout, query: Tensor, total: int, name: str) -> Any:
    """The lines of a mask at the columns that are looked at.

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
        zeros = torch.zeros(allowed.shape, dtype=query.dtype, device=query.device)
        return allowed if name == "sdpa" else zeros.masked_fill(~allowed, torch.finfo(query.dtype).min)
    index = columns[:, None, None].to(mask.device).expand(-1, mask.shape[1], rows, -1)
    part = mask.expand(len(columns), -1, -1, -1).gather(-1, index)
    return part & allowed if part.dtype == torch.bool else part.masked_fill(~allowed, torch.finfo(part.dtype).min)


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
