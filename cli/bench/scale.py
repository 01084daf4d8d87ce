# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Time and memory of a prefill as the prompt grows."""

from typing import Annotated, Any

import typer

from ..options import RATIO, TimedDtype, TimedModel, timed
from ..output import Json, say, show

__all__ = ["scale"]

Shapes = Annotated[list[str], typer.Option("--shape", help="Shape of a model; may be repeated.")]
Tokens = Annotated[list[int], typer.Option("--tokens", min=64, help="Tokens in all chunks; may be repeated.")]
Most = Annotated[int, typer.Option(min=64, help="No more tokens than this for another shape than thin.")]
ChunkTokens = Annotated[int, typer.Option(min=1, help="Tokens in each chunk.")]
Ratio = Annotated[float, typer.Option(min=0.0, max=1.0, help="Recompute ratio.")]
Rounds = Annotated[int, typer.Option(min=1, help="How often each is measured; the median counts.")]
Threads = Annotated[int, typer.Option(min=1, help="Threads of torch.")]


def scale(
    shapes: Shapes = ["thin", "smollm2-135m"],  # noqa: B006
    model: TimedModel = None,
    tokens: Tokens = [4096, 16384, 32768, 65536],  # noqa: B006
    most: Most = 16384,
    chunk_tokens: ChunkTokens = 512,
    ratio: Ratio = RATIO,
    rounds: Rounds = 3,
    threads: Threads = 2,
    dtype: TimedDtype = "float32",
    json: Json = False,
) -> None:
    """Speed-up against the FLOP bound, and the peak memory that blending adds, from short prompts to long ones.

    Each point runs in a process of its own, with all chunks stored before.

    Examples:
        hf-blend bench scale --shape tiny --tokens 128 --chunk-tokens 64 --rounds 1 --json
        hf-blend bench scale  # slow
    """
    from hf_blend.evaluation.bench.scale import ScalePlan, measure_scale

    shapes = [timed("", model)] if model else shapes
    points = [(shape, count) for shape in shapes for count in tokens if shape == "thin" or count <= most]
    given: dict[str, Any] = {"chunk_tokens": chunk_tokens, "ratio": ratio, "rounds": rounds}
    found = measure_scale(ScalePlan(tuple(points), threads=threads, dtype=dtype, **given), progress=say)
    show(found if json else found["rows"], as_json=json, title=f"prefill at {ratio}, {dtype}", header=True)
