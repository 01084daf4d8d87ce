# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Measure speed on this machine, as ratios taken in one run."""

from typing import Annotated

import typer

from .options import SELECTOR, Device, Selector
from .output import Json, say, show

__all__ = ["ttft"]

RATIOS = [1.0, 0.15, 0.05, 0.0]

Shape = Annotated[str, typer.Option(help="Shape of the model; its weights are random.")]
Model = Annotated[str | None, typer.Option(help="Hub id or path of the model to time, in place of a shape.")]
Dtype = Annotated[str, typer.Option(help="Of weights and KV; auto is as a model was saved.")]
Rounds = Annotated[int, typer.Option(min=1, help="How often each is measured; the median counts.")]
Chunks = Annotated[int, typer.Option(min=1, help="Chunks before the question.")]
ChunkTokens = Annotated[int, typer.Option(min=1, help="Tokens in each chunk.")]
QuestionTokens = Annotated[int, typer.Option(min=1, help="Tokens in the question.")]
Ratios = Annotated[list[float], typer.Option("--ratio", help="Recompute ratios, 0 to 1; may be repeated.")]


def ttft(
    shape: Shape = "smollm2-135m",
    model: Model = None,
    chunks: Chunks = 8,
    chunk_tokens: ChunkTokens = 512,
    question_tokens: QuestionTokens = 64,
    ratio: Ratios = RATIOS,
    selector: Selector = SELECTOR,
    rounds: Rounds = 5,
    dtype: Dtype = "float32",
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Measure the time to the first token, in full and blended. Every chunk is in memory, and its tokens are made up.

    Examples:
        hf-blend bench ttft --model smollm2 --ratio 0.15 --rounds 1  # network
        hf-blend bench ttft --shape tiny --chunks 3 --chunk-tokens 64 --question-tokens 8 --rounds 1 --json
        hf-blend bench ttft --shape smollm2-135m --ratio 0.15 --ratio 0.05  # slow
    """
    from hf_blend.evaluation.bench.ttft import TtftPlan, measure_ttft
    from hf_blend.evaluation.bundled import choose_device

    plan = TtftPlan(
        shape=f"model:{model}" if model else shape,
        chunks=chunks,
        chunk_tokens=chunk_tokens,
        question_tokens=question_tokens,
        ratios=tuple(ratio),
        selector=selector or SELECTOR,
        rounds=rounds,
        dtype=dtype,
        device=str(choose_device(device)),
    )
    measured = measure_ttft(plan, progress=say)
    title = f"{plan.shape}, full prefill {measured['full']['ttft_ms']:.0f} ms"
    show(measured if json else measured["rows"], as_json=json, title=title, header=True)
