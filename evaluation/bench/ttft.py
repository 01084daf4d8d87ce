# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Time to the first token: stock full prefill against blending, interleaved, with the bound that FLOPs set."""

import platform
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_blend import ChunkStore
from hf_blend.config import BlendConfig
from hf_blend.model.anatomy import cache_argument
from hf_blend.version import __version__

from ..answering import AnswerStreamer, begin, blend_config
from .shapes import random_pieces, timed_model

FULL = "full"
REPORTED = (  # medians of the reports
    "flop_bound", "charged_budget", "realign_ms", "select_ms", "reusable_tokens", "exact_tokens", "prompt_tokens",
)  # fmt: skip
Run = dict[str, Any]


@dataclass(frozen=True)
class TtftPlan:
    """What is measured."""

    shape: str = "smollm2-135m"
    chunks: int = 8
    chunk_tokens: int = 512
    question_tokens: int = 64
    ratios: tuple[float, ...] = (1.0, 0.15, 0.05, 0.0)
    selector: str = BlendConfig.selector
    rounds: int = 5
    dtype: str = "float32"
    device: str = "cpu"
    seed: int = 0
    decoded_tokens: int = 24


def measure_ttft(plan: TtftPlan, progress: Callable[[str], None] | None = None) -> dict[str, Any]:
    """Measure full prefill and blending at every ratio, in turn, several times over."""
    model = timed_model(plan.shape, plan.dtype, plan.device, plan.seed)
    configs: dict[str, BlendConfig | None] = {FULL: None}
    for ratio in plan.ratios:
        configs[f"{ratio:g}"] = blend_config(plan.selector, recompute_ratio=ratio)
    runs = in_turns(model, made_up(model, plan), plan, configs, progress)
    rows = [_row(ratio, runs[FULL], runs[f"{ratio:g}"]) for ratio in plan.ratios]
    return {"machine": machine(plan), "full": medians(runs[FULL]), "rows": rows}


def in_turns(
    model: nn.Module,
    request: dict[str, Any],
    plan: TtftPlan,
    configs: Mapping[str, BlendConfig | None],
    progress: Callable[[str], None] | None = None,
) -> dict[str, list[Run]]:
    """Prefill one prompt with every config, None in full, in turns; a first round warms up and fills the store."""
    store = ChunkStore.open("memory://", memory_bytes=64 << 30)
    runs: dict[str, list[Run]] = {name: [] for name in configs}
    for number in range(plan.rounds + 1):
        for name, config in configs.items():
            if progress:
                progress(f"round {number} of {plan.rounds}: {name}")
            figures = run(model, store, request, plan, config)
            if number:
                runs[name].append(figures)
    return runs


def made_up(model: nn.Module, plan: TtftPlan) -> dict[str, Any]:
    """Make up a prompt of a plan's size."""
    return random_pieces(model, plan.chunks, plan.chunk_tokens, plan.question_tokens, plan.seed)


def run(
    model: nn.Module,
    store: ChunkStore,
    request: dict[str, Any],
    plan: TtftPlan,
    config: BlendConfig | None,
) -> Run:
    """Time one generation: a full prefill where there is no config."""
    is_cuda = plan.device.startswith("cuda")
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    streamer = AnswerStreamer()
    cache, inputs = begin(model, None, store, request, config)
    model.generate(
        **inputs,
        **cache_argument(model, cache),
        streamer=streamer,
        do_sample=False,
        eos_token_id=None,
        min_new_tokens=plan.decoded_tokens,
        max_new_tokens=plan.decoded_tokens,
    )
    figures: Run = {"ttft_ms": streamer.ttft_ms}
    if plan.decoded_tokens > 1:
        figures["decode_tokens_s"] = streamer.decode_tokens_s
    if is_cuda:
        figures["peak_bytes"] = torch.cuda.max_memory_allocated()
    if cache is not None:
        figures["report"] = cache.report
    return figures


def medians(rounds: list[Run]) -> dict[str, float]:
    """The medians of what every round has."""
    names = [name for name in ("ttft_ms", "decode_tokens_s", "peak_bytes") if name in rounds[0]]
    return {name: statistics.median(figures[name] for figures in rounds) for name in names}


def _row(ratio: float, full: list[Run], rounds: list[Run]) -> dict[str, Any]:
    """Medians; what is compared with full prefill is compared run by run."""
    pairs = list(zip(full, rounds, strict=True))
    speedup = statistics.median(other["ttft_ms"] / figures["ttft_ms"] for other, figures in pairs)
    decoding = statistics.median(figures["decode_tokens_s"] / other["decode_tokens_s"] for other, figures in pairs)
    reported = {}
    for name in REPORTED:
        reported[name] = statistics.median(getattr(figures["report"], name) for figures in rounds)
    return {
        "ratio": ratio,
        **medians(rounds),
        "speedup": speedup,
        "bound_share": speedup / reported["flop_bound"],
        **reported,
        "decode_vs_dynamic": decoding,
    }


def machine(plan: TtftPlan) -> dict[str, Any]:
    """What the figures depend on: device, threads, dtype, shape, versions."""
    import transformers

    device = platform.processor() or "cpu"
    if plan.device.startswith("cuda"):
        device = torch.cuda.get_device_name()
    return {
        "device": device,
        "threads": torch.get_num_threads(),
        "dtype": plan.dtype,
        "shape": plan.shape,
        "rounds": plan.rounds,
        "selector": plan.selector,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "hf_blend": __version__,
        "python": platform.python_version(),
    }
