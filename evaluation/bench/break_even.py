# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""From which length of the prompt on blending is faster than a full prefill, every chunk in memory."""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import nn

from hf_blend import BlendCache, ChunkStore
from hf_blend.config import BlendConfig

from ..answering import blend_config, ids_of
from .shapes import first_token, full_inputs, random_pieces, timed_model
from .ttft import TtftPlan, machine

CHUNKS = 4
FULL = "full"


@dataclass(frozen=True)
class BreakEvenPlan:
    """What is measured."""

    shape: str = "smollm2-135m"
    tokens: tuple[int, ...] = (64, 128, 256, 512)
    question_tokens: int = 16
    methods: tuple[str, ...] = (f"{BlendConfig.selector}@{BlendConfig.recompute_ratio:g}", "boundary@0.05")
    rounds: int = 7
    dtype: str = "float32"
    seed: int = 0
    device: str = "cpu"


def measure_break_even(plan: BreakEvenPlan, progress: Callable[[str], None] | None = None) -> dict[str, Any]:
    """Measure full prefill and each method at each length, in turn."""
    model = timed_model(plan.shape, plan.dtype, plan.device, plan.seed)
    rows: list[dict[str, Any]] = []
    for tokens in plan.tokens:
        if progress:
            progress(f"{tokens} tokens")
        rows += _rows(model, plan, tokens)
    said = TtftPlan(plan.shape, rounds=plan.rounds, dtype=plan.dtype, device=plan.device)
    told = machine(replace(said, selector=", ".join(plan.methods)))
    found = {method: _break_even([row for row in rows if row["method"] == method]) for method in plan.methods}
    return {"machine": told, "plan": asdict(plan), "rows": rows, "break_even_tokens": found}


def _rows(model: nn.Module, plan: BreakEvenPlan, tokens: int) -> list[dict[str, Any]]:
    pieces = random_pieces(model, CHUNKS, tokens // CHUNKS, plan.question_tokens, plan.seed)
    store = ChunkStore.open("memory://")
    spent: dict[str, list[float]] = {method: [] for method in (FULL, *plan.methods)}
    for _ in range(plan.rounds + 1):  # the first round warms up and fills the store
        for method, times in spent.items():
            times.append(_ttft_ms(model, store, pieces, method))
    medians = {method: statistics.median(times[1:]) for method, times in spent.items()}
    return [
        {
            "prompt_tokens": len(ids_of(None, pieces)),
            "method": method,
            "full_ms": medians[FULL],
            "ttft_ms": medians[method],
            "speedup": medians[FULL] / medians[method],
        }
        for method in plan.methods
    ]


def _ttft_ms(model: nn.Module, store: ChunkStore, pieces: dict[str, Any], method: str) -> float:
    started = time.perf_counter()
    if method == FULL:
        cache: Any = None
        inputs: Any = full_inputs(model, pieces)
    else:
        name, _, ratio = method.partition("@")
        cache = BlendCache(model, store, blend_config(name, recompute_ratio=float(ratio)))
        inputs = cache.inputs(None, **pieces)
    first_token(model, cache, inputs)
    return 1e3 * (time.perf_counter() - started)


def _break_even(rows: list[dict[str, Any]]) -> int | None:
    faster = [row for row in rows if row["speedup"] > 1]
    slower = max((row["prompt_tokens"] for row in rows if row["speedup"] <= 1), default=0)
    return min((row["prompt_tokens"] for row in faster if row["prompt_tokens"] > slower), default=None)
