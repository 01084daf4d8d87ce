# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Time to the first token: stock full prefill against blending, interleaved, with the bound that FLOPs set.

`measure_break_even` asks the same of short prompts: from which length on blending is faster.
"""

import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_blend import ChunkStore
from hf_blend.config import BlendConfig
from hf_blend.errors import ConfigError
from hf_blend.model.cache_keyword import cache_argument
from hf_blend.version import __version__

from ..answering import AnswerStreamer, begin, blend_config, ids_of
from ..blending import variants
from ..bundled import open_model
from ..tuning import read_prompts
from .shapes import OWN, random_pieces, timed_model

FULL = "full"
REPORTED = (  # medians of the reports
    "flop_bound", "charged_budget", "realign_ms", "select_ms", "reusable_tokens", "exact_tokens", "prompt_tokens",
)  # fmt: skip


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
    data: str | None = None
    limit: int | None = None
    decoded_tokens: int = 24


def measure_ttft(plan: TtftPlan, progress: Callable[[str], None] | None = None) -> dict[str, Any]:
    """Measure full prefill and blending at every ratio, in turn, several times over."""
    tokenizer, prompts = _real_prompts(plan) if plan.data else (None, [])
    model = timed_model(plan.shape, plan.dtype, plan.device, plan.seed)
    prompts = prompts or [made_up(model, plan)]
    configs = {f"{ratio:g}": blend_config(plan.selector, recompute_ratio=ratio) for ratio in plan.ratios}
    runs: dict[str, list[dict[str, Any]]] = {FULL: [], **{name: [] for name in configs}}
    for count, request in enumerate(prompts, 1):
        about = f"prompt {count} of {len(prompts)}, "
        for name, rounds in _in_turns(model, request, plan, configs, tokenizer, progress, about).items():
            runs[name] += rounds
    rows = [_row(ratio, runs[FULL], runs[f"{ratio:g}"]) for ratio in plan.ratios]
    return {"machine": machine(plan), "full": _median(runs[FULL]), "prompts": len(prompts), "rows": rows}


def measure_break_even(
    plan: TtftPlan, lengths: Sequence[int], methods: Sequence[str], progress: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """Measure full prefill and selectors, each with @ and a ratio, at lengths of the documents."""
    chosen = [variant for text in methods for variant in variants(text, (BlendConfig.recompute_ratio,))]
    configs = {f"{name}@{ratio or 0:g}": blend_config(name, recompute_ratio=ratio or 0.0) for name, ratio in chosen}
    plan, rows = replace(plan, chunks=4, question_tokens=16, decoded_tokens=1), list[dict[str, Any]]()
    model = timed_model(plan.shape, plan.dtype, plan.device, plan.seed)
    for tokens in lengths:
        request = made_up(model, replace(plan, chunk_tokens=tokens // plan.chunks))
        runs = _in_turns(model, request, plan, configs, None, progress, f"{tokens} tokens, ")
        times = {name: _median(rounds)["ttft_ms"] for name, rounds in runs.items()}
        shared = {"prompt_tokens": len(ids_of(None, request)), "full_ms": times[FULL]}
        for name in configs:
            rows.append({**shared, "method": name, "ttft_ms": times[name], "speedup": times[FULL] / times[name]})
    lengths_needed = {name: _break_even([row for row in rows if row["method"] == name]) for name in configs}
    about = machine(replace(plan, selector=", ".join(configs)))
    settings = {"shape": plan.shape, "tokens": list(lengths), "methods": [*configs], "rounds": plan.rounds}
    return {"machine": about, "plan": settings, "rows": rows, "break_even_tokens": lengths_needed}


def _break_even(rows: Sequence[dict[str, Any]]) -> int | None:
    """The least length from which on every longer prompt is faster, too."""
    slower = max((row["prompt_tokens"] for row in rows if row["speedup"] <= 1), default=0)
    return min((row["prompt_tokens"] for row in rows if row["prompt_tokens"] > slower), default=None)


def _in_turns(
    model: nn.Module,
    request: dict[str, Any],
    plan: TtftPlan,
    configs: Mapping[str, BlendConfig],
    tokenizer: Any,
    progress: Callable[[str], None] | None,
    about: str,
) -> dict[str, list[dict[str, Any]]]:
    """Prefill one prompt in full and with every config, in turns; a first round warms up and fills the store."""
    store, all_configs = ChunkStore.open("memory://", memory_bytes=64 << 30), {FULL: None, **configs}
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in all_configs}
    for number in range(plan.rounds + 1):
        for name, config in all_configs.items():
            if progress:
                progress(f"{about}round {number} of {plan.rounds}: {name}")
            runs[name].append(run(model, store, request, plan, config, tokenizer))
    return {name: rounds[1:] for name, rounds in runs.items()}


def _real_prompts(plan: TtftPlan) -> tuple[Any, list[dict[str, Any]]]:
    """The tokenizer of a model of one's own, and prompts of a file as it is asked them."""
    if not plan.shape.startswith(OWN):
        raise ConfigError(
            f"there are prompts in {plan.data!r}, but {plan.shape!r} is a shape, which has no tokenizer. Name a model "
            "with --model."
        )
    source = open_model(plan.shape.removeprefix(OWN), plan.device, plan.dtype)
    prompts = read_prompts(Path(str(plan.data)), source.tokenizer, plan.limit, source.positions)
    return source.tokenizer, [prompt.request for prompt in prompts]


def made_up(model: nn.Module, plan: TtftPlan) -> dict[str, Any]:
    """Make up a prompt of a plan's size."""
    return random_pieces(model, plan.chunks, plan.chunk_tokens, plan.question_tokens, plan.seed)


def run(
    model: nn.Module,
    store: ChunkStore,
    request: dict[str, Any],
    plan: TtftPlan,
    config: BlendConfig | None,
    tokenizer: Any = None,
) -> dict[str, Any]:
    """Time one generation: a full prefill where there is no config."""
    if _is_cuda(plan):
        torch.cuda.reset_peak_memory_stats()
    streamer = AnswerStreamer()
    cache, inputs = begin(model, tokenizer, store, request, config)
    model.generate(
        **inputs, **cache_argument(model, cache), streamer=streamer, do_sample=False, eos_token_id=None,
        min_new_tokens=plan.decoded_tokens, max_new_tokens=plan.decoded_tokens,
    )  # fmt: skip
    figures = {"ttft_ms": streamer.ttft_ms}
    if plan.decoded_tokens > 1:
        figures["decode_tokens_s"] = streamer.decode_tokens_s
    if _is_cuda(plan):
        figures["peak_bytes"] = torch.cuda.max_memory_allocated()
    return {**figures, "report": cache.report} if cache is not None else figures


def _median(rounds: list[dict[str, Any]]) -> dict[str, float]:
    names = [name for name in ("ttft_ms", "decode_tokens_s", "peak_bytes") if name in rounds[0]]
    return {name: statistics.median(figures[name] for figures in rounds) for name in names}


def _is_cuda(plan: TtftPlan) -> bool:
    return plan.device.startswith("cuda")


def _row(ratio: float, full: list[dict[str, Any]], rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians; what is compared with full prefill is compared run by run, since prompts differ in length."""
    pairs = list(zip(full, rounds, strict=True))
    speedup = statistics.median(other["ttft_ms"] / own["ttft_ms"] for other, own in pairs)
    decoding = statistics.median(own["decode_tokens_s"] / other["decode_tokens_s"] for other, own in pairs)
    medians = {name: statistics.median(getattr(figures["report"], name) for figures in rounds) for name in REPORTED}
    ends = {"ratio": ratio, **_median(rounds), "speedup": speedup, "bound_share": speedup / medians["flop_bound"]}
    return {**ends, **medians, "decode_vs_dynamic": decoding}


def machine(plan: TtftPlan) -> dict[str, Any]:
    """What the figures depend on: device, threads, dtype, shape, versions."""
    import transformers

    device = torch.cuda.get_device_name() if _is_cuda(plan) else platform.processor() or "cpu"
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
