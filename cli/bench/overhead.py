# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What a blended prefill costs the host."""

from typing import Annotated

import typer

from ..options import Device, TimedDtype, TimedModel, timed
from ..output import Json, say, show

__all__ = ["overhead"]

Shape = Annotated[str, typer.Option(help="Shape of the model; its weights are random.")]
Tokens = Annotated[int, typer.Option(min=64, help="Tokens in all chunks together.")]
Chunks = Annotated[list[int], typer.Option("--chunks", min=1, help="Number of chunks; may be repeated.")]
Rounds = Annotated[int, typer.Option(min=1, help="How often host time is measured; the median counts.")]


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
    from hf_blend.evaluation.bundled import choose_device

    shape = timed(shape, model)
    where = str(choose_device(device))
    plan = OverheadPlan(shape, tokens, chunks=tuple(chunks), rounds=rounds, dtype=dtype, device=where)
    found = measure_overhead(plan, progress=say)
    show(found if json else found["rows"], as_json=json, title=f"{shape}, host cost of a prefill", header=True)
