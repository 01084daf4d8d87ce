# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What attention looks at in a forward: seen by selectors and observers, and noted for the store.

A probe is a pass of the question alone over the stored KV, before anything is recomputed. For a store that reads it,
`ImportanceListener` gathers what each stored token gets as the request runs: in a few layers behind the last check
layer the queries of the question's last rows meet the keys of the stored chunks, in the cache by then; the model's
own attention follows. Nothing else is computed, and the device is asked once, at the end of the forward.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..model.anatomy import LayerInfo
from ..model.attention import AttentionCapture, AttentionFn, StopForward, stock_function
from ..selectors.attention import Attention
from ..selectors.base import Hear
from .plan import PlacedChunk

if TYPE_CHECKING:
    from .blend import PrefillContext
    from .request import Request

LAYERS = 4  # that are listened to
ROWS = 16  # of the question
IMPORTANT_SHARE = 0.25  # of a prompt's stored tokens are called important (IMPRESS)


class AttentionObserver:
    """Stands in the place of each layer's attention: tells what is looked at, and attends."""

    def __init__(
        self,
        hear: Hear,
        layers: Sequence[int] | None = None,
        anchors: Tensor | None = None,
        rows: int | None = None,
    ) -> None:
        """Prepare to listen to some layers, while attention looks at some anchors only, `[batch, columns]`.

        A probe that listens computes no more than `rows` of the question's rows; the others are looked at by none.
        """
        self._hear, self._layers, self._anchors, self.rows = hear, layers, anchors, rows
        self.computed: Tensor | None = None  # `[batch, columns]`: False on the question's columns that are left out
        self.last = None if layers is None else layers[-1]

    def takes(self, index: int) -> bool:
        """Whether a layer's attention is taken; the others attend as they do without a listener."""
        looks_at_all = self._anchors is None and self.computed is None
        return self._layers is None or not looks_at_all or index in self._layers

    def take(self, index: int, attended: Attention) -> tuple[Tensor, None]:
        """Tell of a layer, then give what its attention gives, `[batch, rows, heads, value_dim]`."""
        weights, own = None, replace(attended, charge=_nothing)  # what the layer does in any case is not charged again
        if self._layers is None or index in self._layers:
            charged = own if self._anchors is None and index != self.last else attended
            weights = charged.weights(slice(None), self._seen(attended, self.computed))
            self._hear(index, attended, weights)
        if index == self.last:
            raise StopForward
        if weights is None or self._anchors is not None:
            is_seen = self.computed if self._anchors is None else self._anchors
            weights = own.weights(slice(None), self._seen(attended, is_seen))
        return own.outputs(weights).to(attended.queries.dtype).transpose(1, 2).contiguous(), None

    @staticmethod
    def _seen(attended: Attention, columns: Tensor | None) -> Tensor | None:
        """These columns, `[batch, columns]`, and all keys in the cache or without a place among the columns."""
        if columns is None:
            return None
        seen = attended.keys.new_ones(len(columns), 1, attended.keys.shape[2], dtype=torch.bool)
        seen[:, 0, attended.past : attended.past + columns.shape[1]] = columns.to(seen.device)
        return seen


def _nothing(flops: Any) -> None:
    """Charge nothing."""


def attention_of(
    columns: Tensor, tokens: int, charge: Callable[[Any], None], take: Callable[[Attention], Any]
) -> Callable[..., Any]:
    """What takes a layer's call of attention, for rows at `[batch, rows]`, and passes on an `Attention` of it."""

    def attend(_: Any, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **given: Any) -> Any:
        is_plain = isinstance(mask, Tensor) and mask.dim() == 4 and not getattr(mask, "is_causal", False)
        plain = mask if is_plain else None
        if given.get("indices") is not None:
            plain = _indexed(mask, given["indices"], key.shape[2])
        scaling = given.get("scaling") or getattr(module, "scaling", None) or query.shape[-1] ** -0.5
        past, own = key.shape[2] - tokens, columns.to(query.device)
        return take(Attention(query, key, value, own, past, plain, scaling, given.get("softcap"), charge))

    return attend


def _indexed(mask: Tensor, indices: Tensor, keys: int) -> Tensor:
    """A mask, boolean or additive, that hides all but the keys that an indexer chose, `[batch, rows, chosen]`."""
    chosen = torch.zeros((*indices.shape[:2], keys), dtype=torch.bool, device=indices.device)
    chosen = chosen.scatter_(-1, indices.long(), True)[:, None]
    return mask & chosen if mask.dtype == torch.bool else mask.masked_fill(~chosen, torch.finfo(mask.dtype).min)


@torch.no_grad()
def run_probe(model: nn.Module, cache: Any, request: "Request", is_plain: bool) -> None:
    """Run the decoder over a prompt of which only the question is recomputed; a plain prompt needs no mask."""
    arguments, called = request.arguments, model
    if not request.others:
        names = ("input_ids", "position_ids", *(() if is_plain else ("attention_mask",)))
        arguments = {name: arguments[name] for name in names if arguments.get(name) is not None}
        called = model.get_decoder()
    with contextlib.suppress(StopForward):
        called(**{**arguments, "past_key_values": cache, "use_cache": True})


class ImportanceListener:
    """What attention says of stored chunks, gathered for a store that reads it.

    What loads chunks in part (`PrefillContext.loader`) has the same methods.
    """

    def __init__(self, context: "PrefillContext", after: int) -> None:
        """Prepare to listen behind a layer."""
        plan = self._plan = context.plan
        self._past, self._charge = context.request.past, context.report.charge
        self._sums: dict[int, Tensor] = {}
        self._layers: frozenset[int] = frozenset()
        # not what a prompt begins with, where attention rests in any case
        said = [one for one in plan.chunks if context.request.past or not one.exact or one.chunk.key.chunk_prefix_ids]
        by_row = groupby(said, lambda placed: placed.row)
        self._chunks = {row: list(chunks) for row, chunks in by_row}
        stops = [chunks[-1].columns.stop for chunks in self._chunks.values()]
        self._rows = min([ROWS, *(plan.real.shape[1] - stop for stop in stops)])
        is_full = [getattr(one, "keeps_all", False) and not one.is_sliding for one in context.layers]
        deep = [index for index, full in enumerate(is_full) if index > after and full]
        deep = deep[:-1] or deep  # past the K and V of the last layer only the last row is computed
        if self._rows > 0 and stops:
            self._layers = frozenset(deep[::-1][:: max(1, len(deep) // LAYERS)][:LAYERS])

    def capture(self, index: int, layer: nn.Module, *_: Any) -> AttentionCapture | None:
        """Take a layer's attention: note what it looks at, then attend as the model would; None where not listened."""
        modules = LayerInfo.of(layer).attention if index in self._layers else ()
        if len(modules) != 1 or stock_function(modules[0].config._attn_implementation) is None:
            return None

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
            store.note(placed.chunk.key, scores[here], share)
        else:
            store.record_importance(placed.chunk.key, share)
