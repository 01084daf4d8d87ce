# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A forward whose layers run for some rows, among K and V that are stored: what a prefill and a probe share."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..model.anatomy import LayerCall, gather_rows, text_config
from ..model.attention import AttentionCapture, StopForward, layers_handing_on
from ..rotary.tables import Table, rotary_table
from ..selectors.base import KV
from .arguments import RowArguments
from .buffers import LayerBuffers
from .context import PrefillContext, StoredStates
from .layer_kind import LayerKind, StatelessKind
from .plan import PlacedChunk
from .rows import Rows


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
