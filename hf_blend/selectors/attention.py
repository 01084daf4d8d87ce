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

    def visible(self) -> Tensor:
        """Which keys the rows see: `[batch or 1, heads or 1, rows, keys]`."""
        if self.mask is None:
            keys = torch.arange(self.keys.shape[2], device=self.keys.device)
            return (keys <= self.columns[:, :, None] + self.past)[:, None]
        mask = self.mask
        if not isinstance(mask, Tensor):  # lines that are made a block at a time
            mask = mask.cut(slice(0, mask.shape[2]), slice(0, self.keys.shape[2]))
        return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2

    def weights(self, visible: Tensor | None = None) -> Tensor:
        """Share of attention that each key gets from the rows; 0 where a row does not look.

        Shapes: visible `[batch or 1, heads or 1, rows, keys]`, None as in the mask → `[batch, heads, rows, keys]`
        float32, summing to 1.
        """
        batch, heads, rows, width = self.queries.shape
        kv_heads, keys = self.keys.shape[1:3]
        # Scores by group of heads
        queries = self.queries.reshape(batch, kv_heads, -1, width)
        scores = (queries @ self.keys.transpose(2, 3)).float().view(batch, heads, rows, keys) * self.scaling
        if self.softcap:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        # What is computed is charged by what is seen
        is_causal = visible is None and self.mask is None
        visible = self.visible() if visible is None else visible
        if is_causal and self.charge is not None:  # counted by the columns, when it is asked for
            columns = self.columns
            self.charge(lambda: float((columns + self.past + 1).sum()) * 2.0 * width * heads)
        else:
            self._charge(visible, width)
        hidden = ~visible
        return scores.masked_fill(hidden, torch.finfo(torch.float32).min).softmax(dim=-1).masked_fill(hidden, 0)

    def taken(self, weights: Tensor) -> Tensor:
        """What the rows take from each key: its weight times the length of its value, mean over rows and heads.

        Source: VATP (arXiv 2406.12335).

        Shapes: `[batch, heads, rows, keys]` → `[batch, keys]` float32.
        """
        batch, _, _, keys = weights.shape
        by_kv_head = weights.reshape(batch, self.values.shape[1], -1, keys).mean(dim=2)
        lengths = torch.linalg.vector_norm(self.values, dim=-1, dtype=torch.float32)
        return (by_kv_head * lengths).mean(dim=1)

    def outputs(self, weights: Tensor) -> Tensor:
        """The output of attention: the values weighted by what `weights` gave.

        Shapes: `[batch, heads, rows, keys]` → `[batch, heads, rows, value_dim]`.
        """
        batch, heads, rows, keys = weights.shape
        kv_heads, width = self.values.shape[1], self.values.shape[3]
        self._charge(weights > 0, width)
        by_group = weights.reshape(batch, kv_heads, -1, keys).to(self.values.dtype)
        return (by_group @ self.values).view(batch, heads, rows, width)

    def _charge(self, visible: Tensor, width: int) -> None:
        """Two FLOPs for each multiplied and added number, by head and by visible key."""
        if self.charge is not None:
            batch, heads = self.queries.shape[:2]
            repeats = batch * heads / (visible.shape[0] * visible.shape[1])
            self.charge(visible.sum() * (2.0 * width * repeats))
