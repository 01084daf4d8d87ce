# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The new tokens' columns in the layers of a cache: opened, filled with what is stored, and settled.

Where stored chunks are in memory, layers that look alike are opened and written several at a time. One that turns out
to be unlike its neighbours, by its device, dtype or rotary table, is written again, and from then on each alone.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ..selectors.base import KV
from .context import PrefillContext, StoredStates
from .plan import PlacedChunk


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
