# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Time to the first token."""

from pathlib import Path
from typing import Annotated

import typer

from ..options import SELECTOR, Device, Rounds, Selector, Shape, TimedDtype, TimedModel, timed
from ..output import Json, rounded, say, show

__all__ = ["ttft"]

RATIOS = [1.0, 0.15, 0.05, 0.0]

Chunks = Annotated[int, typer.Option(min=1, help="Chunks before the question.")]
ChunkTokens = Annotated[int, typer.Option(min=1, help="Tokens in each chunk.")]
QuestionTokens = Annotated[int, typer.Option(min=1, help="Tokens in the question.")]
Ratios = Annotated[list[float], typer.Option(metavar="RATIO ...", help="Recompute ratios, 0 to 1, as many as wanted.")]
More = Annotated[list[float] | None, typer.Argument(hidden=True)]  # the ratios behind the first: an option takes one
Data = Annotated[Path | None, typer.Option(help="JSONL file with real prompts for --model; else ids are made up.")]
Limit = Annotated[int, typer.Option(min=0, help="The first prompts of the file; 0 is all.")]


def ttft(
    more: More = None,
    shape: Shape = "smollm2-135m",
    model: TimedModel = None,
    data: Data = None,
    limit: Limit = 0,
    chunks: Chunks = 8,
    chunk_tokens: ChunkTokens = 512,
    question_tokens: QuestionTokens = 64,
    ratios: Ratios = RATIOS,
    selector: Selector = SELECTOR,
    rounds: Rounds = 5,
    dtype: TimedDtype = "float32",
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Measure the time to the first token, in full and blended. Every chunk is in memory.

    With --model and --data on real prompts, as `hf-blend ask` puts them; medians over them.

    Examples:
        hf-blend bench ttft --model smollm2 --data mine.jsonl --ratios 0.15 --rounds 1  # network
        hf-blend bench ttft --shape tiny --chunks 3 --chunk-tokens 64 --question-tokens 8 --rounds 1 --json
        hf-blend bench ttft --shape smollm2-135m --ratios 0.15 0.05  # slow
    """
    from hf_blend.evaluation.bench.ttft import TtftPlan, measure_ttft

    shape, device = timed(shape, model, device)
    plan = TtftPlan(
        shape, chunks, chunk_tokens, question_tokens, (*ratios, *(more or ())), selector, rounds, dtype, device,
        data=str(data) if data else None, limit=limit or None,
    )  # fmt: skip
    found = measure_ttft(plan, progress=say)
    title = f"{plan.shape}, full prefill {found['full']['ttft_ms']:.0f} ms"
    show(found if json else [rounded(row) for row in found["rows"]], as_json=json, title=title, header=True)
