# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What a blended prefill costs the host."""

from typing import Annotated

import typer

from ..options import Device, Rounds, Shape, TimedDtype, TimedModel, timed
from ..output import Json, say, show

__all__ = ["overhead"]

Tokens = Annotated[int, typer.Option(min=64, help="Tokens in all chunks together.")]
Chunks = Annotated[list[int], typer.Option("--chunks", min=1, help="Number of chunks; may be repeated.")]


def overhead(
    shape: Shape = "tiny-deep",
    model: TimedModel = None,
    tokens: Tokens = 960,
    chunks: Chunks = [2, 6, 20, 64],  # noqa: B006
    rounds: Rounds = 15,
    dtype: TimedDtype = "float32",
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Kernels per layer, waits for the device, and host time of a blended prefill beside a stock one.

    Host time is that of a prompt so short that arithmetic does not hide the host.

    Examples:
        hf-blend bench overhead --shape tiny --tokens 64 --chunks 2 --rounds 1 --json
        hf-blend bench overhead  # slow
    """
    from hf_blend.evaluation.bench.overhead import OverheadPlan, measure_overhead

    shape, device = timed(shape, model, device)
    plan = OverheadPlan(shape, tokens, chunks=tuple(chunks), rounds=rounds, dtype=dtype, device=device)
    found = measure_overhead(plan, progress=say)
    show(found if json else found["rows"], as_json=json, title=f"{shape}, host cost of a prefill", header=True)
