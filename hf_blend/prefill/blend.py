# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""One forward of the model in which stored KV takes the place of most tokens.

    layer 0 … check-1   every token that has no exact KV is computed
    check layer         its K and V are computed for all of these and compared with the stored ones; tokens are
                        selected; attention and MLP run for the selected and the question only
    deeper layers       only those are computed, against their own fresh K/V and the stored K/V of all others
    last layer          past its K/V only the rows whose output is expected

What each layer does is known before the first. To look before paying, a layer is run until its K and V reach the cache
and left there by a private exception; then it is run again for the selected rows. The layer's code is the model's own.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import UnsupportedModelError
from ..model.anatomy import LayerCall, gather_rows, text_config
from ..model.attention import AttentionCapture, StopForward, layers_handing_on
from ..rotary.tables import Table, rotary_table
from ..selectors.base import KV
from .arguments import RowArguments
from .buffers import LayerBuffers
from .context import AttentionListener, PrefillContext, StoredStates
from .importance import ImportanceListener
from .layer_kind import LayerKind, StatelessKind
from .observing import AttentionObserver, attention_of
from .plan import PlacedChunk
from .report import BlendReport, Work
from .rows import Rows
from .selection import Selection

logger = logging.getLogger(__name__)

MISMATCH_LIMIT = 0.2  # at layer 0, by the token alone: another token differs by about 1, int4 of a real model by 0.13


class Prefill:
    """The state of one forward; made when it begins, gone when it ends."""

    def __init__(self, context: PrefillContext) -> None:
        plan, layers = context.plan, context.layers
        self.context, self.width = context, context.request.width
        self._kinds: list[LayerKind] = [getattr(layer, "prefill_kind", StatelessKind)() for layer in layers]
        self._with_keys = [index for index, kind in enumerate(self._kinds) if kind.has_keys]
        self._last = max((index for index, kind in enumerate(self._kinds) if kind.has_states), default=-1)
        self._selection = Selection(context, self._with_keys)
        stateful = [index for index, kind in enumerate(self._kinds) if kind.has_states]
        # by what tokens are selected before layer 0 (None: all are computed there), and at which check layers
        self._first_ratio, self._ratios = self._selection.schedule(stateful)
        self._last_check = max(self._ratios, default=-1)
        self._loader = context.loader if context.observer is None else None
        ratio = self._ratios.get(self._last_check, self._first_ratio or 0.0)
        self._loads_nothing = context.selector.count(ratio, plan.real.numel()) == plan.real.numel()
        self._stored: StoredStates = self._loader or context.realigner
        self._listener: AttentionListener | None = self._loader
        if context.loader is None and plan.store is not None and plan.store.reads_importance and not context.is_probe:
            self._listener = ImportanceListener(context, self._last_check)
        self._buffers = LayerBuffers(context, self._last, self._stored)
        config = text_config(context.model)
        # tokens in the cache before the new ones; for layers that scale their queries by positions which they count
        # themselves what added to `arange(rows)` gives the positions of the rows, `[rows]`
        self.past: int | Tensor = context.request.past
        self._counts_positions = bool(getattr(config, "attn_temperature_tuning", False))
        self._needs_same_columns = self._counts_positions and len(plan.counts) > 1  # a layer counts for all entries
        self._arguments = RowArguments(
            config, layers, context.request.past, self.width, layers_handing_on(context.model)
        )
        self._tables: dict[int, tuple[Any, Table | None]] = {}  # by the id of what several layers are given
        self._rows: Rows | None = None  # None: all tokens, as the model passes them
        self._row_axis: int | None = None  # of the hidden states, behind the axis of the batch
        self._selected_counts = plan.stored_counts  # of the reusable tokens, those that are computed
        self._is_narrowed = False  # some reusable tokens are computed no more
        self._kind = LayerKind()  # of the layer that runs
        self._model_mask: Any = None  # of all tokens, as that layer was given it
        self._awaited: set[str] | None = None  # what a look into the layer still waits for; None: it runs to its end
        self._capture: AttentionCapture | None = None  # of the layer that runs

    def probe(self, observer: AttentionObserver, spare_layers: Callable[[], Sequence[Any]]) -> "Prefill":
        """A forward inside this one that recomputes the question alone."""
        context = self.context
        keep_all = all(getattr(layer, "keeps_all", False) for layer in context.layers)
        shares = keep_all and not (self._buffers.used or context.loader)
        shares = shares and not torch.is_grad_enabled()  # a probe records none, so what it opens could not be written
        layers, report = context.layers if shares else spare_layers(), BlendReport(_costs=context.report._costs)
        self._kind.pause()  # its layer may be the one that this forward is in
        made = replace(context, layers=layers, report=report, observer=observer, is_probe=True, shares_layers=shares)
        return Prefill(made)

    def take_over(self, probe: "Prefill") -> None:
        """End a probe: it is charged for, and what it wrote to shared layers stays."""
        probe.remove_hooks()
        self._kind.resume()
        report = probe.context.report
        self.context.report.charge(lambda: report.flops)
        self._buffers.take_over(probe._buffers)

    def enter(self, index: int, call: LayerCall) -> None:
        """Make a layer's arguments ready: only the active rows, with their own lines of the mask."""
        context, plan = self.context, self.context.plan
        if self._buffers.settles:
            self._buffers.settle(index)
        if self._kind.has_hooks or self._capture is not None:
            self.remove_hooks()
        self._kind, self._model_mask = self._kinds[index], call.arguments.get(call.mask_name)
        embeddings = call.arguments.get("position_embeddings")
        if embeddings is None or id(embeddings) not in self._tables:
            self._tables[id(embeddings)] = embeddings, rotary_table(call.arguments, call.layer)
        table = self._tables[id(embeddings)][1]
        if self._kind.has_hooks:
            table = self._kind.enter(self, index, call, table)
        if context.is_probe:
            table = context.realigner.known_table(index, table)
        context.realigner.tables.setdefault(index, table)
        if index == 0:
            self._begin(call)
        if self._rows is not None:
            self._keep_rows(index, call, self._rows, self._rows.columns if index == 0 else None)
        if index in self._ratios and any(plan.stored_counts):
            self._look(index, call)
            self._select(index, call, self._ratios[index])
        if self._loader is not None and index > self._last_check:
            self._loader.begin(index, None if self._loads_nothing else self._rows, plan)
        if index == self._last and context.observer is None and plan.chunks:  # past its K and V only what is asked for
            rows, expected = self._rows or Rows.every(plan.real), self.width - plan.end
            if expected < rows.columns.shape[1]:
                self._look(index, call)
                self._keep_rows(index, call, *rows.last(expected))
        ends = self._capture_attention(index, call) if context.observer or self._listener else False
        columns = None if self._rows is None else self._rows.columns
        context.report._work.append(Work(index, ends, columns, plan.reusable, plan.real, context.request.past))

    def update(self, index: int, keys: Tensor, values: Tensor) -> KV:
        """Take K and V of the active rows, `[batch, kv_heads, rows, head_dim]`, and give back those of all tokens."""
        if index not in self._buffers.used:  # its columns are opened, and what is stored is written
            checks = () if self._is_narrowed else tuple(self._ratios)
            self._buffers.use(index, keys, values, self.stored_chunks, checks, self._written())
            if keys.device.type != "cpu":
                checks = () if index in self._ratios else checks
                self._buffers.prefetch([later for later in self._with_keys if later > index], checks, keys.device)
        states = self._buffers.open[index]
        if self._rows is None:
            states[0].copy_(keys)
            states[1].copy_(values)
        else:
            self._rows.write_states(states, (keys, values))
        if index == 0 and self._kind.compares_keys:
            self.check_stored(states)
        if self._awaited is not None and self._capture is None:
            self.reach("keys")
        layer = self.context.layers[index]
        return layer.keys, layer.values

    def _written(self) -> Tensor | None:
        """`[batch, tokens]`: the columns that will have K and V; None: all of them."""
        context = self.context
        computed = context.observer.computed if context.is_probe and context.observer is not None else None
        if self._rows is None or (computed is None and not context.plan.has_padding):
            return None
        return context.plan.real if computed is None else computed

    def update_indexer(self, index: int, keys: Tensor) -> Tensor:
        """Take an indexer's keys of the active rows, `[batch, rows, width]`, and give back those of all tokens."""
        all_keys: Tensor = self._kind.update_indexer(self, index, keys, self._rows)  # type: ignore[attr-defined]
        self.reach("indexer")
        return all_keys

    def end(self) -> None:
        """Remove every hook inside a layer, also after a failure, and settle the cache's layers."""
        plan = self.context.plan
        self.remove_hooks()
        self.context.realigner.close()
        if self._buffers.settles:
            self._buffers.settle(len(self._kinds))
        if self._listener is not None:
            self._listener.finish()
        if plan.replaced:
            self.context.report.computed_chunks += len(plan.replaced)
            self.context.report.loaded_chunks -= len(plan.replaced)
        plan.release()
        if plan.pipeline is not None:
            plan.pipeline.close()

    def remove_hooks(self) -> None:
        """Take the hooks out of the layer that runs and of its attention."""
        if self._kind.has_hooks:
            self._kind.leave()
        if self._capture is not None:
            self._capture.close()
            self._capture = None

    def stored_chunks(self) -> list[PlacedChunk]:
        """The chunks of which something stored is used, now: none where all rows are active."""
        if self._rows is None:
            return []
        return [placed for placed in self.context.plan.chunks if placed.exact or self._is_narrowed]

    def is_compared(self, index: int) -> bool:
        """Return True if what a layer keeps is compared with what is stored, or computed twice."""
        return index in self._ratios or index in (0, self._last)

    def reach(self, name: str) -> None:
        """Stop a look into a layer when the last of the states that it waits for has come."""
        if self._awaited is not None:
            self._awaited.discard(name)
            if not self._awaited:
                raise StopForward

    def check_stored(self, computed: Sequence[Tensor]) -> None:
        """Refuse chunks whose stored states at layer 0 are not what this model computes for these tokens here."""
        chunks = [placed for placed in self.context.plan.chunks if self._rows is None or not placed.exact]
        if self._is_narrowed or not chunks:
            return
        for placed, error in zip(chunks, self._stored.mismatches(0, chunks, *computed), strict=True):
            if error > MISMATCH_LIMIT:
                logger.warning(
                    "chunk %s is computed again: its stored K/V at layer 0 differ by %.2g from those of its tokens",
                    placed.chunk.key.digest[:12],
                    error,
                )
                self._drop(placed)

    def _begin(self, call: LayerCall) -> None:
        """Leave out the rows that need no computing, and select now if the selector needs no K and V."""
        context, plan, device = self.context, self.context.plan, call.hidden.device
        plan.real, plan.exact, plan.reusable = (mask.to(device) for mask in (plan.real, plan.exact, plan.reusable))
        context.realigner.prefetch(range(1), device)
        counts, nothing, selected = plan.stored_counts, [0] * len(plan.stored_counts), None
        if context.is_probe:
            counts = nothing
        elif self._first_ratio is not None:
            selected, counts = self._selection.select(0, Rows.every(plan.reusable), None, self._first_ratio)
        self._selected_counts, self._is_narrowed = counts, counts != plan.stored_counts
        total = [fresh + stored for fresh, stored in zip(plan.fresh_counts, counts, strict=True)]
        if min(total) == self.width:
            return
        fresh_mask = plan.fresh(with_reusable=counts == plan.stored_counts and any(counts))
        observer = context.observer
        if context.is_probe and observer is not None and observer.rows is not None:
            fresh_mask = plan.sampled(observer.rows)
            total = fresh_mask.sum(axis=1).tolist()
            computed = torch.from_numpy(fresh_mask | ~plan.fresh(with_reusable=False))
            observer.computed = computed.to(device) & plan.real
        is_known = min(total) == max(total) and counts in (plan.stored_counts, nothing)
        if is_known and not self._needs_same_columns:
            self._rows = Rows.at([np.flatnonzero(row).tolist() for row in fresh_mask], device)
        else:
            active = torch.from_numpy(fresh_mask).to(device)
            active = active if selected is None else active | selected
            self._rows = Rows.of(active, total, self._needs_same_columns)[0]

    def _drop(self, placed: PlacedChunk) -> None:
        self.context.plan.drop(placed)
        self.context.report.refused_chunks += 1

    def _keep_rows(self, index: int, call: LayerCall, rows: Rows, remaining: Tensor | None) -> None:
        """Let a layer run for some rows: those at `[batch, kept]` of its hidden states; None: all of these."""
        if remaining is not None:
            if self._row_axis is None:  # several streams of rows are before the batch in Gemma 3n, behind rows in HYV4
                batch, count, *more = call.hidden.shape
                self._row_axis = 1 if len(more) == 1 or (batch, count) == self.context.plan.real.shape else 2
            call.hidden = gather_rows(call.hidden, remaining, self._row_axis)
        taken = {self.width: rows.columns}
        if remaining is not None and self._rows is not None and self._rows is not rows:
            taken.setdefault(self._rows.columns.shape[1], remaining)  # what earlier layers made of the rows that ran
        self._arguments.cut(index, call, rows, self._model_mask, self._kind.attends, taken)
        self._rows = rows
        if self._counts_positions:
            columns = rows.columns[0]
            self.past = self.context.request.past + columns - torch.arange(len(columns), device=columns.device)
        if self._kind.has_hooks:
            self._kind.take_rows(self, call, rows)

    def _look(self, index: int, call: LayerCall) -> None:
        """Run a layer until what it keeps is known for the active rows."""
        context, kind, plan = self.context, self._kind, self.context.plan
        columns, layer = None if self._rows is None else self._rows.columns, context.layers[index]
        context.report._work.append(Work(index, True, columns, plan.reusable, plan.real, context.request.past))
        self._awaited, before = set(kind.parts), kind.snapshot(layer) if kind.has_hooks else None
        try:
            call.layer.forward(call.hidden, **call.arguments)  # past its hooks
        except StopForward:
            return
        finally:
            self._awaited = None
            if kind.has_hooks:
                kind.restore(layer, before)
        raise UnsupportedModelError(
            f"layer {index} of {type(self.context.model).__name__} ran to its end without handing K and V to the "
            "cache, but blending waits for them there. Use full prefill for this model."
        )

    def _select(self, index: int, call: LayerCall, ratio: float) -> None:
        """Let only the selected of the active rows go on, and those that are fresh in any case."""
        plan = self.context.plan
        rows = self._rows or Rows.every(plan.real)
        computed = self._buffers.open.get(index) or self._kind.computed()
        selected, counts = self._selection.select(index, rows, computed, ratio)
        counts = [min(pair) for pair in zip(counts, self._selected_counts, strict=True)]
        self._selected_counts, self._is_narrowed = counts, counts != plan.stored_counts
        total = [sum(pair) for pair in zip(plan.fresh_counts, counts, strict=True)]
        remaining = ~rows.take(plan.reusable) | selected
        if plan.has_padding:
            remaining = remaining & rows.take(plan.real)
        if self._rows is None or tuple(total) != self._rows.counts:
            self._keep_rows(index, call, *rows.keep(remaining, total, self._needs_same_columns))

    def _capture_attention(self, index: int, call: LayerCall) -> bool:
        """Take the attention of a layer where an observer asks for it; gives True if nothing runs behind it."""
        context, observer, ends = self.context, self.context.observer, False
        number = self._with_keys.index(index) if index in self._with_keys else None  # selectors count these
        if observer is not None and number is not None and observer.takes(number):
            columns = (self._rows or Rows.every(context.plan.real)).columns
            take = partial(observer.take, number)
            taken = attention_of(columns, self.width, context.report.charge, take)
            self._capture, ends = AttentionCapture(call.layer, taken), number == observer.last
        elif self._listener is not None:
            self._capture = self._listener.capture(index, call.layer, self._rows, context.request.past)
        if self._capture is not None:
            self._capture.open(call.cache)
        return ends
