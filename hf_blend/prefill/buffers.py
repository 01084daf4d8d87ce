# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The new tokens' columns in the layers of a cache: opened, filled with what is stored, and settled.

Where stored chunks are in memory, layers that look alike are opened and written several at a time. One that turns out
to be unlike its neighbours, by its device, dtype or rotary table, is written again, and from then on each alone.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..selectors.base import KV
from .plan import PlacedChunk

if TYPE_CHECKING:
    from .blend import PrefillContext


class LayerBuffers:
    """What is open of the layers of one forward."""

    def __init__(self, context: "PrefillContext", last: int) -> None:
        self._layers, self._plan, self._realigner = context.layers, context.plan, context.realigner
        self._tokens, self._last, self._is_shared = context.plan.real.shape[1], last, context.shares_layers
        self.open: dict[int, KV] = {}
        self.used: set[int] = set()  # the layers that handed over K and V; others may be opened with them
        self._first: dict[int, int] = {}  # layer → the first of those that were written with it
        self._settled = 0  # the layers before this one are done
        devices = {*getattr(context.model, "hf_device_map", {}).values()}
        self._opens_several = len(devices) < 2 and context.plan.partial is None

    def use(
        self, index: int, keys: Tensor, values: Tensor, chunks: list[PlacedChunk], checks: Sequence[int], blank: bool
    ) -> list[PlacedChunk]:
        """Open a layer's columns and write what is stored of chunks, unless it was done with an earlier layer.

        Layers up to the next one of `checks` may be written with it. Gives the chunks that are left to the caller.

        Shapes: keys `[batch, kv_heads, rows, head_dim]`.
        """
        self.used.add(index)
        if index in self.open:
            is_ready = self._realigner.has_same_table(index, self._first[index])
            ahead = self.open[index][0]
            if ahead.device != keys.device or ahead.dtype != keys.dtype:
                is_ready = False
                del self.open[index]
                self._layers[index].reset()
            self._opens_several = self._opens_several and is_ready
            if is_ready:
                return []
            if index in self.open:  # written as another layer's table says
                return chunks
        if self._opens_several and not keys.requires_grad:
            group = self._realigner.group(index, chunks, self._until(index, checks), keys.device)
            first, *others = (self._layers[one] for one in group)
            states = first.open_with(others, self._tokens, keys, values)
            if states is not None:
                self._blank(states, blank)
                self._realigner.write(index, chunks, *states)
                for number, one in enumerate(group):
                    self.open[one] = (states[0][number], states[1][number])
                    self._first[one] = index
                return []
        self.open[index] = self._layers[index].open(self._tokens, keys, values)
        self._first[index] = index
        self._blank(self.open[index], blank)
        return chunks

    def _until(self, index: int, checks: Sequence[int]) -> int:
        """The last layer that may be written with one: behind a check layer more is stored."""
        return min((one for one in checks if one >= index), default=self._last)

    def prefetch(self, following: Sequence[int], checks: Sequence[int], device: torch.device) -> None:
        """Bring what is stored of the next layers to the device, while the ones that are open compute."""
        first = next((one for one in following if one not in self.open), None)
        if first is None or self._plan.partial is not None:
            return
        group = range(first, first + 1)
        if first not in checks and self._opens_several:
            group = self._realigner.group(first, self._plan.chunks, self._until(first, checks), device)
        self._realigner.prefetch(group, device)

    def settle(self, index: int) -> None:
        """The layers before this one are done: what they hold beyond their windows is given back."""
        if self._is_shared:
            return
        for done in range(self._settled, index):
            if self.open.pop(done, None) is not None:
                self._layers[done].settle()
        self._settled = max(self._settled, index)

    def take_over(self, other: "LayerBuffers") -> None:
        """Keep what another forward has opened of the same layers."""
        if other._is_shared:
            self.open.update(other.open)
            self._first.update(other._first)

    def _blank(self, states: Any, blank: bool) -> None:
        """Zeros on padding: NaN would pass a mask."""
        if blank:
            for one in states:
                one.masked_fill_(self._plan.padding_on(one.device)[:, None, :, None], 0)
