# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Whether the device that `hf-blend store plan` chooses is the best one when all of them are measured.

Devices are throttled tiers on this machine, and memory where chunks are held. Each cell is a model shape, a ratio and
devices with rates and prices. The plan measures how fast each device gives back a chunk, as the command does; then
requests are measured from every device, in turns. The best device is the one that the rule of the plan gives for what
was measured: the cheapest among those whose requests take no longer than from memory, within a tolerance; without one,
the one that costs least in all. A device whose requests take about as long as the tolerance allows is the best one in
some rounds and not in others: how often the chosen device is the best when rounds are drawn again says what a miss is.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import torch
from throttled import ThrottledTier
from torch import nn

from hf_blend import BlendCache, ChunkStore, plugins
from hf_blend.evaluation.bench.shapes import random_model
from hf_blend.loading.estimator import (
    DELAY_SHARE,
    HOUR_S,
    MONTH_S,
    Placement,
    StorageDevice,
    Workload,
    choose,
    place,
)
from hf_blend.loading.profile import Profile, bytes_per_second, profile_of, reading_s
from hf_blend.model.anatomy import decoder_layers

QUESTION_TOKENS = 32
STORED_CHUNKS, REQUESTS_PER_DAY = 100_000, 10_000.0
RESAMPLES, REFUTED = 1000, 0.05

Devices = tuple[tuple[str, float, float], ...]  # name, MB/s, price of 10^9 bytes for a month
Seconds = Mapping[str | None, float]  # of a request, by device; under None from chunks held in memory

MEMORY = ("memory", 0.0, 2.0)  # held: nothing is read
ALL: Devices = (MEMORY, ("nvme", 2000.0, 0.3), ("ssd", 200.0, 0.08), ("hdd", 5.0, 0.02))
FAR: Devices = (MEMORY, ("network", 12.0, 0.05), ("archive", 3.0, 0.004))
SLOW: Devices = FAR[1:]


@dataclass(frozen=True)
class Cell:
    """One question to the plan."""

    shape: str
    ratio: float
    devices: Devices = ALL
    gpu_hour: float = 0.0


CELLS = (
    Cell("wide-kv", 0.05),
    Cell("wide-kv", 0.15),
    Cell("wide-kv", 0.5),
    Cell("wide-kv", 0.15, FAR),
    Cell("wide-kv", 0.15, SLOW, gpu_hour=3.0),
    Cell("thin", 0.05),
    Cell("thin", 0.15),
    Cell("thin", 0.5),
    Cell("thin", 0.15, FAR),
    Cell("thin", 0.15, SLOW, gpu_hour=3.0),
)


@dataclass(frozen=True)
class StorePlanPlan:
    """What is measured."""

    cells: tuple[Cell, ...] = CELLS
    chunks: int = 4
    chunk_tokens: int = 256
    rounds: int = 5
    seed: int = 0


@torch.no_grad()
def measure_store_plan(plan: StorePlanPlan, progress: Callable[[str], None] | None = None) -> dict[str, Any]:
    """Plan and measure every cell."""
    rows, models = [], {}
    lengths = (plan.chunks * plan.chunk_tokens // 2, plan.chunks * plan.chunk_tokens)
    for number, cell in enumerate(plan.cells):
        if progress:
            progress(f"{number + 1} of {len(plan.cells)}: {cell.shape}, {cell.ratio}")
        if cell.shape not in models:
            models[cell.shape] = random_model(cell.shape, torch.float32, "cpu", plan.seed)
        with TemporaryDirectory() as folder:  # no profile is known there: it is one of this minute, as a user's
            profile = profile_of(models[cell.shape], lengths=lengths, folder=Path(folder))
        rows.append(_row(models[cell.shape], profile, cell, plan))
    return {
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "chunks": plan.chunks,
        "chunk_tokens": plan.chunk_tokens,
        "rounds": plan.rounds,
        "delay_share": DELAY_SHARE,
        "right": sum(row["chosen"] == row["best"] for row in rows),
        "resamples": RESAMPLES,
        "refuted": sum(row["chosen_share"] < REFUTED for row in rows),
        "rows": rows,
    }


def _row(model: nn.Module, profile: Profile, cell: Cell, plan: StorePlanPlan) -> dict[str, Any]:
    work = Workload(STORED_CHUNKS, plan.chunk_tokens, plan.chunks, REQUESTS_PER_DAY)
    full, blend = (profile.prefill_s(work.request_tokens, ratio) for ratio in (1.0, cell.ratio))
    rates = {name: bytes_per_second(_store(rate), model, plan.chunk_tokens) for name, rate, _ in cell.devices}
    read = reading_s(model, plan.chunks, plan.chunk_tokens, cell.ratio)
    times = _times(model, cell, plan)
    seconds = _medians(times)
    planned = [
        place(
            StorageDevice(name, rates[name], price),
            work,
            profile.bytes_per_token,
            full,
            least_ratio=cell.ratio,
            gpu_hour=cell.gpu_hour,
            blend_s=blend,
            num_layers=len(decoder_layers(model)),
            read_s=read if rate else 0.0,
        )
        for name, rate, price in cell.devices
    ]
    chosen, drawn = choose(planned).device, Random(plan.seed)
    again = [{name: drawn.choices(some, k=len(some)) for name, some in times.items()} for _ in range(RESAMPLES)]
    return {
        "shape": cell.shape,
        "ratio": cell.ratio,
        "gpu_hour": cell.gpu_hour,
        "chosen": chosen,
        "best": _best(planned, seconds, cell.gpu_hour),
        "chosen_share": sum(_best(planned, _medians(one), cell.gpu_hour) == chosen for one in again) / RESAMPLES,
        "in_memory_s": seconds[None],
        "blend_s": blend,
        "read_s": read,
        "devices": [
            {
                **asdict(one),
                "measured_s": seconds[one.device],
                "throttled_mb_s": rate or None,
                "mb_s": rates[one.device] / 1e6,
                "gb_month": price,
            }
            for one, (_, rate, price) in zip(planned, cell.devices, strict=True)
        ],
    }


def _best(planned: Sequence[Placement], seconds: Seconds, gpu_hour: float) -> str:
    """What the rule of the plan chooses among devices whose requests took so long."""
    return choose([_with(one, seconds[one.device], seconds[None], gpu_hour) for one in planned]).device


def _medians(times: Mapping[str | None, Sequence[float]]) -> Seconds:
    return {name: statistics.median(some) for name, some in times.items()}


def _with(one: Placement, seconds: float, in_memory: float, gpu_hour: float) -> Placement:
    """What was measured in the place of what was estimated."""
    gpu = REQUESTS_PER_DAY * MONTH_S / 86400 * seconds / HOUR_S * gpu_hour
    return Placement(
        **{
            **asdict(one),
            "is_hidden": seconds <= (1 + DELAY_SHARE) * in_memory,
            "request_s": seconds,
            "gpu_month": gpu,
        }
    )


def _times(model: nn.Module, cell: Cell, plan: StorePlanPlan) -> Mapping[str | None, list[float]]:
    """Seconds of requests from each device; under None from chunks held in memory."""
    draw = Random(plan.seed)
    size = model.get_input_embeddings().num_embeddings
    pieces = [[draw.randrange(3, int(size)) for _ in range(plan.chunk_tokens)] for _ in range(plan.chunks)]
    stores: dict[str | None, ChunkStore] = {None: ChunkStore.open("memory://")}
    for name, rate, _ in cell.devices:
        stores[name] = _store(rate)
    times: dict[str | None, list[float]] = {name: [] for name in stores}
    for store in stores.values():
        store.add(model, None, pieces)
    for number in range(plan.rounds + 1):
        for device in draw.sample(list(stores), len(stores)):  # what follows a slow device would always be the same
            seconds = _request(model, stores[device], pieces, cell.ratio)
            times[device] += [seconds] if number else []
    times[None] += times.get(MEMORY[0], [])  # the same again: chunks are held
    return times


def _store(mb_s: float) -> ChunkStore:
    """A device of that rate; 0: memory, where chunks are held ready to use."""
    if not mb_s:
        return ChunkStore.open("memory://")
    return ChunkStore([], [ThrottledTier(plugins.load("store.tiers", "memory")(), 1e6 * mb_s)])


def _request(model: Any, store: ChunkStore, pieces: list[list[int]], ratio: float) -> float:
    cache = BlendCache(model, store, recompute_ratio=ratio)
    inputs = cache.inputs(None, chunks=pieces, question=list(range(5, 5 + QUESTION_TOKENS)))
    started = time.perf_counter()
    model.generate(**inputs, past_key_values=cache, do_sample=False, max_new_tokens=1)
    return time.perf_counter() - started
