# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""How important stored tokens are, recorded for a store while a request runs.

In a few layers behind the last check layer the queries of the question's last rows meet the keys of the stored chunks,
in the cache by then; the model's own attention follows. Nothing else is computed, and the device is asked once, at the
end of the forward.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..model.anatomy import LayerInfo
from ..model.attention import AttentionCapture, AttentionFn, stock_function
from .plan import PlacedChunk

if TYPE_CHECKING:
    from .blend import PrefillContext

LAYERS = 4  # that are listened to
ROWS = 16  # of the question
IMPORTANT_SHARE = 0.25  # of a prompt's stored tokens are called important (IMPRESS)


class ImportanceListener:
    """What attention says of stored chunks, gathered for a store that reads it."""

    def __init__(self, context: "PrefillContext", after: int) -> None:
        """Prepare to listen behind a layer."""
        self._plan = context.plan
        self._past = context.request.past
        self._charge = context.report.charge
        self._sums: dict[int, Tensor] = {}  # by batch entry

        # The chunks of each batch entry, and the rows of its question
        self._chunks: dict[int, list[PlacedChunk]] = {}
        self._rows = ROWS
        for placed in self._plan.chunks:
            # not the beginning of a prompt, an attention sink whatever its tokens are
            is_beginning = placed.exact and not self._past and not placed.chunk.key.chunk_prefix_ids
            if not is_beginning:
                self._chunks.setdefault(placed.row, []).append(placed)
                self._rows = min(self._rows, self._plan.real.shape[1] - placed.columns.stop)

        # The layers: some of the deep ones that keep all tokens
        deep = []
        for index, layer in enumerate(context.layers):
            if index > after and getattr(layer, "keeps_all", False) and not layer.is_sliding:
                deep.append(index)
        if len(deep) > 1:
            deep.pop()  # past the K and V of the last layer only the last row is computed
        self._layers: frozenset[int] = frozenset()
        if self._rows > 0 and self._chunks:
            step = max(1, len(deep) // LAYERS)
            self._layers = frozenset(deep[::-1][::step][:LAYERS])

    def capture(self, index: int, layer: nn.Module, *_: Any) -> AttentionCapture | None:
        """A capture of a layer's attention, which adds up scores and attends as the model does; None: no capture."""
        modules = LayerInfo.of(layer).attention if index in self._layers else ()
        if len(modules) != 1 or stock_function(modules[0].config._attn_implementation) is None:
            return None

        def score(stock: AttentionFn, module: nn.Module, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
            self._add_scores(query, key, kwargs.get("scaling") or query.shape[-1] ** -0.5)
            return stock(module, query, key, *args, **kwargs)

        return AttentionCapture(layer, score)

    @torch.no_grad()
    def _add_scores(self, query: Tensor, key: Tensor, scaling: float) -> None:
        count = min(self._rows, query.shape[2])
        for row, chunks in self._chunks.items():
            columns = [torch.arange(chunk.columns.start, chunk.columns.stop) for chunk in chunks]
            keys = key[row].index_select(1, torch.cat(columns).to(key.device) + self._past)
            grouped = query[row, :, -count:].reshape(keys.shape[0], -1, query.shape[3])
            scores = (grouped @ keys.transpose(1, 2)).float().mul_(scaling).softmax(dim=-1).sum(dim=(0, 1))
            self._charge(2.0 * grouped.numel() * keys.shape[1])
            self._sums[row] = self._sums[row] + scores if row in self._sums else scores

    def finish(self) -> None:
        """Report to the store; chunks that were refused meanwhile are left out."""
        for row, scores in self._sums.items():
            report_importance(self._plan.store, self._chunks[row], scores.cpu())
        self._sums.clear()


def report_importance(store: Any, chunks: Sequence[PlacedChunk], scores: Tensor) -> None:
    """Tell a store how much attention the chunks of one prompt got, by scores of all their tokens."""
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
            store.record_attention(placed.chunk.key, scores[here], share)
        else:
            store.record_importance(placed.chunk.key, share)
