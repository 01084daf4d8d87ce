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

A `LayerKind` says what a layer of the cache keeps of each token. A probe is a prefill of the question's rows alone.
"""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import UnsupportedModelError
from ..model.anatomy import LayerCall, LayerExtra, gather_rows, text_config
from ..model.attention import AttentionCapture, StopForward, layers_handing_on
from ..rotary.base import Table, rotary_table
from ..selectors.base import KV, Selector, TokenView
from .plan import PlacedChunk, Plan
from .realign import Realigner
from .report import BlendReport, Work
from .request import Request
from .rows import RowArguments, Rows, highest

logger = logging.getLogger(__name__)

MISMATCH_LIMIT = 0.2  # at layer 0, by the token alone: another token differs by about 1


class StoredStates(Protocol):
    """Writes stored K and V where a prompt has them, and compares them with what the model computes."""

    def write(self, index: int, chunks: Sequence[PlacedChunk], *opened: Tensor) -> None:
        """Write a layer of stored chunks into `[…, batch, kv_heads, tokens, head_dim]`, keys realigned."""

    def mismatches(self, layer: int, chunks: Sequence[PlacedChunk], *opened: Tensor) -> list[float]:
        """Give for each chunk how far what is stored is from what was computed, as a share of its size."""


class PartialLoader(StoredStates, Protocol):
    """Loads those parts of stored chunks that attention selects: it listens, loads and writes."""

    def capture(self, index: int, module: nn.Module, rows: Rows | None, past: int) -> AttentionCapture | None:
        """The capture of a layer's attention; None where it is not needed."""

    def begin(self, index: int, rows: Rows | None, plan: Plan) -> None:
        """Find out what of a layer can be loaded in part; no rows: all tokens are computed."""


class LayerKind:
    """A layer that hands K and V of each token to the cache, and what a prefill does beside.

    A cache layer names its kind as the class attribute `prefill_kind`. For layers that keep something else there are
    subclasses; the prefill itself knows these hooks only.
    """

    has_keys = True  # False: it keeps no K and V
    has_states = True  # False: it keeps nothing at all
    attends = True  # False: it has no attention
    compares_keys = True  # False: at layer 0 it checks what is stored by something else
    is_plain = True  # none of the methods has anything to do
    # what a partial run of the layer waits for, see `Prefill.stop_when_ready`
    parts: frozenset[str] = frozenset({"keys"})

    def enter(self, prefill: "Prefill", index: int, call: LayerCall, table: Table | None) -> Table | None:
        """Begin a layer with the arguments that the model gave it, and the rotary table among them.

        Returns that of the new tokens, `[batch or 1, tokens, width]` each; None where there is none.
        """
        return table

    def take_rows(self, prefill: "Prefill", call: LayerCall, rows: Rows) -> None:
        """The layer runs for these rows; `call` has their arguments."""

    def computed(self) -> KV | None:
        """What a layer without K and V keeps in their stead, of all new tokens, `[batch, 1, tokens, width]` each."""
        return None

    def snapshot(self, layer: Any) -> Any:
        """What a partial run of the layer would change beside K and V."""
        return None

    def restore(self, layer: Any, snapshot: Any) -> None:
        """Undo what a partial run has changed."""

    def pause(self) -> None:
        """Another forward of the model begins while this layer runs."""

    def resume(self) -> None:
        """The other forward is over."""

    def leave(self) -> None:
        """The layer is done, or the forward failed."""


class StatelessKind(LayerKind):
    """A layer that keeps nothing: it has no attention, or attends to the K and V of another layer."""

    has_keys = has_states = False
    parts = frozenset[str]()


class Prefill:
    """One forward of a model among stored chunks: made when it begins, gone when it ends.

    Attributes:
        model: the model that runs.
        layers: those of the cache, one for each decoder layer.
        request: what the forward brought.
        plan: which of its tokens have stored K and V.
        report: what it cost.
        realigner: writes stored K and V.
        selector: scores the tokens that may be recomputed.
        run_probe: see `TokenView.probe`.
        extras: by layer, what it keeps beside K and V.
        loader: loads chunks in part; None: they are written whole.
        width: how many new columns there are.
        past: tokens in the cache before the new ones. For layers that count positions themselves, to scale their
            queries by them, it is a tensor `[rows]`: added to `arange(rows)` it gives the positions of the rows.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[Any],
        request: Request,
        plan: Plan,
        report: BlendReport,
        realigner: Realigner,
        selector: Selector,
        run_probe: Callable[..., None],
        extras: Sequence[LayerExtra | None] = (),
        loader: PartialLoader | None = None,
    ) -> None:
        """Decide what each layer does."""
        self.model = model
        self.layers = layers
        self.request = request
        self.plan = plan
        self.report = report
        self.realigner = realigner
        self.selector = selector
        self.run_probe = run_probe
        self.extras = extras
        self.loader = loader
        self.width = request.width
        self.past: int | Tensor = request.past

        # What the layers keep
        self._kinds: list[LayerKind] = [getattr(layer, "prefill_kind", StatelessKind)() for layer in layers]
        self._with_keys = [index for index, kind in enumerate(self._kinds) if kind.has_keys]
        with_states = [index for index, kind in enumerate(self._kinds) if kind.has_states]
        self._last = with_states[-1] if with_states else -1

        # The columns of the new tokens
        self._opened: dict[int, KV] = {}
        self._opened_with: dict[int, int] = {}  # layer → the one at whose call it was opened
        self._used: set[int] = set()  # the layers that handed over K and V; others may be opened with them
        self._opens_several = len({*getattr(model, "hf_device_map", {}).values()}) < 2
        self._settles = not all(getattr(layer, "keeps_all", True) for layer in layers)  # some free or pack columns
        self._written: Tensor | None = None  # `[batch, tokens]`: columns that will have K and V; None: all

        # The rows that run, and the layer that they are in
        config = text_config(model)
        self._arguments = RowArguments(config, layers, request.past, self.width, layers_handing_on(model))
        self._counts_positions = bool(getattr(config, "attn_temperature_tuning", False))
        self._needs_same_columns = self._counts_positions and len(plan.counts) > 1  # counted for all entries
        self._embeddings: Any = None  # what the last layer was given, and its rotary table
        self._table: Table | None = None
        self._rows: Rows | None = None  # None: all tokens, as the model passes them
        self._row_axis: int | None = None  # of the hidden states, behind the axis of the batch
        self._kind = LayerKind()
        self._model_mask: Any = None  # of all tokens, as the layer was given it
        self._awaited: set[str] = set()  # what a partial run of the layer waits for; none: it runs to its end
        self._capture: AttentionCapture | None = None

        # Where tokens are selected: at the check layer, or the next one that has states to compare, or before layer 0
        # where that needs none
        settings = plan.config
        most = plan.real.numel()
        self._selects_first = not selector.needs_kv or not selector.count(settings.recompute_ratio, most)
        self._check_layer = -1  # -1: at no layer
        if not self._selects_first:
            self._check_layer = next((index for index in with_states if index >= settings.check_layer), -1)
        self._is_narrowed = False  # some reusable tokens are computed no more

    def enter(self, index: int, call: LayerCall) -> None:
        """Make a layer's arguments ready: only the active rows, with their lines of the mask."""
        plan = self.plan
        table = self._begin_layer(index, call)
        self.realigner.tables.setdefault(index, table)
        if index == 0:
            self._begin(call)
        if self._rows is not None:
            self._keep_rows(index, call, self._rows, self._rows.columns if index == 0 else None)

        # Select at a check layer
        if index == self._check_layer and any(plan.stored_counts):
            self._run_until_kv(index, call)
            self._narrow(index, call)
        if self.loader is not None and index > self._check_layer:
            computes_all = any(plan.stored_counts) and not self._is_narrowed
            self.loader.begin(index, None if computes_all else self._rows, plan)

        # Past the last K and V only what is asked for is computed
        if index == self._last and plan.chunks:
            rows = self._rows or Rows.every(plan.real)
            expected = self.width - plan.end
            if expected < rows.columns.shape[1]:
                self._run_until_kv(index, call)
                self._keep_rows(index, call, *rows.last(expected))
        if self.loader is not None:
            self._capture = self.loader.capture(index, call.layer, self._rows, self.request.past)
            if self._capture is not None:
                self._capture.open(call.cache)
        self._record_work(index, kv_only=False)

    def update(self, index: int, keys: Tensor, values: Tensor) -> KV:
        """Write K and V of the active rows, `[batch, kv_heads, rows, head_dim]`, and return those of all tokens.

        At its first call a layer's columns are opened, and what is stored is written.
        """
        if index not in self._used:
            self._used.add(index)
            self._open(index, keys, values)
        states = self._opened[index]
        if self._rows is None:
            states[0].copy_(keys)
            states[1].copy_(values)
        else:
            self._rows.write_states(states, (keys, values))
        if index == 0 and self._kind.compares_keys:
            self.check_stored(states)
        if self._awaited:
            self.stop_when_ready("keys")
        layer = self.layers[index]
        return layer.keys, layer.values

    def update_indexer(self, index: int, keys: Tensor) -> Tensor:
        """Write an indexer's keys of the rows, `[batch, rows, width]`, and return those of all tokens."""
        all_keys: Tensor = self._kind.update_indexer(self, index, keys, self._rows)  # type: ignore[attr-defined]
        self.stop_when_ready("indexer")
        return all_keys

    def end(self) -> None:
        """Remove every hook inside a layer, also after a failure, and settle the cache's layers."""
        plan = self.plan
        self._leave_layer()
        if self._settles:
            self._settle(len(self._kinds))
        if plan.replaced:
            self.report.computed_chunks += len(plan.replaced)
            self.report.loaded_chunks -= len(plan.replaced)
        if plan.pipeline is not None:
            plan.pipeline.close()

    def stored_chunks(self) -> list[PlacedChunk]:
        """The chunks of which something stored is used, now: none where all rows are active."""
        if self._rows is None:
            return []
        return [placed for placed in self.plan.chunks if placed.exact or self._is_narrowed]

    def is_compared(self, index: int) -> bool:
        """Return True if what a layer keeps is compared with what is stored, or computed twice."""
        return index in (0, self._check_layer, self._last)

    def check_stored(self, computed: Sequence[Tensor]) -> None:
        """Refuse chunks whose stored states at layer 0 are not what this model computes for these tokens here."""
        chunks = [placed for placed in self.plan.chunks if self._rows is None or not placed.exact]
        if self._is_narrowed or not chunks:
            return
        stored = self.loader or self.realigner
        for placed, error in zip(chunks, stored.mismatches(0, chunks, *computed), strict=True):
            if error > MISMATCH_LIMIT:
                logger.warning(
                    "chunk %s is computed again: its stored K/V at layer 0 differ by %.2g from those of its tokens",
                    placed.chunk.key.digest[:12],
                    error,
                )
                self.plan.drop(placed)
                self.report.refused_chunks += 1

    def stop_when_ready(self, name: str) -> None:
        """End a partial run of a layer when the last of the `parts` that it waits for has come."""
        if name in self._awaited:
            self._awaited.discard(name)
            if not self._awaited:
                raise StopForward

    def pause(self) -> None:
        """Another forward of the model begins, in the layer that this one is in."""
        self._kind.pause()

    def resume(self) -> None:
        """The other forward is over."""
        self._kind.resume()

    def _begin_layer(self, index: int, call: LayerCall) -> Table | None:
        """Leave the layer before, and read the arguments of this one; returns its rotary table of the new tokens."""
        if self._settles:
            self._settle(index)
        self._leave_layer()
        kind = self._kinds[index]
        self._kind = kind
        self._model_mask = call.arguments.get(call.mask_name)

        # Several layers are given the same table
        embeddings = call.arguments.get("position_embeddings")
        if embeddings is None or embeddings is not self._embeddings:
            self._table = rotary_table(call.arguments, call.layer)
            self._embeddings = embeddings
        if kind.is_plain:
            return self._table
        return kind.enter(self, index, call, self._table)

    def _leave_layer(self) -> None:
        """Remove the hooks from the layer that runs and from its attention."""
        if not self._kind.is_plain:
            self._kind.leave()
        if self._capture is not None:
            self._capture.close()
            self._capture = None

    def _begin(self, call: LayerCall) -> None:
        """Select now, if the selector needs no K and V, and leave out the rows that need no computing."""
        plan = self.plan
        device = call.hidden.device
        plan.move_to(device)
        if plan.has_padding:
            self._written = plan.real

        # Select
        counts = plan.stored_counts
        selected = None
        if self._selects_first:
            selected, counts = self._select(0, Rows.every(plan.reusable), None)
        self._is_narrowed = counts != plan.stored_counts

        # The rows that run: without exact K and V, and of the reusable ones those that are selected
        total = [fresh + stored for fresh, stored in zip(plan.fresh_counts, counts, strict=True)]
        if min(total) == self.width:
            return
        computes_all = not self._is_narrowed and any(counts)
        active = plan.fresh(with_reusable=computes_all)
        is_known = computes_all or not any(counts)
        if is_known and min(total) == max(total) and not self._needs_same_columns:
            self._rows = Rows.at([np.flatnonzero(row).tolist() for row in active], device)
            return
        marks = torch.from_numpy(active).to(device)
        if selected is not None:
            marks = marks | selected
        self._rows = Rows.of(marks, total, self._needs_same_columns)[0]

    def _narrow(self, index: int, call: LayerCall) -> None:
        """Continue with those of the active rows that are selected or have no stored KV."""
        plan = self.plan
        rows = self._rows or Rows.every(plan.real)
        computed = self._opened.get(index) or self._kind.computed()
        selected, counts = self._select(index, rows, computed)
        self._is_narrowed = counts != plan.stored_counts
        total = [sum(pair) for pair in zip(plan.fresh_counts, counts, strict=True)]
        remaining = ~rows.take(plan.reusable) | selected
        if plan.has_padding:
            remaining = remaining & rows.take(plan.real)
        if self._rows is None or tuple(total) != self._rows.counts:
            self._keep_rows(index, call, *rows.keep(remaining, total, self._needs_same_columns))

    def _select(self, index: int, rows: Rows, fresh: KV | None) -> tuple[Tensor, list[int]]:
        """Mark the tokens that are computed from a layer on, `[batch, rows]`; also returns how many of each entry."""
        began_s = time.perf_counter()
        plan = self.plan
        selector = self.selector
        ratio = plan.config.recompute_ratio
        counts = [selector.count(ratio, tokens) for tokens in plan.stored_counts]

        # What the selector sees of these rows
        table = plan.token_table()
        if not rows.is_all:
            table = table.gather(2, rows.columns.expand(3, *rows.columns.shape))
        chunk, offset, tokens = table
        if rows.filler is not None:
            chunk = chunk.masked_fill(rows.filler, -1)
        reusable = chunk >= 0
        optional: dict[str, Any] = {}
        if selector.needs_question:
            optional["probe"] = self.run_probe
        if fresh is not None:
            optional["pair"] = lambda which: rows.take_pair((fresh[which], self._stored(index, fresh, which)))
        optional["num_layers"] = len(self._with_keys)
        optional["weights"] = plan.token_weights
        view = TokenView(index, rows.columns, reusable, chunk, offset, tokens, **optional)

        # What it chooses
        selected = torch.zeros_like(reusable)
        if any(counts):
            scores = selector.score(view)
            selected = highest(scores.to(reusable.device), reusable, counts)
        self.report._chosen.append((rows.columns, selected, self.request.past))
        self.report.select_ms += 1e3 * (time.perf_counter() - began_s)
        return selected, counts

    def _stored(self, index: int, states: KV, which: int) -> Tensor:
        """A copy of K (0) or V (1), or projections, of all new tokens, overwritten by the realigned stored chunks."""
        chunks = [placed for placed in self.plan.chunks if not placed.exact]
        layout = self.plan.chunks[0].chunk.layout.layers[index]
        fresh = states[which]
        if len(layout) == 1:
            projections = fresh.clone()
            self.realigner.write_beside(index, chunks, projections)
            return projections
        heads, width, dtype = layout[which]
        form = (fresh.shape[0], heads, fresh.shape[2], width)
        filled = fresh.clone() if fresh.shape == form else fresh.new_zeros(form, dtype=dtype)
        self.realigner.write(index, chunks, filled, first=which)
        return filled

    def _run_until_kv(self, index: int, call: LayerCall) -> None:
        """Run a layer until what it keeps is known for the active rows."""
        kind = self._kind
        layer = self.layers[index]
        self._record_work(index, kv_only=True)
        self._awaited = set(kind.parts)
        before = None if kind.is_plain else kind.snapshot(layer)
        try:
            call.layer.forward(call.hidden, **call.arguments)  # not __call__: its hooks do not run again
        except StopForward:
            return
        finally:
            self._awaited = set()
            if not kind.is_plain:
                kind.restore(layer, before)
        raise UnsupportedModelError(
            f"layer {index} of {type(self.model).__name__} ran to its end without handing K and V to the cache, but "
            "blending waits for them there. Use full prefill for this model."
        )

    def _keep_rows(self, index: int, call: LayerCall, rows: Rows, remaining: Tensor | None) -> None:
        """Let a layer run for some rows: those at `[batch, kept]` of its hidden states; None: all of these."""
        taken = {self.width: rows.columns}
        if remaining is not None:
            if self._row_axis is None:  # several streams of rows are before the batch in Gemma 3n, behind rows in HYV4
                batch, count, *more = call.hidden.shape
                self._row_axis = 1 if len(more) == 1 or (batch, count) == self.plan.real.shape else 2
            call.hidden = gather_rows(call.hidden, remaining, self._row_axis)
            if self._rows is not None and self._rows is not rows:
                taken.setdefault(self._rows.columns.shape[1], remaining)  # what earlier layers made of these rows
        self._arguments.cut(index, call, rows, self._model_mask, self._kind.attends, taken)
        self._rows = rows
        if self._counts_positions:
            columns = rows.columns[0]
            self.past = self.request.past + columns - torch.arange(len(columns), device=columns.device)
        if not self._kind.is_plain:
            self._kind.take_rows(self, call, rows)

    def _open(self, index: int, keys: Tensor, values: Tensor) -> None:
        """Open a layer's columns for the new tokens, and write what is stored.

        Where stored chunks are in memory, layers that look alike are opened and written several at a time, up to the
        next check layer. One that turns out to be unlike the first of them, by its device, dtype or rotary table, is
        opened again, and from then on each alone.
        """
        if index in self._opened:
            states = self._opened[index][0]
            table = self.realigner.tables[index]
            first_table = self.realigner.tables[self._opened_with[index]]
            if table is not None and first_table is not None:
                table = table[0]
                first_table = first_table[0]
            if states.device == keys.device and states.dtype == keys.dtype and table is first_table:
                return
            self._opens_several = False
            self.layers[index].reset()

        # Open
        chunks = self.stored_chunks()
        group = range(index, index + 1)
        opened = None
        if self._opens_several and not keys.requires_grad:
            ends = (self._last,) if self._is_narrowed else (self._check_layer, self._last)
            group = self.realigner.group(index, chunks, ends, keys.device)
        if len(group) > 1:
            first, *others = (self.layers[layer] for layer in group)
            opened = first.open_with(others, self.width, keys, values)
        if opened is None:
            opened = self.layers[index].open(self.width, keys, values)
            self._opened[index] = opened
        else:
            for number, layer in enumerate(group):
                self._opened[layer] = opened[0][number], opened[1][number]
                self._opened_with[layer] = index

        # Write
        if self._written is not None and self._rows is not None:  # NaN would pass a mask
            for states in opened:
                states.masked_fill_(~self._written.to(states.device)[:, None, :, None], 0)
        if opened is not self._opened[index]:
            self.realigner.write(index, chunks, *opened)
        else:
            (self.loader or self.realigner).write(index, chunks, *opened)

    def _settle(self, index: int) -> None:
        """The layers before this one are done: free their columns beyond their windows."""
        for done in [layer for layer in self._opened if layer < index and not self.layers[layer].keeps_all]:
            del self._opened[done]
            self.layers[done].settle()

    def _record_work(self, index: int, kv_only: bool) -> None:
        """Write down what a layer computes, for the report."""
        plan = self.plan
        columns = None if self._rows is None else self._rows.columns
        self.report._work.append(Work(index, kv_only, columns, plan.reusable, plan.real, self.request.past))
