# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The step "select": at which layers tokens are selected, what the selector sees of them, and which are selected."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..selectors.base import KV, TokenView
from .context import PrefillContext
from .rows import Rows, highest


@dataclass
class TokenSelection:
    """Runs the selector of one forward."""

    context: PrefillContext
    with_keys: Sequence[int]  # the layers that keep K and V; a selector counts these only
    first_scores: Tensor | None = None  # of a selector that sees no layer: later ones select by the same
    is_first: bool = True

    def schedule(self, stateful: Sequence[int]) -> tuple[float | None, dict[int, float]]:
        """The share of the reusable tokens to compute from the first layer on, and the shares by later check layer.

        A selector that needs no K and V selects before the first layer, with the first check layer's ratio, and again
        at the later check layers. A selection of no tokens is settled before the first layer too. A check layer
        without states to compare is moved to the next of `stateful`, the layers that have them.
        """
        context = self.context
        before = None
        later: dict[int, float] = {}
        ratios = context.plan.config.ratios(len(context.layers))
        if not context.selector.count(max(ratios.values()), context.plan.real.numel()):
            return 0.0, {}
        if not context.selector.needs_kv:
            before = ratios.pop(min(ratios))
        for layer, ratio in sorted(ratios.items()):
            index = next((index for index in stateful if index >= layer), None)
            if index is not None:
                later[index] = ratio
        return before, later

    def select(self, index: int, rows: Rows, fresh: KV | None, ratio: float) -> tuple[Tensor, list[int]]:
        """Mark the tokens that are computed from a layer on, `[batch, rows]`; also returns how many of each entry."""
        began_s, context = time.perf_counter(), self.context
        counts = [context.selector.count(ratio, tokens) for tokens in context.plan.stored_counts]
        view = self._view(index, rows, fresh if self.first_scores is None else None)
        if not any(counts):
            scores = torch.zeros_like(view.reusable, dtype=torch.float32)
        elif self.first_scores is not None:
            scores = rows.take(self.first_scores)
        else:
            scores = context.selector.score(view)
            if not context.selector.needs_kv:
                self.first_scores = scores
        selected = highest(scores.to(view.reusable.device), view.reusable, counts)
        if self.is_first:
            context.report._chosen.append((rows.columns, selected, context.request.past))
            self.is_first = False
        context.report.select_ms += 1e3 * (time.perf_counter() - began_s)
        return selected, counts

    def _view(self, index: int, rows: Rows, fresh: KV | None) -> TokenView:
        table = self.context.plan.token_table()
        kinds = table if rows.is_all else table.gather(2, rows.columns.expand(3, *rows.columns.shape))
        chunk, offset, tokens = kinds
        chunk = chunk if rows.filler is None else chunk.masked_fill(rows.filler, -1)
        optional: dict[str, Any] = {"probe": self.context.probe} if self.context.selector.needs_question else {}
        if fresh is not None:
            optional["pair"] = lambda which: rows.take_pair((fresh[which], self._stored(index, fresh, which)))
        return TokenView(
            index,
            rows.columns,
            chunk >= 0,
            chunk,
            offset,
            tokens,
            num_layers=len(self.with_keys),
            **optional,
        )

    def _stored(self, index: int, states: KV, which: int) -> Tensor:
        """A copy of K (0) or V (1), or projections, of all new tokens, overwritten by the realigned stored chunks."""
        plan, realigner = self.context.plan, self.context.realigner
        chunks = [placed for placed in plan.chunks if not placed.exact]
        layout = plan.chunks[0].chunk.layout.layers[index]
        if len(layout) == 1:
            projections = states[which].clone()
            realigner.write_beside(index, chunks, projections)
            return projections
        (heads, width, dtype), fresh = layout[which], states[which]
        form = (fresh.shape[0], heads, fresh.shape[2], width)
        filled = fresh.clone() if fresh.shape == form else fresh.new_zeros(form, dtype=dtype)
        realigner.write(index, chunks, filled, first=which)
        return filled
