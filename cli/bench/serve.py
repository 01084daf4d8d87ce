# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""`hf-blend bench serve`."""

import statistics
from typing import Annotated, Any

import typer

from ..options import RATIO, Device, Ratio, TimedDtype, TimedModel, timed
from ..output import Json, say, show

__all__ = ["serve"]

More = Annotated[list[float] | None, typer.Argument(hidden=True)]  # the rates behind the first: an option takes one
Shape = Annotated[str, typer.Option(help="Model shape.")]
Chunks = Annotated[int, typer.Option(min=1, help="Chunks before the question.")]
ChunkTokens = Annotated[int, typer.Option(min=1, help="Tokens of each chunk.")]
QuestionTokens = Annotated[int, typer.Option(min=2, help="Tokens of the question.")]
Library = Annotated[int, typer.Option(min=1, help="Chunks that prompts draw from.")]
Zipf = Annotated[float, typer.Option(min=0, help="How uneven they are drawn; 0 is even.")]
Requests = Annotated[int, typer.Option(min=2, help="Requests of each run.")]
NewTokens = Annotated[int, typer.Option(min=2, help="Tokens of each answer.")]
Rates = Annotated[list[float], typer.Option(help="Shares of the capacity of full prefill at which requests arrive.")]
BatchTokens = Annotated[int, typer.Option(min=1, help="Tokens of one step.")]
BatchRequests = Annotated[int, typer.Option(min=1, help="Requests of one step.")]
StallMs = Annotated[float, typer.Option(min=0, help="How long a blended prefill may hold up those that decode.")]
Seed = Annotated[int, typer.Option(help="Of weights, tokens and arrivals.")]


def serve(
    more: More = None,
    shape: Shape = "smollm2-135m",
    model: TimedModel = None,
    chunks: Chunks = 8,
    chunk_tokens: ChunkTokens = 512,
    question_tokens: QuestionTokens = 64,
    library: Library = 40,
    zipf: Zipf = 1.1,
    requests: Requests = 24,
    new_tokens: NewTokens = 16,
    rates: Rates = [0.5, 0.8, 2.5],  # noqa: B006
    ratio: Ratio = RATIO,
    batch_tokens: BatchTokens = 512,
    batch_requests: BatchRequests = 8,
    stall_ms: StallMs = 50.0,
    dtype: TimedDtype = "float32",
    device: Device = "auto",
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Load a server: full prefill, sharing of prefixes alone, and blending, on the same requests in one run.

    Examples:
        hf-blend bench serve --shape tiny --chunks 3 --chunk-tokens 64 --requests 4 --rates 0.8 --json  # slow
        hf-blend bench serve --shape smollm2-135m --json  # slow
    """
    from hf_blend.evaluation.bench.serve import ServePlan, measure_serve
    from hf_blend.evaluation.bundled import choose_device

    shape = timed(shape, model)
    given: dict[str, Any] = {"stall_ms": stall_ms, "dtype": dtype, "device": str(choose_device(device)), "seed": seed}
    sizes = {"chunks": chunks, "chunk_tokens": chunk_tokens, "question_tokens": question_tokens, "library": library}
    steps = {"batch_tokens": batch_tokens, "batch_requests": batch_requests, "recompute_ratio": ratio, "zipf": zipf}
    shares = (*rates, *(more or ()))
    plan = ServePlan(shape, **sizes, requests=requests, new_tokens=new_tokens, rates=shares, **steps, **given)
    found = measure_serve(plan, progress=say)
    if json:
        show(found, as_json=True)
        return
    rows = [_readable(row) for row in found["rows"]]
    show(rows, title=f"{shape}, prompts of {plan.prompt_tokens} tokens", header=True)
    off = [abs(row["replayed_first_token_p95_s"]) for row in found["rows"]]
    predicted = [
        {"servers": row["servers"], "prefill": row["prefill"], "decode": row["decode"], **_readable(row)}
        for row in found["predicted"]
    ]
    title = f"replayed on other machines; here the 95th percentile is off by {statistics.median(off):.0%} (median)"
    show(predicted, title=title, header=True)


def _readable(row: dict[str, Any]) -> dict[str, Any]:
    names = (
        "way", "share", "requests_s", "first_token_p50_s", "first_token_p95_s", "next_token_p50_s", "next_token_p95_s",
    )  # fmt: skip
    known = {name: round(row[name], 3) if isinstance(row[name], float) else row[name] for name in names}
    return {**known, "share": "at once" if row["share"] is None else row["share"]}
