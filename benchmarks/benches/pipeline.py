# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The pipeline and the loading controller where loading and computing are sleeps, which a busy machine does not slow.

Layers sleep for each row that they compute, and two tiers sleep for each byte that is read; half of the chunks are on
the near one, which is faster. Each cell sets how long loading all chunks takes beside computing at the least ratio.

    pipelined       against the longer of loading alone and computing alone
    fixed plans     so many chunks loaded from each tier, the others computed, at one ratio
    the controller  measures model and tiers itself; its plan against the best fixed one
"""

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from throttled import ThrottledTier
from torch import Tensor, nn

from hf_blend import BlendCache, BlendConfig, ChunkStore, observer, plugins
from hf_blend.evaluation.bench.shapes import random_model
from hf_blend.evaluation.bench.ttft import TtftPlan, made_up
from hf_blend.loading.controller import LoadingController
from hf_blend.loading.profile import Profile, profile_of, tier_rates
from hf_blend.model.anatomy import decoder_layers
from hf_blend.prefill.report import Advice
from hf_blend.store.chunk import ChunkKey
from hf_blend.store.tiers.base import Tier

MemoryTier = plugins.load("store.tiers", "memory")
SINK = (1,)
SLACK_S = 0.05  # a device reads ahead for so long: a reader that waits for a core of a busy machine loses nothing


@dataclass(frozen=True)
class PipelinePlan:
    """What is measured."""

    shape: str = "narrow-48-layers"
    cells: tuple[float, ...] = (0.1, 0.5, 1.0, 2.0, 5.0)
    chunks: int = 4
    chunk_tokens: int = 128
    question_tokens: int = 16
    row_ms: float = 2.4
    plan_row_ms: float = 0.4
    near: float = 4.0
    ratios: tuple[float, ...] = (0.15, 0.5)
    rounds: int = 5
    plan_rounds: int = 4


def measure_pipeline(plan: PipelinePlan, progress: Callable[[str], None] | None = None) -> dict[str, Any]:
    """Measure every cell."""
    say = progress or (lambda text: None)
    bench = _Bench(plan)
    rows: list[dict[str, Any]] = []
    plans: list[dict[str, Any]] = []
    with TemporaryDirectory() as folder, bench.sleeping(plan.plan_row_ms):
        say("profile of the model")
        total = plan.chunks * plan.chunk_tokens
        profile = profile_of(bench.model, BlendConfig(), lengths=(total // 2, total), folder=Path(folder))
        for cell in plan.cells:
            say(f"load / compute = {cell:g}: plans")
            row, fixed = bench.plans(cell, profile)
            rows.append({"load_to_compute": cell, **row})
            plans += [{"load_to_compute": cell, **one} for one in fixed]
    with bench.sleeping(plan.row_ms):
        for row in rows:
            say(f"load / compute = {row['load_to_compute']:g}: pipeline")
            row |= bench.pipelined(row["load_to_compute"])
    settings = {"threads": torch.get_num_threads(), "layers": bench.layers, **vars(plan)}
    return {**settings, "rows": rows, "plans": plans}


class _FixedPlan:
    """In the controller's place: the same plan for each request."""

    def __init__(self, loaded: Sequence[int], ratio: float) -> None:
        self._advice = Advice(ratio, len(loaded), 0.0, 0.0, 0.0, loaded=tuple(loaded))

    def decide(self, keys: Sequence[ChunkKey], least_ratio: float) -> Advice:
        """As `LoadingController.decide`."""
        return self._advice


class _FullTier(MemoryTier):  # type: ignore[misc, valid-type]
    """A tier that keeps what it has, once `is_full`: what is read from the far one does not move to the near one."""

    is_full = False

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def put_if_absent(self, name: str, parts: Sequence[memoryview]) -> bool:
        return not self.is_full and super().put_if_absent(name, parts)


class _Link:
    """What both tiers are read through, one read after the other."""

    def __init__(self) -> None:
        self._free_at, self._lock = 0.0, threading.Lock()

    def wait(self, seconds: float, begun: float) -> None:
        """Wait until a read is done."""
        with self._lock:
            self._free_at = max(self._free_at, begun - SLACK_S) + seconds
            ahead = self._free_at - time.perf_counter()
        if ahead > 0:
            time.sleep(ahead)


class _SleepingTier(ThrottledTier):
    """A tier whose reads wait for a link that it shares."""

    def __init__(self, tier: Tier, bytes_s: float, link: _Link) -> None:
        super().__init__(tier, bytes_s)
        self._link = link

    def wait(self, nbytes: int, begun: float) -> None:
        self._link.wait(nbytes / self._bytes_s, begun)


class _Bench:
    """A model whose layers sleep, and its chunks on two tiers."""

    def __init__(self, plan: PipelinePlan) -> None:
        self._plan = plan
        self._row_s = 0.0
        self._owed_s = 0.0
        self.model: Any = random_model(plan.shape, torch.float32, "cpu")
        self.layers = len(decoder_layers(self.model))
        for layer in decoder_layers(self.model):
            layer.mlp.register_forward_pre_hook(observer(self._sleep))
        given = TtftPlan(plan.shape, plan.chunks, plan.chunk_tokens, plan.question_tokens)
        self._pieces = made_up(self.model, given)
        self._near, self._far = _FullTier("near"), _FullTier("far")
        half = plan.chunks // 2
        self._keys: list[ChunkKey] = []
        for tier, chunks in ((self._near, self._pieces["chunks"][:half]), (self._far, self._pieces["chunks"][half:])):
            store = ChunkStore(None, [tier])
            store.add(self.model, None, [list(SINK)], chunk_prefix_ids=())
            self._keys += store.add(self.model, None, chunks, chunk_prefix_ids=SINK)
            tier.is_full = True
        self._memory = ChunkStore.open("memory://")
        self._memory.add(self.model, None, [list(SINK)], chunk_prefix_ids=())
        self._memory.add(self.model, None, self._pieces["chunks"], chunk_prefix_ids=SINK)
        self._request(self._memory)

    @contextmanager
    def sleeping(self, row_ms: float) -> Any:
        """Inside, layers sleep."""
        self._row_s = row_ms / 1e3
        try:
            yield
        finally:
            self._row_s = 0.0

    def pipelined(self, load_to_compute: float) -> dict[str, Any]:
        """One cell: loading alone, computing alone, and both."""
        store = self._store(self._rates(load_to_compute))
        ways: dict[Any, Callable[[], float]] = {
            "load": partial(self._load, store),
            "compute": partial(self._request, self._memory),
            "pipelined": partial(self._request, store),
        }
        found = _in_turns(ways, self._plan.rounds)
        fastest = {way: 1e3 * min(times) for way, times in found.items()}
        longer = [max(pair) for pair in zip(found["load"], found["compute"], strict=True)]
        by_round = [both / most for both, most in zip(found["pipelined"], longer, strict=True)]
        return {
            **{f"{way}_ms": value for way, value in fastest.items()},
            "vs_max": fastest["pipelined"] / max(fastest["load"], fastest["compute"]),
            "median_vs_max": statistics.median(by_round),
            "worst_vs_max": max(by_round),
        }

    def plans(self, load_to_compute: float, profile: Profile) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """One cell: what the controller does of its own accord, and every fixed plan."""
        plan = self._plan
        half = self._plan.chunks // 2
        rates = self._rates(load_to_compute)
        self._near.is_full = self._far.is_full = False  # a chunk is put, read and removed
        measured = tier_rates(self._store(rates), self.model, plan.chunk_tokens)
        self._near.is_full = self._far.is_full = True
        controller = LoadingController(self.model, self._store(rates), profile=profile, rates=measured)
        ways: dict[Any, Callable[[], float]] = {"controller": partial(self._controlled, rates, controller)}
        for near, far, ratio in product((0, half // 2, half), (0, half // 2, half), plan.ratios):
            if ratio == plan.ratios[0] or (half in (near, far) and half // 2 not in (near, far)):
                loaded = [*range(near), *range(half, half + far)]
                ways[near, far, ratio] = partial(self._controlled, rates, _FixedPlan(loaded, ratio))
        rounds = _in_turns(ways, plan.plan_rounds)
        times = {way: 1e3 * min(some) for way, some in rounds.items()}
        controlled_ms = times.pop("controller")
        advice = controller.last
        best = min(times, key=lambda one: times[one])
        fixed = [
            {"near_chunks": near, "far_chunks": far, "ratio": ratio, "ttft_ms": value}
            for (near, far, ratio), value in times.items()
        ]
        advised = () if advice is None else advice.loaded
        return {
            "best_near_chunks": best[0],
            "best_far_chunks": best[1],
            "best_ratio": best[2],
            "best_ms": times[best],
            "advised_near_chunks": sum(place < half for place in advised),
            "advised_far_chunks": sum(place >= half for place in advised),
            "advised_ratio": None if advice is None else advice.ratio,
            "predicted_ms": None if advice is None else advice.predicted_ms,
            "controller_ms": controlled_ms,
            "vs_best": controlled_ms / times[best],
            "median_vs_best": statistics.median(rounds["controller"]) / min(map(statistics.median, rounds.values())),
        }, fixed

    def _controlled(self, rates: dict[str, float], controller: Any) -> float:
        store = self._store(rates)
        store.controller = controller
        return self._request(store)

    def _rates(self, load_to_compute: float) -> dict[str, float]:
        """Bytes a second of each tier, with which loading all chunks takes so many times what computing takes."""
        load_s = load_to_compute * statistics.median(self._request(self._memory) for _ in range(3))
        sizes = {tier: sum(one.stat.nbytes for one in tier.objects.values()) for tier in (self._near, self._far)}
        far = (sizes[self._near] / self._plan.near + sizes[self._far]) / load_s
        return {"near": far * self._plan.near, "far": far}

    def _store(self, rates: dict[str, float]) -> ChunkStore:
        link = _Link()
        return ChunkStore(None, [_SleepingTier(tier, rates[tier.name], link) for tier in (self._near, self._far)])

    def _load(self, store: ChunkStore) -> float:
        started = time.perf_counter()
        for key in self._keys:
            store.get(key)
        return time.perf_counter() - started

    @torch.no_grad()
    def _request(self, store: ChunkStore) -> float:
        """Seconds to the first token."""
        cache = BlendCache(self.model, store, recompute_ratio=self._plan.ratios[0])
        inputs = cache.inputs(None, **self._pieces)
        started = time.perf_counter()
        self.model.generate(**inputs, past_key_values=cache, do_sample=False, max_new_tokens=1)
        return time.perf_counter() - started

    def _sleep(self, module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        """Sleep for the rows of a layer; what a sleep lasted too long is taken off the next."""
        if self._row_s:
            self._owed_s += self._row_s * arguments[0].shape[-2]
            began = time.perf_counter()
            time.sleep(max(0.0, self._owed_s))
            self._owed_s -= time.perf_counter() - began


def _in_turns(ways: dict[Any, Callable[[], float]], rounds: int) -> dict[Any, list[float]]:
    """Seconds of each way in each round, forwards and backwards by turns."""
    times: dict[Any, list[float]] = {way: [] for way in ways}
    for number in range(rounds):
        for way in list(ways)[:: 1 if number % 2 else -1]:
            times[way].append(ways[way]())
    return times
