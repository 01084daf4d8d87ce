# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Decoding from KV that does not fit the device."""

from typing import Annotated

import typer

from ..options import Device, TimedDtype, TimedModel, timed
from ..output import Json, say, show

__all__ = ["offload"]

Shape = Annotated[str, typer.Option(help="Shape of the model; its weights are random.")]
Contexts = Annotated[list[int], typer.Option("--context", min=1, help="Tokens in the cache; may be repeated.")]
Excess = Annotated[float, typer.Option(min=1, help="K and V of the context over what the device may hold.")]
Tokens = Annotated[int, typer.Option(min=1, help="Tokens decoded in a turn.")]
Rounds = Annotated[int, typer.Option(min=1, help="Turns of each cache; the median counts.")]
Folder = Annotated[str | None, typer.Option(help="For what goes to the disk; else the system's temporary folder.")]


def offload(
    shape: Shape = "smollm2-135m",
    model: TimedModel = None,
    context: Contexts = [4096, 16384],  # noqa: B006
    excess: Excess = 4.0,
    tokens: Tokens = 8,
    rounds: Rounds = 5,
    dtype: TimedDtype = "float32",
    folder: Folder = None,
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Tokens a second from KV that accelerate places on disk, beside KV on the device and `OffloadedCache`.

    Examples:
        hf-blend bench offload --shape tiny --context 512 --tokens 2 --rounds 1 --json
        hf-blend bench offload --context 16384 --excess 8  # slow
    """
    from hf_blend.evaluation.bench.offload import OffloadPlan, measure_offload
    from hf_blend.evaluation.bundled import choose_device

    shape = timed(shape, model)
    where = str(choose_device(device))
    plan = OffloadPlan(shape, tuple(context), excess, tokens, rounds, dtype, device=where, folder=folder)
    found = measure_offload(plan, progress=say)
    show(found if json else found["rows"], as_json=json, title=f"{shape}, KV beyond the device", header=True)
