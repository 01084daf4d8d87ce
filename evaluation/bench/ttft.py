# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Time to the first token: stock full prefill against blending, interleaved, with the bound that FLOPs set."""

import platform
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hf_blend import BlendCache, ChunkStore
from hf_blend.config import BlendConfig
from hf_blend.errors import ConfigError
from hf_blend.version import __version__

from ..answering import ids_of, inputs_of
from ..bundled import open_model
from ..tuning import read_prompts
from .shapes import OWN, random_pieces, timed_model

DECODED_TOKENS = 24
FULL = "full"


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


@dataclass
class Clock:
    """A streamer that notes when each token arrives."""

    started: float = field(default_factory=time.perf_counter)
    arrived: list[float] = field(default_factory=list)

    def put(self, value: Tensor) -> None:
        """Note the time; the first call brings the prompt itself."""
        if value.device.type == "cuda":
            torch.cuda.synchronize()
        self.arrived.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is buffered."""

    @property
    def ttft_ms(self) -> float:
        """From the start of the request to its first new token."""
        return 1e3 * (self.arrived[1] - self.started)

    @property
    def decode_tokens_s(self) -> float:
        """Tokens a second after the first."""
        return (len(self.arrived) - 2) / (self.arrived[-1] - self.arrived[1])


def measure_ttft(plan: TtftPlan, progress: Any = None) -> dict[str, Any]:
    """Measure full prefill and blending at every ratio, in turn, several times over."""
    tokenizer, prompts = _real_prompts(plan) if plan.data else (None, [])
    model = timed_model(plan.shape, plan.dtype, plan.device, plan.seed)
    prompts = prompts or [made_up(model, plan)]
    runs: dict[Any, list[dict[str, Any]]] = {key: [] for key in (FULL, *plan.ratios)}
    for count, given in enumerate(prompts, 1):
        store = ChunkStore.open("memory://", memory_bytes=64 << 30)
        for number in range(plan.rounds + 1):  # the first round warms up and fills the store
            for key, found in runs.items():
                if progress:
                    progress(f"prompt {count} of {len(prompts)}, round {number} of {plan.rounds}: {key}")
                one = _run(model, store, given, plan, key, tokenizer)
                found += [one] if number else []
    rows = [_row(ratio, runs[FULL], runs[ratio]) for ratio in plan.ratios]
    return {"machine": machine(plan), "full": _median(runs[FULL]), "prompts": len(prompts), "rows": rows}


def _real_prompts(plan: TtftPlan) -> tuple[Any, list[dict[str, Any]]]:
    """The tokenizer of a model of one's own, and prompts of a file as it is asked them."""
    if not plan.shape.startswith(OWN):
        raise ConfigError(
            f"there are prompts in {plan.data!r}, but {plan.shape!r} is a shape, which has no tokenizer. Name a model "
            "with --model."
        )
    source = open_model(plan.shape.removeprefix(OWN), plan.device, plan.dtype)
    found = read_prompts(Path(str(plan.data)), source.tokenizer, plan.limit, source.positions)
    return source.tokenizer, [one.given for one in found]


def made_up(model: nn.Module, plan: TtftPlan) -> dict[str, Any]:
    """Make up a prompt of a plan's size."""
    return random_pieces(model, plan.chunks, plan.chunk_tokens, plan.question_tokens, plan.seed)


def _run(
    model: nn.Module, store: ChunkStore, given: dict[str, Any], plan: TtftPlan, key: Any, tokenizer: Any = None
) -> dict[str, Any]:
    if _is_cuda(plan):
        torch.cuda.reset_peak_memory_stats()
    clock = Clock()
    if key == FULL:
        inputs: Any = {"input_ids": torch.tensor([ids_of(tokenizer, given)], device=plan.device)}
        cache = None
    else:
        cache = BlendCache(model, store, recompute_ratio=key, selector=plan.selector)
        inputs = inputs_of(cache, tokenizer, given)
    model.generate(
        **inputs,
        past_key_values=cache,
        streamer=clock,
        do_sample=False,
        eos_token_id=None,
        min_new_tokens=DECODED_TOKENS,
        max_new_tokens=DECODED_TOKENS,
    )
    figures = {"ttft_ms": clock.ttft_ms, "decode_tokens_s": clock.decode_tokens_s}
    if _is_cuda(plan):
        figures["peak_bytes"] = torch.cuda.max_memory_allocated()
    return {**figures, "report": cache.report} if cache is not None else figures


def _median(rounds: list[dict[str, Any]]) -> dict[str, float]:
    names = [name for name in ("ttft_ms", "decode_tokens_s", "peak_bytes") if name in rounds[0]]
    return {name: statistics.median(one[name] for one in rounds) for name in names}


def _is_cuda(plan: TtftPlan) -> bool:
    return plan.device.startswith("cuda")


def _row(ratio: float, full: list[dict[str, Any]], rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians; what is compared with full prefill is compared run by run, since prompts differ in length."""
    pairs = list(zip(full, rounds, strict=True))
    speedup = statistics.median(other["ttft_ms"] / own["ttft_ms"] for other, own in pairs)
    median = lambda name: statistics.median(getattr(one["report"], name) for one in rounds)  # noqa: E731
    return {
        "ratio": ratio,
        **_median(rounds),
        "speedup": speedup,
        "flop_bound": median("flop_bound"),
        "bound_share": speedup / median("flop_bound"),
        "charged_budget": median("charged_budget"),
        "realign_ms": median("realign_ms"),
        "select_ms": median("select_ms"),
        "decode_vs_dynamic": statistics.median(
            own["decode_tokens_s"] / other["decode_tokens_s"] for other, own in pairs
        ),
        "reusable_tokens": median("reusable_tokens"),
        "exact_tokens": median("exact_tokens"),
        "prompt_tokens": median("prompt_tokens"),
    }


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
