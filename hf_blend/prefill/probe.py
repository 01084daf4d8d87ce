# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A probe: a pass of the question alone over the stored KV, before anything is recomputed.

It writes to copies of the cache's layers as they were before the forward, passes its attention on to a selector, and
ends behind the last layer whose attention is asked for.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..model.anatomy import LayerCall, cache_argument, without_cache
from ..model.attention import ROWS, AttentionCapture, StopForward
from ..selectors.attention import Attention
from ..selectors.base import Receive
from .blend import Prefill
from .plan import PlacedChunk
from .report import BlendReport
from .rows import Rows


class AttentionObserver:
    """Replaces each layer's attention function: passes the weights on to a selector, and attends."""

    def __init__(self, receive: Receive, layers: Sequence[int] | None = None, rows: int | None = None) -> None:
        """Prepare to listen to some layers; None to all.

        A probe that listens computes no more than `rows` of the question's rows; no row attends to the others.
        """
        self._receive = receive
        self._layers = layers
        self.rows = rows
        self.computed: Tensor | None = None  # `[batch, columns]`: False on the question's columns that are left out
        self.last = None if layers is None else layers[-1]
        self._masks: list[tuple[Any, Tensor, int, Tensor]] = []  # mask, columns, keys, and what is seen then

    def takes(self, index: int) -> bool:
        """Whether a layer's attention is taken; the others attend by their stock function."""
        return self._layers is None or self.computed is not None or index in self._layers

    def take(self, index: int, attended: Attention) -> tuple[Tensor, None]:
        """Pass a layer's weights on, then return what its attention returns, `[batch, rows, heads, value_dim]`."""
        is_heard = self._layers is None or index in self._layers
        is_last = index == self.last
        # What the layer does in any case is not charged again; in the last one nothing follows
        free = replace(attended, charge=None)
        weights = (attended if is_last else free).weights(self._seen(attended))
        if is_heard:
            self._receive(index, attended, weights)
        if is_last:
            raise StopForward
        return free.outputs(weights).to(attended.queries.dtype).transpose(1, 2).contiguous(), None

    def _seen(self, attended: Attention) -> Tensor | None:
        """Which keys the rows see, if some of the question's columns are left out; None: as in the mask.

        Layers with the same mask and as many keys share it.
        """
        computed = self.computed
        if computed is None:
            return None
        keys = attended.keys.shape[2]
        for mask, columns, count, seen in self._masks:
            if mask is attended.mask and columns is attended.columns and count == keys:
                return seen
        visible = computed.new_ones(len(computed), keys, device=attended.keys.device)
        visible[:, attended.past : attended.past + computed.shape[1]] = computed
        seen = attended.visible() & visible[:, None, None]
        self._masks.append((attended.mask, attended.columns, keys, seen))
        return seen


def attention_of(
    columns: Tensor, tokens: int, charge: Callable[[Any], None], take: Callable[[Attention], Any]
) -> Callable[..., Any]:
    """What takes a layer's call of attention, for rows at `[batch, rows]`, and passes on an `Attention` of it."""

    def attend(_: Any, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
        lines = kwargs.get(ROWS)
        seen: Any = mask if isinstance(mask, Tensor) and mask.dim() == 4 else None
        if lines is not None:  # of a causal mask the columns say it
            seen = None if lines.is_causal else lines
        if kwargs.get("indices") is not None:
            seen = _indexed(mask, kwargs["indices"], key.shape[2])
        scaling = kwargs.get("scaling") or getattr(module, "scaling", None) or query.shape[-1] ** -0.5
        past, own = key.shape[2] - tokens, columns.to(query.device)
        return take(Attention(query, key, value, own, past, seen, scaling, kwargs.get("softcap"), charge))

    return attend


def _indexed(mask: Tensor, indices: Tensor, keys: int) -> Tensor:
    """A mask, boolean or additive, that hides all but the keys that an indexer chose, `[batch, rows, chosen]`."""
    chosen = torch.zeros((*indices.shape[:2], keys), dtype=torch.bool, device=indices.device)
    chosen = chosen.scatter_(-1, indices.long(), True)[:, None]
    return mask & chosen if mask.dtype == torch.bool else mask.masked_fill(~chosen, torch.finfo(mask.dtype).min)


class ProbePass(Prefill):
    """A prefill of the question's rows, which attend to all that is stored; it selects nothing."""

    def __init__(self, prefill: Prefill, layers: Sequence[Any], observer: AttentionObserver) -> None:
        """Prepare to pass the question's attention on to an observer, in the midst of a prefill."""
        super().__init__(
            prefill.model,
            layers,
            prefill.request,
            prefill.plan,
            BlendReport(_costs=prefill.report._costs),
            prefill.realigner,
            prefill.selector,
            prefill.run_probe,
            prefill.extras,
        )
        self._check_layer = -1
        self._observer = observer
        self._charge = prefill.report.charge

    def enter(self, index: int, call: LayerCall) -> None:
        """Let a layer run for rows of the question."""
        table = self.realigner.known_table(index, self._begin_layer(index, call))
        self.realigner.tables.setdefault(index, table)
        if index == 0:
            self._choose_rows(call.hidden.device)
        if self._rows is not None:
            self._keep_rows(index, call, self._rows, self._rows.columns if index == 0 else None)
        is_last = False
        if index in self._with_keys:
            number = self._with_keys.index(index)  # selectors count these
            if self._observer.takes(number):
                columns = (self._rows or Rows.every(self.plan.real)).columns
                take = partial(self._observer.take, number)
                attend = attention_of(columns, self.width, self.report.charge, take)
                self._capture = AttentionCapture(call.layer, attend)
                self._capture.open(call.cache)
                is_last = number == self._observer.last
        self._record_work(index, kv_only=is_last)

    def end(self) -> None:
        """Remove the hooks, and charge the forward for what the probe computed."""
        self._leave_layer()
        report = self.report
        self._charge(lambda: report.flops)  # a reference to this object would keep the cache alive

    def stored_chunks(self) -> list[PlacedChunk]:
        """All chunks: none of their tokens is computed."""
        return self.plan.chunks

    def is_compared(self, index: int) -> bool:
        """Return False: nothing is."""
        return False

    def check_stored(self, computed: Sequence[Tensor]) -> None:
        """Do nothing: the prefill itself compares."""

    def _choose_rows(self, device: torch.device) -> None:
        """Compute what is fresh, or as many rows of the question as the observer asks for."""
        plan = self.plan
        observer = self._observer
        plan.move_to(device)
        active = plan.fresh(with_reusable=False)
        if plan.has_padding:
            self._written = plan.real
        if observer.rows is not None:
            sampled = plan.sampled(observer.rows)
            is_computed = torch.from_numpy(sampled | ~active).to(device)
            observer.computed = self._written = is_computed & plan.real
            active = sampled
        counts = active.sum(axis=1).tolist()
        if min(counts) == self.width:
            self._written = None
        elif min(counts) == max(counts) and not self._needs_same_columns:
            self._rows = Rows.at([np.flatnonzero(row).tolist() for row in active], device)
        else:
            self._rows = Rows.of(torch.from_numpy(active).to(device), counts, self._needs_same_columns)[0]


@torch.no_grad()
def run_probe(probe: ProbePass, cache: Any) -> None:
    """Run the decoder over the new tokens; a plain prompt needs no mask."""
    request = probe.request
    plan = probe.plan
    names = ["input_ids", "position_ids"]
    if len(plan.counts) > 1 or plan.has_padding or request.past:
        names.append("attention_mask")
    arguments = {name: request.arguments[name] for name in names if request.arguments.get(name) is not None}
    decoder = probe.model.get_decoder()
    with contextlib.suppress(StopForward):
        decoder(**{**without_cache(arguments), **cache_argument(decoder, cache), "use_cache": True})
