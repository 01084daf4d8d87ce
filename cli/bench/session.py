# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A conversation kept."""

from typing import Annotated

import typer

from ..options import Device, TimedDtype, TimedModel, timed
from ..output import Json, say, show

__all__ = ["session"]

Shape = Annotated[str, typer.Option(help="Shape of the model; its weights are random.")]
System = Annotated[int, typer.Option(min=1, help="Tokens before the first turn.")]
Turn = Annotated[int, typer.Option(min=1, help="Tokens of each question; answers are as long.")]
Turns = Annotated[int, typer.Option(min=1, help="How many turns.")]
Rounds = Annotated[int, typer.Option(min=1, help="How often each is measured; the median counts.")]


def session(
    shape: Shape = "smollm2-135m",
    model: TimedModel = None,
    system_tokens: System = 512,
    turn_tokens: Turn = 64,
    turns: Turns = 10,
    rounds: Rounds = 5,
    dtype: TimedDtype = "float32",
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Time to the first token of each turn: kept cache against full prefill, and what saving it costs.

    Examples:
        hf-blend bench session --shape tiny --system-tokens 40 --turn-tokens 8 --turns 2 --rounds 1 --json
        hf-blend bench session --turns 4  # slow
    """
    from hf_blend.evaluation.bench.session import SessionPlan, measure_session
    from hf_blend.evaluation.bundled import choose_device

    shape = timed(shape, model)
    plan = SessionPlan(shape, system_tokens, turn_tokens, turns, rounds, dtype, device=str(choose_device(device)))
    found = measure_session(plan, progress=say)
    show(found if json else found["rows"], as_json=json, title=f"{shape}, turn by turn", header=True)
