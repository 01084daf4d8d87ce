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

`PrefillContext` is what all of it works on. A `LayerPass` runs layers for some rows: the `Prefill` itself, and a probe
before it. Its `LayerBuffers` are the columns that it writes to, and a `LayerKind` says what a layer keeps.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import UnsupportedModelError
from ..model.anatomy import LayerCall, LayerExtra, gather_rows, text_config
from ..model.attention import AttentionCapture, StopForward, layers_handing_on
from ..rotary.base import Table, rotary_table
from ..selectors.base import KV, Selector
from .plan import PlacedChunk, Plan
from .realign import Realigner
from .report import BlendReport, Work
from .request import Request
from .rows import RowArguments, Rows, TokenSelection


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

    def finish(self) -> None:
        """Tell the store, at the end of the forward."""

    def begin(self, index: int, rows: Rows | None, plan: Plan) -> None:
        """Find out what of a layer can be loaded in part; no rows: all tokens are computed."""


@dataclass(frozen=True)
class PrefillContext:
    """All that one prefill works on: known before it begins, and shared with its probe."""

    model: nn.Module
    layers: Sequence[Any]
    request: Request
    plan: Plan
    report: BlendReport
    realigner: Realigner
    selector: Selector
    probe: Callable[..., None]  # see `TokenView.probe`
    extras: Sequence[LayerExtra | None] = ()
    loader: PartialLoader | None = None  # None: chunks are written whole


class RunningPrefill(Protocol):
    """What a layer may ask of the prefill that runs."""

    @property
    def context(self) -> PrefillContext:
        """All that the prefill works on."""

    @property
    def width(self) -> int:
        """How many new columns there are."""

    def layer_of(self, index: int) -> Any:
        """The layer of the cache to which a layer of the model writes."""

    def stored_chunks(self) -> list[PlacedChunk]:
        """The chunks of which something stored is used, now."""

    def is_compared(self, index: int) -> bool:
        """Whether what a layer keeps is compared with what is stored, or computed twice."""

    def check_stored(self, computed: Sequence[Tensor]) -> None:
        """Refuse chunks whose stored states at layer 0 are not what this model computes for these tokens here."""

    def stop_when_ready(self, name: str) -> None:
        """End a partial run of a layer when the last of the `parts` that it waits for has come."""


class LayerKind:
    """A layer that hands K and V of each token to the cache."""

    has_hooks = False  # whether a prefill calls the methods: a kind that overrides one has hooks
    has_keys = True  # False: it keeps no K and V
    has_states = True  # False: it keeps nothing at all
    attends = True  # False: it has no attention
    compares_keys = True  # False: at layer 0 it checks what is stored by something else
    # what a partial run of the layer waits for, see `RunningPrefill.stop_when_ready`
    parts: frozenset[str] = frozenset({"keys"})

    def __init_subclass__(cls) -> None:
        """Find out whether a prefill has anything to call."""
        methods = (name for name, member in vars(cls).items() if callable(member))
        cls.has_hooks = cls.has_hooks or not vars(LayerKind).keys().isdisjoint(methods)

    def enter(self, prefill: RunningPrefill, index: int, call: LayerCall, table: Table | None) -> Table | None:
        """Begin a layer with the arguments that the model gave it, and the rotary table among them.

        Returns that of the new tokens, `[batch or 1, tokens, width]` each; None where there is none.
        """
        return table

    def take_rows(self, prefill: RunningPrefill, call: LayerCall, rows: Rows) -> None:
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


class LayerBuffers:
    """The columns of one forward's new tokens, by layer."""

    def __init__(self, context: PrefillContext, layers: Sequence[Any], last: int, stored: StoredStates) -> None:
        self._stored = stored
        self._layers = layers
        self._realigner = context.realigner
        self._width = context.request.width
        self._last = last
        self.settles = not all(getattr(layer, "keeps_all", True) for layer in layers)  # some free or pack columns
        self.open: dict[int, KV] = {}
        self.used: set[int] = set()  # the layers that handed over K and V; others may be opened with them
        self._first: dict[int, int] = {}  # layer → the first of those that were written with it
        devices = {*getattr(context.model, "hf_device_map", {}).values()}
        self._opens_several = len(devices) < 2

    def use(
        self,
        index: int,
        keys: Tensor,
        values: Tensor,
        stored: Callable[[], list[PlacedChunk]],
        checks: Sequence[int],
        written: Tensor | None,
    ) -> None:
        """Open a layer's columns and write what is stored, unless an earlier layer's call has done so.

        Layers up to the next of `checks` may be written with it; columns that are not in `written` are set to 0.

        Shapes: keys `[batch, kv_heads, rows, head_dim]`, written `[batch, tokens]`.
        """
        self.used.add(index)
        if index in self.open:
            table = self._realigner.tables[index]
            first_table = self._realigner.tables[self._first[index]]
            is_ready = table is first_table
            if table is not None and first_table is not None:
                is_ready = table[0] is first_table[0]
            ahead = self.open[index][0]
            if ahead.device != keys.device or ahead.dtype != keys.dtype:
                is_ready = False
                del self.open[index]
                self._layers[index].reset()
            self._opens_several = self._opens_several and is_ready
            if is_ready:
                return
        chunks = stored()
        if index not in self.open:  # else it was written with a rotary table of another layer
            group = range(index, index + 1)
            several = None
            if self._opens_several and not keys.requires_grad:
                group = self._realigner.group(index, chunks, (*checks, self._last), keys.device)
                first, *others = (self._layers[layer] for layer in group)
                several = first.open_with(others, self._width, keys, values)
            if several is None:
                group = range(index, index + 1)
                self.open[index] = self._layers[index].open(self._width, keys, values)
            else:
                for number, layer in enumerate(group):
                    self.open[layer] = several[0][number], several[1][number]
            for layer in group:
                self._first[layer] = index
            if written is not None:  # NaN would pass a mask
                for states in several or self.open[index]:
                    states.masked_fill_(~written.to(states.device)[:, None, :, None], 0)
            if several is not None and len(group) > 1:
                self._realigner.write(index, chunks, *several)
                return
        self._stored.write(index, chunks, *self.open[index])

    def settle(self, index: int) -> None:
        """The layers before this one are done: free their columns beyond their windows."""
        for done in [layer for layer in self.open if layer < index and not self._layers[layer].keeps_all]:
            del self.open[done]
            self._layers[done].settle()


class LayerPass:
    """One forward over layers of a cache.

    Attributes:
        context: what it works on.
        width: new columns.
        past: tokens in the cache before the new ones. For layers that count positions themselves, to scale their
            queries by them, it is a tensor `[rows]`: added to `arange(rows)` it gives the positions of the rows.
    """

    def __init__(self, context: PrefillContext, layers: Sequence[Any], stored: StoredStates) -> None:
        """Prepare to write to `layers` of a cache, with what `stored` writes among it."""
        self.context = context
        self.width = context.request.width
        self.past: int | Tensor = context.request.past
        self._layers = layers
        self._kinds: list[LayerKind] = [getattr(layer, "prefill_kind", StatelessKind)() for layer in layers]
        self._with_keys = [index for index, kind in enumerate(self._kinds) if kind.has_keys]
        self._with_states = [index for index, kind in enumerate(self._kinds) if kind.has_states]
        self._last = self._with_states[-1] if self._with_states else -1
        config = text_config(context.model)
        self._buffers = LayerBuffers(context, layers, self._last, stored)
        self._arguments = RowArguments(
            config, layers, context.request.past, self.width, layers_handing_on(context.model)
        )
        self._counts_positions = bool(getattr(config, "attn_temperature_tuning", False))
        self._needs_same_columns = self._counts_positions and len(context.plan.counts) > 1  # counted for all entries
        self._tables: list[tuple[Any, Table | None]] = []  # of what several layers are given
        self._rows: Rows | None = None  # None: all tokens, as the model passes them
        self._row_axis: int | None = None  # of the hidden states, behind the axis of the batch
        self._kind = LayerKind()  # of the layer that runs
        self._model_mask: Any = None  # of all tokens, as that layer was given it
        self._awaited: set[str] | None = None  # what a partial run of the layer waits for; None: it runs to its end
        self._capture: AttentionCapture | None = None  # of the layer that runs

    @property
    def columns(self) -> Tensor | None:
        """`[batch, rows]`: the columns that run; None: all."""
        return None if self._rows is None else self._rows.columns

    def begin_layer(self, index: int, call: LayerCall) -> Table | None:
        """Record the arguments of a layer; returns its rotary table of the new tokens."""
        if self._buffers.settles:
            self._buffers.settle(index)
        self.remove_hooks()
        self._kind = self._kinds[index]
        self._model_mask = call.arguments.get(call.mask_name)
        table = self._rotary_table(call)
        return self._kind.enter(self, index, call, table) if self._kind.has_hooks else table

    def _rotary_table(self, call: LayerCall) -> Table | None:
        """The table that a layer was given; several are given the same one."""
        embeddings = call.arguments.get("position_embeddings")
        if embeddings is None:
            return rotary_table(call.arguments, call.layer)
        for known, table in self._tables:
            if known is embeddings:
                return table
        table = rotary_table(call.arguments, call.layer)
        self._tables.append((embeddings, table))
        return table

    def write_layer(
        self, index: int, keys: Tensor, values: Tensor, checks: Sequence[int], written: Tensor | None
    ) -> KV:
        """Write K and V of the rows, `[batch, kv_heads, rows, head_dim]`, among what is stored; gives those columns.

        At its first call a layer's columns are opened, and what is stored is written; columns that are not in
        `written`, `[batch, tokens]`, are set to 0.
        """
        if index not in self._buffers.used:
            self._buffers.use(index, keys, values, self.stored_chunks, checks, written)
        states = self._buffers.open[index]
        if self._rows is None:
            states[0].copy_(keys)
            states[1].copy_(values)
        else:
            self._rows.write_states(states, (keys, values))
        return states

    def update_indexer(self, index: int, keys: Tensor) -> Tensor:
        """Write an indexer's keys of the rows, `[batch, rows, width]`, and return those of all tokens."""
        all_keys: Tensor = self._kind.update_indexer(self, index, keys, self._rows)  # type: ignore[attr-defined]
        self.stop_when_ready("indexer")
        return all_keys

    def remove_hooks(self) -> None:
        """Remove the hooks from the layer that runs and from its attention."""
        if self._kind.has_hooks:
            self._kind.leave()
        if self._capture is not None:
            self._capture.close()
            self._capture = None

    def stored_chunks(self) -> list[PlacedChunk]:
        """The chunks of which something stored is used, now."""
        return self.context.plan.chunks

    def is_compared(self, index: int) -> bool:
        """Whether what a layer keeps is compared with what is stored, or computed twice."""
        return False

    def check_stored(self, computed: Sequence[Tensor]) -> None:
        """Refuse chunks whose stored states at layer 0 are not what this model computes for these tokens here."""

    def layer_of(self, index: int) -> Any:
        """The layer of the cache to which a layer of the model writes."""
        return self._layers[index]

    def stop_when_ready(self, name: str) -> None:
        """End a partial run of a layer when the last of the `parts` that it waits for has come."""
        if self._awaited is not None:
            self._awaited.discard(name)
            if not self._awaited:
                raise StopForward

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
        self._selected_counts = plan.stored_counts  # of the reusable tokens, those that are computed
        self._is_narrowed = False  # some reusable tokens are computed no more

    def pause(self) -> None:
        """Another forward of the model begins, in the layer that this one is in."""
        self._kind.pause()

    def resume(self) -> None:
        """The other forward is over."""
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
        if self._loader is not None:
            self._capture = self._loader.capture(index, call.layer, self._rows, context.request.past)
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
        if self._loader is not None:
            self._loader.finish()
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
