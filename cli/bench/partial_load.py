# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Loading in part."""

from typing import Annotated

import typer

from ..output import Json, say, show

__all__ = ["partial_load", "partial_quality"]

Chunks = Annotated[int, typer.Option(min=1, help="Chunks before the question.")]
ChunkTokens = Annotated[int, typer.Option(min=1, help="Tokens in each chunk.")]
Layers = Annotated[int, typer.Option(min=1, help="Layers of the models.")]
Share = Annotated[float, typer.Option(help="Of the blocks that is loaded.")]
Throttle = Annotated[list[float], typer.Option(help="Rate of the disk in GB/s, 0 for its own; may be repeated.")]
Rounds = Annotated[int, typer.Option(min=1, help="How often each way is measured; the median counts.")]
Model = Annotated[str, typer.Option(help="chains, reference, or a folder with the chain model's tokenizer.")]
Count = Annotated[int, typer.Option(min=1, help="Questions.")]


def partial_load(
    chunks: Chunks = 4,
    chunk_tokens: ChunkTokens = 512,
    layers: Layers = 8,
    share: Share = 0.25,
    throttle: Throttle = [0.5, 1.0, 4.0, 0.0],  # noqa: B006
    rounds: Rounds = 5,
    fallback: Annotated[str, typer.Option(help="Where probe heads disagree: whole, or values.")] = "whole",
    model: Annotated[str | None, typer.Option(help="A trained model instead: chains, or a folder.")] = None,
    json: Json = False,
) -> None:
    """Bytes and time to the first token from a cold disk: the important part beside all, heads tied or trained.

    Examples:
        hf-blend bench partial-load --chunks 2 --chunk-tokens 32 --layers 2 --throttle 1 --rounds 1 --json
        hf-blend bench partial-load --model chains  # slow
    """
    from hf_blend.evaluation.bench.partial_load import PartialPlan, measure_partial_load

    given = {"layers": layers, "share": share, "rates": tuple(throttle), "rounds": rounds}
    plan = PartialPlan(chunks, chunk_tokens, **given, fallback=fallback, model=model)
    found = measure_partial_load(plan, progress=say)
    show(found if json else found["rows"], as_json=json, title="loading in part", header=True)


def partial_quality(
    count: Count = 200,
    model: Model = "chains",
    batch: Annotated[int, typer.Option(min=1, help="Questions of one forward.")] = 1,
    ratio: Annotated[float, typer.Option(help="Share of the tokens that is recomputed.")] = 0.15,
    json: Json = False,
) -> None:
    """Bytes that ChunkStore.open(partial=…) loads of a trained model's chunks, after a restart, and right answers.

    Examples:
        hf-blend bench partial-quality --count 1 --model reference --json
        hf-blend bench partial-quality --batch 4  # slow
    """
    from hf_blend.evaluation.bench.partial_quality import measure_partial_quality

    found = measure_partial_quality(count, model, batch, ratio, progress=say)
    show(found if json else found["rows"], as_json=json, title="answers over a part of the KV", header=True)
