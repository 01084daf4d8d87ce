# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""From which length on blending is faster: full prefill and selectors, interleaved, on short prompts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hf_blend.config import BlendConfig
from hf_blend.evaluation.answering import blend_config, ids_of
from hf_blend.evaluation.bench.shapes import timed_model
from hf_blend.evaluation.bench.ttft import FULL, TtftPlan, in_turns, machine, made_up, medians
from hf_blend.evaluation.blending import variants


@dataclass(frozen=True)
class BreakEvenPlan:
    """What is measured: lengths of the documents, and selectors, each with @ and a ratio."""

    shape: str = "smollm2-135m"
    tokens: tuple[int, ...] = (64, 128, 256, 512)
    methods: tuple[str, ...] = (f"{BlendConfig.selector}@{BlendConfig.recompute_ratio:g}", "boundary@0.05")
    rounds: int = 7
    dtype: str = "float32"
    device: str = "cpu"


def measure_break_even(plan: BreakEvenPlan, progress: Callable[[str], None] | None = None) -> dict[str, Any]:
    """Measure every length; a method breaks even where every longer prompt is faster, too."""
    configs: dict[str, BlendConfig | None] = {FULL: None}
    for text in plan.methods:
        for name, ratio in variants(text, (BlendConfig.recompute_ratio,)):
            configs[f"{name}@{ratio or 0:g}"] = blend_config(name, recompute_ratio=ratio or 0.0)
    methods = [name for name in configs if name != FULL]
    timing = TtftPlan(
        plan.shape, chunks=4, question_tokens=16, rounds=plan.rounds, dtype=plan.dtype, device=plan.device,
        selector=", ".join(methods), decoded_tokens=1,
    )  # fmt: skip
    model = timed_model(plan.shape, plan.dtype, plan.device, timing.seed)
    rows = []
    for tokens in plan.tokens:
        request = made_up(model, replace(timing, chunk_tokens=tokens // timing.chunks))
        runs = in_turns(model, request, timing, configs, progress)
        times = {name: medians(rounds)["ttft_ms"] for name, rounds in runs.items()}
        for name in methods:
            rows.append(
                {
                    "prompt_tokens": len(ids_of(None, request)),
                    "full_ms": times[FULL],
                    "method": name,
                    "ttft_ms": times[name],
                    "speedup": times[FULL] / times[name],
                }
            )
    lengths = {name: _break_even([row for row in rows if row["method"] == name]) for name in methods}
    settings = {"shape": plan.shape, "tokens": list(plan.tokens), "methods": methods, "rounds": plan.rounds}
    return {"machine": machine(timing), "plan": settings, "rows": rows, "break_even_tokens": lengths}


def _break_even(rows: Sequence[dict[str, Any]]) -> int | None:
    slower = max((row["prompt_tokens"] for row in rows if row["speedup"] <= 1), default=0)
    return min((row["prompt_tokens"] for row in rows if row["prompt_tokens"] > slower), default=None)
