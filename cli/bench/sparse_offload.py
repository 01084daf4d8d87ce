# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Decoding over selected blocks, the others away from the device."""

from typing import Annotated

import typer

from ..options import Device, TimedDtype, TimedModel, timed
from ..output import Json, say, show

__all__ = ["sparse_offload"]

Shape = Annotated[str, typer.Option(help="Shape of the model; its weights are random.")]
Contexts = Annotated[list[int], typer.Option("--context", min=1, help="Tokens in the cache; may be repeated.")]
Shares = Annotated[list[float], typer.Option("--share", help="Of the blocks that are looked at; may be repeated.")]
Places = Annotated[list[str], typer.Option("--place", help="device, cpu or disk; may be repeated.")]
Tokens = Annotated[int, typer.Option(min=1, help="Tokens decoded in a turn.")]
Rounds = Annotated[int, typer.Option(min=1, help="Turns of each way; the median counts.")]
Folder = Annotated[str | None, typer.Option(help="For what goes to the disk; else the system's temporary folder.")]


def sparse_offload(
    shape: Shape = "thin",
    model: TimedModel = None,
    context: Contexts = [2048, 8192, 32768],  # noqa: B006
    share: Shares = [0.25],  # noqa: B006
    place: Places = ["device", "disk"],  # noqa: B006
    tokens: Tokens = 32,
    rounds: Rounds = 5,
    folder: Folder = None,
    dtype: TimedDtype = "float32",
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Tokens a second and bytes on the device where only selected blocks are there, beside dense decoding.

    Examples:
        hf-blend bench sparse-offload --shape tiny --context 256 --tokens 2 --rounds 1 --json  # slow
        hf-blend bench sparse-offload --context 32768 --share 0.25  # slow
    """
    from hf_blend.evaluation.bench.sparse_offload import SparseOffloadPlan, measure_sparse_offload
    from hf_blend.evaluation.bundled import choose_device

    shape = timed(shape, model)
    where = str(choose_device(device))
    given = (shape, tuple(context), tuple(share), tuple(place))
    plan = SparseOffloadPlan(*given, tokens=tokens, rounds=rounds, dtype=dtype, device=where, folder=folder)
    found = measure_sparse_offload(plan, progress=say)
    show(found if json else found["rows"], as_json=json, title=f"{shape}, sparse decoding", header=True)
