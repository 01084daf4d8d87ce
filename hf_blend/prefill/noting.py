# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Telling the store what a question looks at: the attention that each stored token gets, as the request runs.

A few layers behind the last check layer are listened to. There the queries of the question's last rows meet the keys
of the stored chunks, which are in the cache by then; the model's own attention follows. Nothing else is computed, and
the device is asked once, at the end of the forward.
"""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from ..model.anatomy import LayerInfo
from ..model.attention import AttentionCapture, AttentionFn, stock_function
from .plan import PlacedChunk, Plan

__all__ = ["IMPORTANT_SHARE", "AttentionNotes", "report_importance"]

LAYERS = 4  # that are listened to
ROWS = 16  # of the question
IMPORTANT_SHARE = 0.25  # of a prompt's stored tokens are called important (IMPRESS)


class AttentionNotes:
    """The attention of one forward, gathered for the store."""

    def __init__(
        self, plan: Plan, layers: Sequence[Any], after: int, past: int, charge: Callable[[Any], None]
    ) -> None:
        self._plan, self._past, self._charge = plan, past, charge
        self._sums: dict[int, Tensor] = {}
        tokens = plan.real.shape[1]
        by_row = groupby(reported(plan.chunks, past), lambda placed: placed.row)
        self._chunks = {row: list(chunks) for row, chunks in by_row}
        stops = [chunks[-1].columns.stop for chunks in self._chunks.values()]
        self._rows = min([ROWS, *(tokens - stop for stop in stops)])
        deep = [index for index, layer in enumerate(layers) if index > after and not _is_windowed(layer)]
        deep = deep[:-1] or deep  # past the K and V of the last layer only the last row is computed
        step = max(1, len(deep) // LAYERS)
        self._layers = frozenset(deep[::-1][::step][:LAYERS]) if self._rows > 0 and stops else frozenset()

    def hears(self, index: int, layer: nn.Module) -> bool:
        """Whether a layer is listened to; its attention must be one that transformers knows by name."""
        modules = LayerInfo.of(layer).attention if index in self._layers else ()
        return len(modules) == 1 and stock_function(modules[0].config._attn_implementation) is not None

    def glance(self, layer: nn.Module) -> AttentionCapture:
        """Takes a layer's attention: notes what it looks at, then attends as the model would."""

        def take(stock: AttentionFn, module: nn.Module, query: Tensor, key: Tensor, *args: Any, **given: Any) -> Any:
            self._note(query, key, given.get("scaling") or query.shape[-1] ** -0.5)
            return stock(module, query, key, *args, **given)

        return AttentionCapture(layer, take)

    @torch.no_grad()
    def _note(self, query: Tensor, key: Tensor, scaling: float) -> None:
        count = min(self._rows, query.shape[2])
        for row, chunks in self._chunks.items():
            columns = torch.cat([torch.arange(one.columns.start, one.columns.stop) for one in chunks]).to(key.device)
            keys = key[row].index_select(1, columns + self._past)
            grouped = query[row, :, -count:].reshape(keys.shape[0], -1, query.shape[3])
            scores = (grouped @ keys.transpose(1, 2)).float().mul_(scaling).softmax(dim=-1).sum(dim=(0, 1))
            flops = 2.0 * grouped.numel() * keys.shape[1]
            self._charge(lambda flops=flops: flops)
            self._sums[row] = self._sums[row] + scores if row in self._sums else scores

    def end(self) -> None:
        """Report to the store; chunks that were refused meanwhile are left out."""
        for row, scores in self._sums.items():
            report_importance(self._plan.store, self._chunks[row], scores.cpu())
        self._sums.clear()


def reported(chunks: Sequence[PlacedChunk], past: int) -> list[PlacedChunk]:
    """The chunks whose attention says something: not what a prompt begins with, where attention rests in any case."""
    return [placed for placed in chunks if placed.start or past or not placed.exact]


def report_importance(store: Any, chunks: Sequence[PlacedChunk], scores: Tensor) -> None:
    """Tell a store how much attention the chunks of one prompt got.

    Shapes: scores `[tokens of all of them]`.
    """
    important = torch.zeros(len(scores), dtype=torch.bool)
    important[scores.topk(max(1, round(IMPORTANT_SHARE * len(scores)))).indices] = True
    scores = scores / scores.mean().clamp_min(1e-20)
    start = 0
    for placed in chunks:
        here = slice(start, start + placed.tokens)
        start += placed.tokens
        if not placed.tokens:
            continue
        share = float(important[here].float().mean())
        if placed.is_whole:
            store.note(placed.chunk.key, scores[here], share)
        else:
            store.record_importance(placed.chunk.key, share)


def _is_windowed(layer: Any) -> bool:
    """Whether a layer keeps no K and V, or not of all tokens as they are."""
    return getattr(layer, "is_sliding", True) or not getattr(layer, "keeps_all", False)
