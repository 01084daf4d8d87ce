# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Time to the first token: stock full prefill against blending, interleaved, with the bound that FLOPs set."""

import platform
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hf_blend import BlendCache, ChunkStore
from hf_blend.config import BlendConfig
from hf_blend.version import __version__

from .shapes import random_model

DECODED_TOKENS = 24
FULL = "full"


@dataclass(frozen=True)
class TtftPlan:
    """What is measured.

    Attributes:
        shape: name of a model shape.
        chunks: how many chunks stand before the question.
        chunk_tokens: length of each.
        question_tokens: length of the question.
        ratios: recompute ratios to measure.
        selector: which tokens are recomputed.
        rounds: how often each is measured; the median counts.
        dtype: of weights and KV.
        device: where the model runs.
        seed: of weights and tokens.
    """

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
    """Measure full prefill and blending at every ratio, in turn, several times over.

    Args:
        plan: what to measure.
        progress: called with a line of text before each round.

    Returns:
        `machine` and `rows`, one per ratio, and `full`, the stock prefill that the rows are compared with.
    """
    model = random_model(plan.shape, getattr(torch, plan.dtype), plan.device, plan.seed)
    pieces = _pieces(plan, model.config.vocab_size)
    store = ChunkStore.open("memory://", memory_bytes=64 << 30)
    runs: dict[Any, list[dict[str, Any]]] = {key: [] for key in (FULL, *plan.ratios)}
    for number in range(plan.rounds + 1):  # the first round warms up and fills the store
        for key in runs:
            if progress:
                progress(f"round {number} of {plan.rounds}: {key}")
            runs[key].append(_run(model, store, pieces, plan, key))
    kept = {key: rounds[1:] for key, rounds in runs.items()}
    full = _median(kept[FULL])
    rows = [_row(ratio, full, kept[ratio]) for ratio in plan.ratios]
    return {"machine": machine(plan), "full": full, "rows": rows}


def _pieces(plan: TtftPlan, vocabulary: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(plan.seed)
    draw = lambda tokens: torch.randint(3, vocabulary, (tokens,), generator=generator).tolist()  # noqa: E731
    return {"chunks": [draw(plan.chunk_tokens) for _ in range(plan.chunks)], "question": draw(plan.question_tokens)}


class _Tokens:
    """What `inputs` needs of a tokenizer where all pieces are ids."""

    bos_token_id = 1
    pad_token_id = 0


def _run(model: nn.Module, store: ChunkStore, pieces: dict[str, Any], plan: TtftPlan, key: Any) -> dict[str, Any]:
    if _is_cuda(plan):
        torch.cuda.reset_peak_memory_stats()
    clock = Clock()
    if key == FULL:
        ids = [_Tokens.bos_token_id, *(token for chunk in pieces["chunks"] for token in chunk), *pieces["question"]]
        inputs, cache = {"input_ids": torch.tensor([ids], device=plan.device)}, None
    else:
        cache = BlendCache(model, store, recompute_ratio=key, selector=plan.selector)
        inputs = cache.inputs(_Tokens, **pieces)
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


def _row(ratio: float, full: dict[str, float], rounds: list[dict[str, Any]]) -> dict[str, Any]:
    figures, report = _median(rounds), rounds[-1]["report"]
    speedup = full["ttft_ms"] / figures["ttft_ms"]
    return {
        "ratio": ratio,
        **figures,
        "speedup": speedup,
        "flop_bound": report.flop_bound,
        "bound_share": speedup / report.flop_bound,
        "charged_budget": report.charged_budget,
        "realign_ms": statistics.median(one["report"].realign_ms for one in rounds),
        "select_ms": statistics.median(one["report"].select_ms for one in rounds),
        "decode_vs_dynamic": figures["decode_tokens_s"] / full["decode_tokens_s"],
        "reusable_tokens": report.reusable_tokens,
        "exact_tokens": report.exact_tokens,
        "prompt_tokens": report.prompt_tokens,
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
