# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""One forward of the model in which most tokens have stored KV and are not computed.

    layer 0 … check-1   every token that has no exact KV is computed
    check layer         its K and V are computed for all of these and compared with the stored ones; tokens are
                        selected; attention and MLP run for the selected and the question only
    deeper layers       only those are computed, against their own fresh K/V and the stored K/V of all others
    last layer          past its K/V only the rows whose output is expected

What each layer does is known before the first. So that attention and MLP are computed for the selected rows only, the
check layer is run until its K and V reach the cache, and left there by a private exception; then it is run again for
these rows. The layer's code is the model's, unchanged.
"""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import UnsupportedModelError
from ..model.anatomy import LayerCall
from ..model.attention import StopForward
from ..selectors.base import KV
from .context import AttentionListener, PrefillContext
from .importance import ImportanceListener
from .layer_pass import LayerPass
from .observing import AttentionObserver
from .plan import PlacedChunk
from .probe import ProbePass
from .report import Work
from .rows import Rows
from .selection import TokenSelection

logger = logging.getLogger(__name__)

MISMATCH_LIMIT = 0.2  # at layer 0, by the token alone: another token differs by about 1, int4 of a real model by 0.13


class Prefill(LayerPass):
    """The state of one forward; made when it begins, gone when it ends."""

    def __init__(self, context: PrefillContext) -> None:
        """Decide what each layer does."""
        super().__init__(context, context.layers, context.loader or context.realigner)
        plan = context.plan
        self._selection = TokenSelection(context, self._with_keys)
        # by what tokens are selected before layer 0 (None: all are computed there), and at which check layers
        self._first_ratio, self._ratios = self._selection.schedule(self._with_states)
        self._last_check = max(self._ratios, default=-1)
        self._loader = context.loader
        ratio = self._ratios.get(self._last_check, self._first_ratio or 0.0)
        self._loads_nothing = context.selector.count(ratio, plan.real.numel()) == plan.real.numel()
        self._listener: AttentionListener | None = self._loader
        if self._loader is None and plan.store is not None and plan.store.reads_importance:
            self._listener = ImportanceListener(context, self._last_check)
        self._selected_counts = plan.stored_counts  # of the reusable tokens, those that are computed
        self._is_narrowed = False  # some reusable tokens are computed no more

    def begin_probe(self, observer: AttentionObserver, layers: Sequence[Any]) -> ProbePass:
        """A pass of the question, which writes to `layers`; this forward continues behind it."""
        self._kind.pause()  # its layer may be the one that this forward is in
        return ProbePass(self.context, layers, observer)

    def end_probe(self, probe: ProbePass) -> None:
        """Continue where the probe began."""
        probe.end()
        self._kind.resume()

    def enter(self, index: int, call: LayerCall) -> None:
        """Make a layer's arguments ready: only the active rows, with their lines of the mask."""
        context, plan = self.context, self.context.plan
        table = self.begin_layer(index, call)
        context.realigner.tables.setdefault(index, table)
        if index == 0:
            self._begin(call)
        if self._rows is not None:
            self._keep_rows(index, call, self._rows, self._rows.columns if index == 0 else None)

        # Select at a check layer
        if index in self._ratios and any(plan.stored_counts):
            self._run_until_kv(index, call)
            self._select(index, call, self._ratios[index])
        if self._loader is not None and index > self._last_check:
            self._loader.begin(index, None if self._loads_nothing else self._rows, plan)

        # Past the last K and V only what is asked for is computed
        if index == self._last and plan.chunks:
            rows = self._rows or Rows.every(plan.real)
            expected = self.width - plan.end
            if expected < rows.columns.shape[1]:
                self._run_until_kv(index, call)
                self._keep_rows(index, call, *rows.last(expected))
        if self._listener is not None:
            self._capture = self._listener.capture(index, call.layer, self._rows, context.request.past)
            if self._capture is not None:
                self._capture.open(call.cache)
        past = context.request.past
        context.report._work.append(Work(index, False, self.columns, plan.reusable, plan.real, past))

    def update(self, index: int, keys: Tensor, values: Tensor) -> KV:
        """Write K and V of the active rows, `[batch, kv_heads, rows, head_dim]`, and return those of all tokens."""
        checks = () if self._is_narrowed else tuple(self._ratios)
        written = self.context.plan.real if self._rows is not None and self.context.plan.has_padding else None
        states = self.write_layer(index, keys, values, checks, written)
        if index == 0 and self._kind.compares_keys:
            self.check_stored(states)
        if self._capture is None:
            self.stop_when_ready("keys")
        layer = self._layers[index]
        return layer.keys, layer.values

    def end(self) -> None:
        """Remove every hook inside a layer, also after a failure, and settle the cache's layers."""
        plan = self.context.plan
        self.remove_hooks()
        if self._buffers.settles:
            self._buffers.settle(len(self._kinds))
        if self._listener is not None:
            self._listener.finish()
        if plan.replaced:
            self.context.report.computed_chunks += len(plan.replaced)
            self.context.report.loaded_chunks -= len(plan.replaced)
        if plan.pipeline is not None:
            plan.pipeline.close()

    def stored_chunks(self) -> list[PlacedChunk]:
        """The chunks of which something stored is used, now: none where all rows are active."""
        if self._rows is None:
            return []
        return [placed for placed in self.context.plan.chunks if placed.exact or self._is_narrowed]

    def is_compared(self, index: int) -> bool:
        """Return True if what a layer keeps is compared with what is stored, or computed twice."""
        return index in self._ratios or index in (0, self._last)

    def check_stored(self, computed: Sequence[Tensor]) -> None:
        """Refuse chunks whose stored states at layer 0 are not what this model computes for these tokens here."""
        chunks = [placed for placed in self.context.plan.chunks if self._rows is None or not placed.exact]
        if self._is_narrowed or not chunks:
            return
        stored = self._loader or self.context.realigner
        for placed, error in zip(chunks, stored.mismatches(0, chunks, *computed), strict=True):
            if error > MISMATCH_LIMIT:
                logger.warning(
                    "chunk %s is computed again: its stored K/V at layer 0 differ by %.2g from those of its tokens",
                    placed.chunk.key.digest[:12],
                    error,
                )
                self._drop(placed)

    def _begin(self, call: LayerCall) -> None:
        """Leave out the rows that need no computing, and select now if the selector needs no K and V."""
        plan = self.context.plan
        device = call.hidden.device
        plan.move_to(device)
        counts, selected = plan.stored_counts, None
        if self._first_ratio is not None:
            selected, counts = self._selection.select(0, Rows.every(plan.reusable), None, self._first_ratio)
        self._narrow(counts)
        total = [fresh + stored for fresh, stored in zip(plan.fresh_counts, counts, strict=True)]
        if min(total) == self.width:
            return
        computes_all = counts == plan.stored_counts and any(counts)
        fresh = plan.fresh(with_reusable=computes_all)
        is_known = min(total) == max(total) and (computes_all or not any(counts))
        if is_known and not self._needs_same_columns:
            self._rows = Rows.at([np.flatnonzero(row).tolist() for row in fresh], device)
            return
        active = torch.from_numpy(fresh).to(device)
        if selected is not None:
            active = active | selected
        self._rows = Rows.of(active, total, self._needs_same_columns)[0]

    def _narrow(self, counts: list[int]) -> None:
        """So many reusable tokens of each batch entry are computed from now on."""
        self._selected_counts = counts
        self._is_narrowed = counts != self.context.plan.stored_counts

    def _drop(self, placed: PlacedChunk) -> None:
        self.context.plan.drop(placed)
        self.context.report.refused_chunks += 1

    def _run_until_kv(self, index: int, call: LayerCall) -> None:
        """Run a layer until what it keeps is known for the active rows."""
        context = self.context
        kind = self._kind
        plan = context.plan
        layer = self._layers[index]
        past = context.request.past
        context.report._work.append(Work(index, True, self.columns, plan.reusable, plan.real, past))
        self._awaited = set(kind.parts)
        before = kind.snapshot(layer) if kind.has_hooks else None
        try:
            call.layer.forward(call.hidden, **call.arguments)  # not __call__: its hooks do not run again
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
        """Continue with those of the active rows that are selected or have no stored KV."""
        plan = self.context.plan
        rows = self._rows or Rows.every(plan.real)
        computed = self._buffers.open.get(index) or self._kind.computed()
        selected, counts = self._selection.select(index, rows, computed, ratio)
        counts = [min(pair) for pair in zip(counts, self._selected_counts, strict=True)]
        self._narrow(counts)
        total = [sum(pair) for pair in zip(plan.fresh_counts, counts, strict=True)]
        remaining = ~rows.take(plan.reusable) | selected
        if plan.has_padding:
            remaining = remaining & rows.take(plan.real)
        if self._rows is None or tuple(total) != self._rows.counts:
            self._keep_rows(index, call, *rows.keep(remaining, total, self._needs_same_columns))
