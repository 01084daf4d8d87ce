# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""From which length of the prompt on blending is faster than a full prefill, every chunk in memory."""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from hf_blend import BlendCache, ChunkStore
from hf_blend.config import BlendConfig
from hf_blend.model.placement import input_device

from ..answering import blend_config
from .shapes import text_config, timed_model, wait_for
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
    told = machine(
        TtftPlan(
            plan.shape, rounds=plan.rounds, dtype=plan.dtype, device=plan.device, selector=", ".join(plan.methods)
        )
    )
    found = {method: _break_even([row for row in rows if row["method"] == method]) for method in plan.methods}
    return {"machine": told, "plan": asdict(plan), "rows": rows, "break_even_tokens": found}


def _rows(model: nn.Module, plan: BreakEvenPlan, tokens: int) -> list[dict[str, Any]]:
    pieces = _pieces(plan, tokens, text_config(model).vocab_size)
    store = ChunkStore.open("memory://")
    spent: dict[str, list[float]] = {method: [] for method in (FULL, *plan.methods)}
    for _ in range(plan.rounds + 1):  # the first round warms up and fills the store
        for method, times in spent.items():
            times.append(_ttft_ms(model, store, pieces, method))
    medians = {method: statistics.median(times[1:]) for method, times in spent.items()}
    return [
        {
            "prompt_tokens": 1 + tokens + plan.question_tokens,
            "method": method,
            "full_ms": medians[FULL],
            "ttft_ms": medians[method],
            "speedup": medians[FULL] / medians[method],
        }
        for method in plan.methods
    ]


def _pieces(plan: BreakEvenPlan, tokens: int, vocabulary: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(plan.seed)
    ids = torch.randint(3, vocabulary, (tokens + plan.question_tokens,), generator=generator).tolist()
    size = tokens // CHUNKS
    chunks = [ids[start : start + size] for start in range(0, tokens, size)]
    return {"prefix": [1], "chunks": chunks, "question": ids[tokens:]}


def _ttft_ms(model: nn.Module, store: ChunkStore, pieces: dict[str, Any], method: str) -> float:
    started = time.perf_counter()
    if method == FULL:
        ids = [*pieces["prefix"], *(token for chunk in pieces["chunks"] for token in chunk), *pieces["question"]]
        inputs: Any = {"input_ids": torch.tensor([ids], device=input_device(model))}
        cache = None
    else:
        name, _, ratio = method.partition("@")
        cache = BlendCache(model, store, blend_config(name, recompute_ratio=float(ratio)))
        inputs = cache.inputs(None, **pieces)
    model.generate(**inputs, past_key_values=cache, do_sample=False, min_new_tokens=1, max_new_tokens=1)
    wait_for(model)
    return 1e3 * (time.perf_counter() - started)


def _break_even(rows: list[dict[str, Any]]) -> int | None:
    faster = [row for row in rows if row["speedup"] > 1]
    slower = max((row["prompt_tokens"] for row in rows if row["speedup"] <= 1), default=0)
    return min((row["prompt_tokens"] for row in faster if row["prompt_tokens"] > slower), default=None)
