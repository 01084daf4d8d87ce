# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A chunk whose layers come one by one: each is verified when it is read, and waited for when it is used.

A layer that is damaged, missing or late is no reason to begin the request again. What is stored is what the chunk
alone computes, so the chunk is computed alone once more, and its layers take the place of those that have not come
yet; the layers that were used already are the same.
"""

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, overload

from torch import Tensor

from ..threads import new_lock
from .chunk import ChunkKV
from .tiers.base import EntryFault

KV = tuple[Tensor, ...]
POLL_S = 0.05
FAULTS = (EntryFault, OSError, MemoryError)


class StreamedLayers(Sequence[KV]):
    """The states of each layer, `[kv_heads, tokens, head_dim]` each, as `ChunkKV.layers`."""

    def __init__(
        self,
        count: int,
        read: Callable[[int], Sequence[KV]],
        recompute: Callable[[BaseException], ChunkKV],
        complete: Callable[[tuple[KV, ...]], None],
        patience_s: float,
        budget_s: float = math.inf,
    ) -> None:
        self._read, self._recompute, self._complete, self._patience_s = read, recompute, complete, patience_s
        self._budget_s = budget_s
        self._layers: list[KV | None] = [None] * count
        self._fault: BaseException | None = None
        self._instead: ChunkKV | None = None
        self._changed, self._reading = threading.Condition(new_lock()), new_lock()
        self.drivers: list[Any] = []  # pipelines that read ahead; told how far use has come

    def __len__(self) -> int:
        return len(self._layers)

    @overload
    def __getitem__(self, index: int) -> KV: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[KV]: ...
    def __getitem__(self, index: int | slice) -> KV | Sequence[KV]:
        """Wait for a layer, or for several."""
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        for driver in self.drivers:
            driver.synchronize(index)
        found = self._layers[index]
        return self._awaited(index) if found is None else found

    def peek(self, index: int) -> KV | None:
        """Wait for a layer that another thread reads; None if nobody does, or it was not read in time."""
        with self._changed:
            until_s = time.monotonic() + min(self._patience_s, self._budget_s)
            while self._layers[index] is None and self._is_coming and time.monotonic() < until_s:
                self._changed.wait(POLL_S)  # a driver that ends says nothing
            return self._layers[index]

    @property
    def _is_coming(self) -> bool:
        is_sound = self._fault is None and self._instead is None
        return is_sound and any(driver.is_running for driver in self.drivers)

    def fetch_kv(self, index: int, wait_s: float = -1) -> None:
        """Read a layer, unless it is there; a fault is kept for whoever needs the layer."""
        if not self._reading.acquire(timeout=wait_s):
            return
        try:
            if self._layers[index] is None and self._fault is None and self._instead is None:
                self._take(index)
        finally:
            self._reading.release()

    def _take(self, index: int) -> None:
        layers: Sequence[KV] = ()
        try:
            layers, fault = self._read(index), None
        except FAULTS as error:
            fault = error
        with self._changed:
            self._layers[index : index + len(layers)], self._fault = layers, fault
            self._changed.notify_all()
        arrived = [layer for layer in self._layers if layer is not None]
        if len(arrived) == len(self._layers):
            self._complete(tuple(arrived))

    def _awaited(self, index: int) -> KV:
        patience_s, reason = min((self._patience_s, "late"), (max(0.0, self._budget_s), "slow"))
        if not any(driver.is_running for driver in self.drivers):
            self._fetch_here(index)
        began_s = time.monotonic()
        with self._changed:
            while self._layers[index] is None and self._fault is None and self._instead is None:
                left_s = began_s + patience_s - time.monotonic()
                if left_s <= 0 or not self._changed.wait(left_s):
                    detail = f"layer {index} did not come in {patience_s:.3g} s"
                    self._fault = EntryFault(reason, detail, corrupt=False)
            self._budget_s -= time.monotonic() - began_s
            layer = self._layers[index]
            if layer is not None:
                return layer
            if self._instead is None and self._fault is not None:
                self._instead = self._recompute(self._fault)
            if self._instead is None:
                raise EntryFault("late", f"layer {index} is not there", corrupt=False)
            self._layers[index] = self._instead.layers[index]
            return self._instead.layers[index]

    def _fetch_here(self, index: int) -> None:
        """Read a layer where nobody reads ahead: in a thread that can be left if there is a budget."""
        if math.isinf(self._budget_s):
            self.fetch_kv(index, self._patience_s)
        else:
            threading.Thread(target=self.fetch_kv, args=(index,), name="hf_blend-load", daemon=True).start()
