# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A stack of tiers that can also open a chunk and hand out its layers as they come."""

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakValueDictionary, finalize

from torch import Tensor

from ..loading.stream import StreamedLayers
from .bounded import BoundedTier
from .chunk import ChunkKey, ChunkKV, Layout
from .entry import EntryReader
from .guard import Guard
from .patience import ComputeTimes
from .stack import TierStack
from .tiers.base import EntryFault, Source

__all__ = ["StreamingStack"]

Recompute = Callable[[], ChunkKV]
READ_BYTES = 1 << 20  # layers that are smaller come several at a time: each read stops the thread that computes


class StreamingStack(TierStack):
    """`stream` beside `get`: the header is checked at once, every layer when it is read; held when all are there.

    Args:
        *given: as for `TierStack`.
        **settings: as for `TierStack`.

    Attributes:
        compute_times: what is known of how long chunks take to compute.
    """

    patience_s = 10.0

    def __init__(self, *given: Any, **settings: Any) -> None:
        super().__init__(*given, **settings)
        self.compute_times = ComputeTimes()
        self._flying: WeakValueDictionary[str, ChunkKV] = WeakValueDictionary()  # being read; two requests share it

    def stream(
        self, key: ChunkKey, recompute: Recompute, budget_s: float = math.inf, layout: Layout | None = None
    ) -> ChunkKV | None:
        """Fetch a chunk whose layers may come later.

        Args:
            key: which chunk.
            recompute: computes the chunk, if a layer turns out to be damaged or does not come in time.
            budget_s: how long a tier on another machine is waited for, for all layers together, in seconds.
            layout: of the model that will use it, as in `ChunkStore.get`.

        Returns:
            The chunk; its `layers` wait for what is not there yet. None for a miss.
        """
        flying = self._flying.get(key.digest)
        if flying is not None and flying.key == key and layout in (None, flying.layout):
            return flying
        take = partial(self._streamed, recompute=recompute, stop_s=time.monotonic() + budget_s, layout=layout)
        chunk = self._fetch(key, take, budget_s, layout)
        if chunk is not None and isinstance(chunk.layers, StreamedLayers):
            self._flying[key.digest] = chunk
        return chunk

    def _streamed(
        self,
        tier: BoundedTier,
        key: ChunkKey,
        source: Source,
        opened: contextlib.ExitStack,
        *,
        recompute: Recompute,
        stop_s: float,
        layout: Layout | None,
    ) -> ChunkKV:
        deleted = self._deleted
        reader = EntryReader(source, key, self._secret, layout)
        tables, count = reader.tables(), len(reader.header.layer_table)
        guards = [Guard(part for pair in tables for part in pair)]  # of what is used before all of it is held
        opened = opened.pop_all()

        def read(place: int) -> Sequence[tuple[Tensor, ...]]:
            with self._tally.timed("load_seconds", tier.name):
                found = reader.layers(place, READ_BYTES)
            guards.append(Guard(one for states in found for one in states))
            return found

        def complete(layers: tuple[tuple[Tensor, ...], ...]) -> None:
            opened.close()
            if all(guard.is_intact() for guard in guards):
                self._keep(reader.chunk(layers, tables), tier, source, deleted)

        def instead(fault: BaseException) -> ChunkKV:
            self._warn(key, tier, fault)
            self.miss(fault.reason if isinstance(fault, EntryFault) else type(fault).__name__)
            self._drop(tier, key, source, fault)
            with self.compute_times.timed(key):
                return self.put(recompute())

        left_s = math.inf if tier.is_local else max(0.0, stop_s - time.monotonic())
        layers = StreamedLayers(count, read, instead, complete, self.patience_s, left_s)
        finalize(layers, opened.close).atexit = False  # also after a fault, or where a request ended early
        return reader.chunk(layers, tables)
