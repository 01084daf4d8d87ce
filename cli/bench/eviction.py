# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Which chunks stay in a full tier."""

from typing import Annotated

import typer

from ..output import Json, say, show

__all__ = ["eviction"]


def eviction(
    model: Annotated[str, typer.Option(help="chains, or a folder with the chain model's tokenizer.")] = "chains",
    stories: Annotated[int, typer.Option(min=2, help="Stories whose chunks are the corpus.")] = 24,
    questions: Annotated[int, typer.Option(min=1, help="Questions about each.")] = 4,
    requests: Annotated[int, typer.Option(min=1, help="Of one run of traffic.")] = 1000,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of traffic.")] = 10,
    cap: Annotated[list[float], typer.Option(min=0, help="Of the memory tier, as a share; repeatable.")] = [0.1, 0.3],  # noqa: B006
    rate: Annotated[float, typer.Option(min=1e-9, help="Of the slower tier, GB/s.")] = 0.5,
    served: Annotated[int, typer.Option(min=0, help="Requests of each cap to serve; 0 measures no times.")] = 48,
    served_rate: Annotated[float, typer.Option(min=1e-9, help="Of the slower tier while served, GB/s.")] = 0.02,
    json: Json = False,
) -> None:
    """Hit rates, loaded bytes and first-token times under Zipf traffic: LRU, LFU, and importance by attention.

    Examples:
        hf-blend bench eviction --stories 2 --questions 1 --requests 20 --seeds 2 --cap 0.5 --served 1 --json
        hf-blend bench eviction  # slow
    """
    from hf_blend.evaluation.bench.eviction import EvictionPlan, measure_eviction

    plan = EvictionPlan(model, stories, questions, requests, seeds, caps=tuple(cap), rate_gb_s=rate, served=served,
                        served_gb_s=served_rate)  # fmt: skip
    found = measure_eviction(plan, progress=say)
    show(found if json else found["rows"], as_json=json, title="what stays in a full tier", header=True)
