# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Hybrid models: linear attention, state spaces and convolutions between layers of attention."""

from typing import Annotated

import typer

from ..options import RATIO, Device, TimedDtype, TimedModel, timed
from ..output import Json, say, show

__all__ = ["hybrids"]

Shapes = Annotated[list[str], typer.Option("--shape", help="Shapes of hybrid models; their weights are random.")]
Chunks = Annotated[int, typer.Option(min=1, help="Chunks before the question.")]
ChunkTokens = Annotated[int, typer.Option(min=1, help="Tokens of each.")]
Ratio = Annotated[float, typer.Option(min=0.0, max=1.0, help="Recompute ratio.")]
Rounds = Annotated[int, typer.Option(min=1, help="How often each is measured, in turn; medians count.")]
Clock = Annotated[str, typer.Option(help="wall, or cpu: this process's own time, where others use the cores too.")]


def hybrids(
    shape: Shapes = ["lfm2-350m", "qwen3.5-12-layers"],  # noqa: B006
    model: TimedModel = None,
    chunks: Chunks = 8,
    chunk_tokens: ChunkTokens = 512,
    ratio: Ratio = RATIO,
    rounds: Rounds = 5,
    clock: Clock = "wall",
    dtype: TimedDtype = "float32",
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Time of a blended prefill of a hybrid model beside stock, the bound that stock's parts set, and stored bytes.

    Examples:
        hf-blend bench hybrids --shape tiny-hybrid --chunks 2 --chunk-tokens 30 --rounds 1 --json
        hf-blend bench hybrids --shape lfm2-350m  # slow
    """
    from hf_blend.evaluation.bench.hybrids import HybridsPlan, measure_hybrids
    from hf_blend.evaluation.bundled import choose_device

    where = str(choose_device(device))
    shapes = (timed("", model),) if model else tuple(shape)
    plan = HybridsPlan(
        shapes, chunks, chunk_tokens, ratio=ratio, rounds=rounds, dtype=dtype, device=where, clock=clock
    )
    found = measure_hybrids(plan, progress=say)
    title = f"{chunks} chunks of {chunk_tokens} tokens"
    show(found if json else found["rows"], as_json=json, title=title, header=True)
