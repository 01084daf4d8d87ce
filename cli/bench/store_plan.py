# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Plans of where chunks are kept, beside what is best."""

from typing import Annotated

import typer

from ..output import Json, say, show

__all__ = ["store_plan"]

TokenTable = Annotated[int | None, typer.Option(min=1, help="How many of the cells, from the first on.")]
Rounds = Annotated[int, typer.Option(min=1, help="Requests from each device; the median counts.")]
Tokens = Annotated[int, typer.Option(min=16, help="Tokens of each of the four chunks.")]


def store_plan(cells: TokenTable = None, rounds: Rounds = 5, chunk_tokens: Tokens = 256, json: Json = False) -> None:
    """Whether the device that `store plan` chooses is the best one when throttled tiers are measured.

    Examples:
        hf-blend bench store-plan --cells 1 --rounds 1 --chunk-tokens 16 --json
        hf-blend bench store-plan --rounds 5  # slow
    """
    from hf_blend.evaluation.bench.store_plan import CELLS, StorePlanPlan, measure_store_plan

    found = measure_store_plan(StorePlanPlan(CELLS[:cells], chunk_tokens=chunk_tokens, rounds=rounds), progress=say)
    rows = [{**row, "devices": len(row["devices"])} for row in found["rows"]]
    show(found if json else rows, as_json=json, title="plans and what is best", header=True)
