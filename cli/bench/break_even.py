# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""From which length on blending pays."""

from typing import Annotated

import typer

from ..options import RATIO, SELECTOR, Device, Rounds, Shape, TimedDtype, TimedModel, timed
from ..output import Json, say, show

__all__ = ["break_even"]

Tokens = Annotated[list[int], typer.Option("--tokens", min=4, help="Tokens of the documents; may be repeated.")]
Methods = Annotated[list[str], typer.Option("--method", help="A selector with @ and a ratio; may be repeated.")]


def break_even(
    shape: Shape = "smollm2-135m",
    model: TimedModel = None,
    tokens: Tokens = [64, 128, 256, 512],  # noqa: B006
    method: Methods = [f"{SELECTOR}@{RATIO:g}", "boundary@0.05"],  # noqa: B006
    rounds: Rounds = 7,
    dtype: TimedDtype = "float32",
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Find the length from which on blending is faster. Every chunk is in memory.

    Examples:
        hf-blend bench break-even --shape tiny --tokens 32 --rounds 1 --json
        hf-blend bench break-even --tokens 256 --tokens 1024  # slow
    """
    from hf_blend.evaluation.bench.ttft import TtftPlan, measure_break_even

    shape, device = timed(shape, model, device)
    plan = TtftPlan(shape, rounds=rounds, dtype=dtype, device=device)
    found = measure_break_even(plan, sorted(tokens), method, progress=say)
    show(found if json else found["rows"], as_json=json, title=f"{shape}, short prompts", header=True)
