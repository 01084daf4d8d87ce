# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Loading in part."""

from typing import Annotated

import typer

from ..output import Json, say, show

__all__ = ["partial_load"]

Chunks = Annotated[int, typer.Option(min=1, help="Chunks before the question.")]
ChunkTokens = Annotated[int, typer.Option(min=1, help="Tokens in each chunk.")]
Layers = Annotated[int, typer.Option(min=1, help="Layers of the models.")]
Share = Annotated[float, typer.Option(help="Of the blocks that is loaded.")]
Throttle = Annotated[list[float], typer.Option(help="Rate of the disk in GB/s, 0 for its own; may be repeated.")]
Rounds = Annotated[int, typer.Option(min=1, help="How often each way is measured; the median counts.")]


def partial_load(
    chunks: Chunks = 4,
    chunk_tokens: ChunkTokens = 512,
    layers: Layers = 8,
    share: Share = 0.25,
    throttle: Throttle = [0.5, 1.0, 4.0, 0.0],  # noqa: B006
    rounds: Rounds = 5,
    fallback: Annotated[str, typer.Option(help="Where probe heads disagree: whole, or values.")] = "whole",
    json: Json = False,
) -> None:
    """Bytes and time to the first token from a cold disk: the important part beside all, heads tied.

    Examples:
        hf-blend bench partial-load --chunks 2 --chunk-tokens 32 --layers 2 --throttle 1 --rounds 1 --json
        hf-blend bench partial-load  # slow
    """
    from hf_blend.evaluation.bench.partial_load import PartialPlan, measure_partial_load

    given = {"layers": layers, "share": share, "rates": tuple(throttle), "rounds": rounds}
    plan = PartialPlan(chunks, chunk_tokens, **given, fallback=fallback)
    found = measure_partial_load(plan, progress=say)
    show(found if json else found["rows"], as_json=json, title="loading in part", header=True)
