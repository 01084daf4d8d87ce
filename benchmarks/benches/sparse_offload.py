# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Sparse decoding with the blocks that are not selected away from the device, beside the ways to decode without it.

Each way has a cache of its own with the same random K and V; then tokens are decoded one at a time, and the ways take
turns. K and V are random, so which blocks are best changes with every step more than in text: more is loaded here.
"""

import gc
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import nn

from benches.decode import fill, kv_bytes, step
from hf_blend import BlendCache, ChunkStore, sparse_decoding
from hf_blend.evaluation.bench.shapes import timed_model, wait_for

DENSE = "dense"


@dataclass(frozen=True)
class SparseOffloadPlan:
    """What is measured."""

    shape: str = "thin"
    contexts: tuple[int, ...] = (2048, 8192, 32768)
    shares: tuple[float, ...] = (0.25,)
    places: tuple[str, ...] = ("device", "disk")
    method: str = "gsa"
    tokens: int = 32
    rounds: int = 5
    dtype: str = "float32"
    seed: int = 0
    device: str = "cpu"
    folder: str | None = None


@torch.no_grad()
def measure_sparse_offload(plan: SparseOffloadPlan, progress: Callable[[str], None] | None = None) -> dict[str, Any]:
    """Decode in each way at each context."""
    model = timed_model(plan.shape, plan.dtype, plan.device, plan.seed)
    rows = []
    for context in plan.contexts:
        if progress:
            progress(f"{context} tokens of context")
        with tempfile.TemporaryDirectory(dir=plan.folder) as folder:
            rows += _rows(model, context, plan, folder)
    return {"threads": torch.get_num_threads(), "torch": torch.__version__, **vars(plan), "rows": rows}


class _Way:
    """One place and one share, with a cache of its own."""

    def __init__(
        self, model: Any, place: str, share: float | None, lock: bool, plan: SparseOffloadPlan, folder: str
    ) -> None:
        self.place, self.share, self.lock, self._model, self._plan = place, share, lock, model, plan
        placed: dict[str, Any] = {} if place == "device" else {"kv_device_map": place, "offload_folder": folder}
        self.cache: Any = BlendCache(model, ChunkStore.open("memory://"), **placed)
        self.seconds: list[float] = []
        self.device_bytes = self.live_bytes = 0
        self.metrics: dict[str, int] = {}

    def decoding(self) -> AbstractContextManager[Any]:
        if self.share is None:
            return nullcontext()
        given: dict[str, Any] = {"share": self.share, "lock": self.lock, "method": self._plan.method}
        return sparse_decoding(self._model, self.cache, min_tokens=0, **given)

    @property
    def name(self) -> str:
        return DENSE if self.share is None else f"{self.share} {'locked' if self.lock else 'unlocked'}"

    def fill(self, context: int) -> None:
        fill(self._model, [self.cache], context, self._plan.seed)

    def turn(self, context: int, before: int | None = None) -> None:
        """Decode, from the first selection on; the cache is as before."""
        memory = self.cache.kv_memory
        with self.decoding() as session:
            started = time.perf_counter()
            for place in range(context, context + self._plan.tokens):
                step(self._model, self.cache, place)
                if before is not None and place == context:
                    self._forget_peak()
            wait_for(self._model)
            self.seconds.append(time.perf_counter() - started)
            if before is not None:
                held = sum(layer.nbytes for layer in self.cache.layers)
                self.device_bytes = held if memory is None else memory.peak_resident_bytes
                self.live_bytes = live_bytes() - before
            self.metrics = vars(session.metrics) if session else {}
        self.cache.crop(-self._plan.tokens)

    def _forget_peak(self) -> None:
        """What was on the device while the cache was filled does not count."""
        if self.cache.kv_memory is not None:
            self.cache.kv_memory.peak_resident_bytes = self.cache.kv_memory.resident_bytes


def live_bytes() -> int:
    """Bytes of all tensors that are alive, found by the garbage collector: a second count, of memory of any kind."""
    gc.collect()
    found = {}
    for one in gc.get_objects():
        if type(one) is torch.Tensor and one.layout == torch.strided and one.device.type != "meta":
            storage = one.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def _rows(model: nn.Module, context: int, plan: SparseOffloadPlan, folder: str) -> list[dict[str, Any]]:
    ways = []
    for place in plan.places:
        for share, lock in ((None, True), *product(plan.shares, (True, False))):
            before = live_bytes()
            way = _Way(model, place, share, lock, plan, folder)
            way.fill(context)
            way.turn(context, before)  # warms up, too
            way.seconds.clear()
            ways.append(way)
    for _ in range(plan.rounds):
        for way in ways:
            way.turn(context)
    rates = {(way.place, way.name): plan.tokens / statistics.median(way.seconds) for way in ways}
    every = kv_bytes(model, context)
    return [
        {
            "context": context,
            "place": way.place,
            "way": way.name,
            "share": way.share or 1.0,
            "tokens_s": rates[way.place, way.name],
            "vs_dense_there": rates[way.place, way.name] / rates[way.place, DENSE],
            "vs_dense_on_device": rates[way.place, way.name] / rates[plan.places[0], DENSE],
            "device_share": way.device_bytes / every,
            "live_share": way.live_bytes / every,
            "kv_bytes": every,
            **way.metrics,
        }
        for way in ways
    ]
