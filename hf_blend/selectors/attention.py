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
        charge: receives the FLOPs of what is computed here; None: they are not counted.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    columns: Tensor
    past: int = 0
    mask: Any = None
    scaling: float = 1.0
    softcap: float | None = None
    charge: Callable[[Any], None] | None = None

    def visible(self, rows: slice) -> Tensor:
        """Which keys some rows see: `[batch or 1, heads or 1, rows, keys]`."""
        if self.mask is None:
            places = torch.arange(self.keys.shape[2], device=self.keys.device)
            return (places <= self.columns[:, rows, None] + self.past)[:, None]
        if isinstance(self.mask, Tensor):
            mask = self.mask[:, :, rows]
        else:
            start, stop, _ = rows.indices(self.mask.shape[2])
            mask = self.mask.cut(slice(start, stop), slice(0, self.keys.shape[2]))
        return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2

    def hidden(self, rows: slice, only: Tensor | None = None) -> Tensor:
        """Which keys some rows do not see: `[batch or 1, heads or 1, rows, keys]`.

        Shapes: only `[batch or 1, rows or 1, keys]`: the other keys are seen by none.
        """
        visible = self.visible(rows)
        return ~(visible if only is None else visible & only[:, None])

    def weights(self, rows: slice, hidden: Tensor | None = None) -> Tensor:
        """Share of attention that each key gets from some rows; 0 where a row does not look.

        Shapes: what `hidden` gave for these rows → `[batch, heads, rows, keys]` float32, summing to 1.
        """
        batch, heads, _, width = self.queries.shape
        kv_heads, count = self.keys.shape[1:3]
        queries = self.queries[:, :, rows].reshape(batch, kv_heads, -1, width)
        scores = (queries @ self.keys.transpose(2, 3)).float().view(batch, heads, -1, count) * self.scaling
        if self.softcap:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        hides_later_ones = hidden is None and self.mask is None
        hidden = self.hidden(rows) if hidden is None else hidden
        if hides_later_ones and self.charge is not None:  # counted by the columns, when it is asked for
            columns, before, each = self.columns[:, rows], self.past + 1, 2.0 * width * heads
            self.charge(lambda: float((columns + before).sum()) * each)
        else:
            self._charge(lambda: ~hidden, width)
        return scores.masked_fill(hidden, torch.finfo(torch.float32).min).softmax(dim=-1).masked_fill(hidden, 0)

    def outputs(self, weights: Tensor) -> Tensor:
        """The output of attention: the values weighted by what `weights` gave.

        Shapes: `[batch, heads, rows, keys]` → `[batch, heads, rows, value_dim]`.
        """
        batch, heads, rows, count = weights.shape
        kv_heads, width = self.values.shape[1], self.values.shape[3]
        self._charge(lambda: weights > 0, width)
        folded = weights.reshape(batch, kv_heads, -1, count).to(self.values.dtype)
        return (folded @ self.values).view(batch, heads, rows, width)

    def _charge(self, visible: Callable[[], Tensor], width: float) -> None:
        """Two FLOPs for each multiplied and added number, by head and by visible key."""
        if self.charge is not None:
            seen, (batch, heads) = visible(), self.queries.shape[:2]
            self.charge(seen.sum() * (2.0 * width * batch * heads / (seen.shape[0] * seen.shape[1])))


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
