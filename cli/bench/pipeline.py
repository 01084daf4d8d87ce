# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Pipeline and controller where loading and computing are sleeps."""

from typing import Annotated

import typer

from ..output import Json, say, show

__all__ = ["pipeline"]

Cells = Annotated[list[float] | None, typer.Option("--load-to-compute", help="A cell of the grid; may be repeated.")]
Rounds = Annotated[int, typer.Option(min=1, help="How often the ways of a cell take turns; the fastest counts.")]
PlanRounds = Annotated[int, typer.Option(min=1, help="How often the fixed plans and the controller take turns.")]
RowMs = Annotated[float, typer.Option(min=0.001, help="What a layer sleeps for each row, for the pipeline.")]
PlanRowMs = Annotated[float, typer.Option(min=0.001, help="The same, for the plans.")]


def pipeline(
    load_to_compute: Cells = None,
    rounds: Rounds = 5,
    plan_rounds: PlanRounds = 4,
    row_ms: RowMs = 2.4,
    plan_row_ms: PlanRowMs = 0.4,
    json: Json = False,
) -> None:
    """Loading beside computing, and the controller beside every fixed plan, where both only sleep.

    Examples:
        hf-blend bench pipeline --load-to-compute 1 --rounds 1 --plan-rounds 1 --row-ms 0.01 --json  # slow
        hf-blend bench pipeline --json  # slow
    """
    from hf_blend.evaluation.bench.pipeline import PipelinePlan, measure_pipeline

    cells = tuple(load_to_compute or PipelinePlan.cells)
    plan = PipelinePlan(cells=cells, rounds=rounds, plan_rounds=plan_rounds, row_ms=row_ms, plan_row_ms=plan_row_ms)
    found = measure_pipeline(plan, progress=say)
    show(found if json else found["rows"], as_json=json, title="Pipeline and controller", header=True)
