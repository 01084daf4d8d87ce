# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Time to the first token with every chunk on disk: loading alone, computing alone, one after the other, side by side.

Each way takes its turn in every round. Cold: the kernel is told to forget the files before each. A tier may be slowed
down to a rate; what the controller expects stands beside what was measured.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from throttled import ThrottledTier
from torch import nn

from benches.store import forget as forget_entries
from hf_blend import ChunkStore, plugins
from hf_blend.config import BlendConfig
from hf_blend.evaluation.answering import blend_config
from hf_blend.evaluation.bench.shapes import text_config, timed_model
from hf_blend.evaluation.bench.ttft import TtftPlan, machine, made_up, run
from hf_blend.loading.controller import advise
from hf_blend.loading.profile import bytes_per_second, profile_of

GB = 1e9
WAYS = ("load", "compute", "sequential", "pipelined")


@dataclass(frozen=True)
class DiskPlan(TtftPlan):
    """What is measured: the rates in GB/s, 0 for the disk's own; whether files are forgotten before each run."""

    rates: tuple[float, ...] = (0.5, 1.0, 4.0, 0.0)
    cold: int = 1


def measure_ttft_disk(plan: DiskPlan, progress: Callable[[str], None] | None = None) -> dict[str, Any]:
    """Measure every way at every rate."""
    given = plan
    model = timed_model(given.shape, given.dtype, given.device, given.seed)
    pieces = made_up(model, given)
    lengths = (given.chunks * given.chunk_tokens // 2, given.chunks * given.chunk_tokens)
    with TemporaryDirectory() as folder:
        config = BlendConfig(selector=given.selector)
        profile = profile_of(model, config, lengths=lengths, folder=Path(folder) / "profiles")
        rows = []
        for rate in plan.rates:
            if progress:
                progress(f"{rate or 'unthrottled'} GB/s")
            rows.append(_row(model, pieces, plan, rate, Path(folder), profile))
    return {"machine": {**machine(given), "cold": bool(plan.cold)}, "rows": rows}


def _row(
    model: nn.Module, pieces: dict[str, Any], plan: DiskPlan, rate: float, folder: Path, profile: Any
) -> dict[str, Any]:
    given = plan
    ratio = plan.ratios[0]
    config = blend_config(plan.selector, recompute_ratio=ratio)
    disk = plugins.load("store.tiers", "disk")(folder / "store", durable=False)
    tier = ThrottledTier(disk, rate * GB) if rate else disk
    memory = ChunkStore.open("memory://", memory_bytes=64 << 30)
    whole = ChunkStore(None, [tier])
    streaming = ChunkStore(None, [tier])
    for store in (memory, streaming):
        keys = store.add(model, None, pieces["chunks"], chunk_prefix_ids=(1,))
    whole.stream = whole.get  # type: ignore[method-assign]
    run(model, streaming, pieces, given, config)  # the prefix is stored too
    forget = (lambda: forget_entries(folder / "store")) if plan.cold else (lambda: None)
    forget()
    bytes_s = bytes_per_second(streaming, model, given.chunk_tokens)
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(given.rounds + 1):
        for way in WAYS[:: 1 if number % 2 else -1]:
            forget()
            store = {"compute": memory, "sequential": whole}.get(way, streaming)
            if way == "load":
                started = time.perf_counter()
                for key in keys:
                    streaming.get(key)
                seconds = time.perf_counter() - started
            else:
                seconds = run(model, store, pieces, given, config)["ttft_ms"] / 1e3
            times[way] += [seconds] if number else []
    found = {way: 1e3 * statistics.median(some) for way, some in times.items()}
    layers = text_config(model).num_hidden_layers
    lengths = [given.chunk_tokens] * given.chunks
    advice = advise(profile, lengths, [bytes_s] * given.chunks, least_ratio=ratio, num_layers=layers)
    advised = [_advised(model, streaming, pieces, given, advice.ratio, forget) for _ in range(given.rounds)]
    return {
        "rate_gb_s": rate or None,
        "ratio": ratio,
        **{f"{way}_ms": value for way, value in found.items()},
        **_paired(times),
        "tier_bytes_s": bytes_s,
        "advised_ratio": advice.ratio,
        "advised_chunks": advice.loaded_chunks,
        "predicted_ms": advice.predicted_ms,
        "advised_ms": statistics.median(advised),
        "predicted_vs_measured": advice.predicted_ms / statistics.median(advised),
    }


def _paired(times: dict[str, list[float]]) -> dict[str, float]:
    """Side by side over the longer of both, and over their sum: medians of each round's own ratio."""
    rounds = list(zip(times["pipelined"], times["load"], times["compute"], strict=True))
    return {
        "vs_max": statistics.median(both / max(load, compute) for both, load, compute in rounds),
        "vs_sum": statistics.median(both / (load + compute) for both, load, compute in rounds),
    }


def _advised(
    model: nn.Module, store: ChunkStore, pieces: dict[str, Any], given: TtftPlan, ratio: float, forget: Any
) -> float:
    forget()
    found: float = run(model, store, pieces, given, blend_config(given.selector, recompute_ratio=ratio))["ttft_ms"]
    return found
