# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What some rows of a layer look at: their queries against the keys of every column, at true positions."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Attention:
    """Queries, keys and values of one layer as its attention function gets them.

    Attributes:
        queries: `[batch, heads, rows, head_dim]`, normed, rotated for the rows' positions.
        keys: `[batch, kv_heads, keys, head_dim]`, of all columns: `past` ones from the cache, then the new tokens.
        values: `[batch, kv_heads, keys, value_dim]`.
        columns: `[batch, rows]`, the column of each row among the new tokens, sorted.
        past: keys before the first new token.
        mask: `[batch or 1, heads or 1, rows, keys]`, boolean or additive; None: each row sees the keys up to its own.
        scaling: of the scores.
        softcap: bound of the scores, if the model has one.
        charge: receives the FLOPs of what is computed here.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    columns: Tensor
    past: int = 0
    mask: Tensor | None = None
    scaling: float = 1.0
    softcap: float | None = None
    charge: Callable[[Any], None] = lambda flops: None

    def visible(self, rows: slice) -> Tensor:
        """Which keys some rows see: `[batch or 1, heads or 1, rows, keys]`."""
        if self.mask is None:
            places = torch.arange(self.keys.shape[2], device=self.keys.device)
            return (places <= self.columns[:, rows, None] + self.past)[:, None]
        lines = getattr(self.mask, "lines", None)  # of a mask that is made a block at a time
        whole = slice(0, self.keys.shape[2])
        mask = self.mask[:, :, rows] if lines is None else lines.cut(slice(*rows.indices(lines.shape[2])[:2]), whole)
        return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2

    def weights(self, rows: slice, only: Tensor | None = None) -> Tensor:
        """Share of attention that each key, or each of `only` some, gets from some rows; 0 where a row does not look.

        Shapes: only `[batch or 1, rows or 1, keys]` → `[batch, heads, rows, keys]` float32, summing to 1.
        """
        visible = self.visible(rows) if only is None else self.visible(rows) & only[:, None]
        batch, heads, _, width = self.queries.shape
        kv_heads, count = self.keys.shape[1:3]
        queries = self.queries[:, :, rows].reshape(batch, kv_heads, -1, width).float()
        scores = (queries @ self.keys.float().transpose(2, 3)).view(batch, heads, -1, count) * self.scaling
        if self.softcap:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        if only is None and self.mask is None:  # counted by the columns, when it is asked for
            columns, before, each = self.columns[:, rows], self.past + 1, 2.0 * width * self.queries.shape[1]
            self.charge(lambda: float((columns + before).sum()) * each)
        else:
            self._charge(visible, width)
        scores = scores.masked_fill(~visible, torch.finfo(torch.float32).min)
        return scores.softmax(dim=-1) * visible

    def outputs(self, weights: Tensor) -> Tensor:
        """The output of attention: the values weighted by what `weights` gave.

        Shapes: `[batch, heads, rows, keys]` → `[batch, heads, rows, value_dim]` float32.
        """
        batch, heads, rows, count = weights.shape
        kv_heads, width = self.values.shape[1], self.values.shape[3]
        self._charge(weights > 0, width)
        folded = weights.reshape(batch, kv_heads, -1, count)
        return (folded @ self.values.float()).view(batch, heads, rows, width)

    def _charge(self, visible: Tensor, width: float) -> None:
        """Two FLOPs for each multiplied and added number, by head and by visible key."""
        batch, heads = self.queries.shape[:2]
        share = batch * heads / (visible.shape[0] * visible.shape[1])
        self.charge(visible.sum() * (2.0 * width * share))


def received(
    attention: Attention, weights: Tensor, rows: Tensor, reduce: str = "mean", by_value: bool = False
) -> Tensor:
    """How much attention each new token receives from some rows, at least one of each prompt.

    `reduce` is "mean", "l2" or "max" over these rows, or "last" for the last of them alone; heads are averaged first,
    except for "max". `by_value` weighs each token by the norm of its value.

    Shapes: weights `[batch, heads, rows, keys]`, rows `[batch, rows]` bool → `[batch, columns]` float32.
    """
    shares = weights[..., attention.past :] * rows[:, None, :, None]
    if by_value:
        lengths = attention.values[:, :, attention.past :].float().norm(dim=-1).mean(dim=1)
        shares = shares * lengths[:, None, None]
    if reduce == "max":
        return shares.amax(dim=(1, 2))
    shares = shares.mean(dim=1)
    if reduce == "l2":
        return shares.norm(dim=1)
    if reduce == "last":
        last = (rows * torch.arange(1, rows.shape[1] + 1, device=rows.device)).argmax(dim=1)
        return shares[torch.arange(len(last), device=last.device), last]
    return shares.sum(dim=1) / rows.sum(dim=1, keepdim=True)
