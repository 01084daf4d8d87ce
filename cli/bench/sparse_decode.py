# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Decoding over selected blocks."""

from typing import Annotated

import typer

from ..options import Device, TimedDtype, TimedModel, timed
from ..output import Json, say, show

__all__ = ["sparse_decode"]

Shape = Annotated[str, typer.Option(help="Shape of the model; its weights are random.")]
Contexts = Annotated[list[int], typer.Option("--context", min=1, help="Tokens in the cache; may be repeated.")]
Shares = Annotated[list[float], typer.Option("--share", help="Of the blocks that are looked at; may be repeated.")]
Method = Annotated[str, typer.Option(help="Which scores blocks.")]
Tokens = Annotated[int, typer.Option(min=1, help="Tokens decoded in a turn.")]
Rounds = Annotated[int, typer.Option(min=1, help="Turns of each way; the median counts.")]


def sparse_decode(
    shape: Shape = "smollm2-135m",
    model: TimedModel = None,
    context: Contexts = [4096, 16384, 32768],  # noqa: B006
    share: Shares = [0.5, 0.25, 0.1],  # noqa: B006
    method: Method = "gsa",
    tokens: Tokens = 32,
    rounds: Rounds = 5,
    dtype: TimedDtype = "float32",
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Tokens a second over selected blocks beside dense decoding of the same cache, locked and unlocked.

    Examples:
        hf-blend bench sparse-decode --shape tiny --context 256 --share 0.5 --tokens 2 --rounds 1 --json
        hf-blend bench sparse-decode --context 32768 --share 0.25  # slow
    """
    from hf_blend.evaluation.bench.sparse_decode import SparsePlan, measure_sparse_decode
    from hf_blend.evaluation.bundled import choose_device

    shape = timed(shape, model)
    where = str(choose_device(device))
    plan = SparsePlan(shape, tuple(context), tuple(share), method, tokens, rounds, dtype, device=where)
    found = measure_sparse_decode(plan, progress=say)
    show(found if json else found["rows"], as_json=json, title=f"{shape}, sparse decoding", header=True)
