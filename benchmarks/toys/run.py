# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What the two bundled models answer: instruments of the development, whose figures say little about other models.

python benchmarks/toys/run.py eviction > benchmarks/results/eviction.json
"""

import json
from typing import Annotated, Any

import typer
from context_shift import measure_context_shift
from eviction import EvictionPlan, measure_eviction
from partial_quality import measure_partial_quality
from self_extend import measure_self_extend
from sparse_offload_answers import measure_sparse_offload_answers
from sparse_quality import measure_sparse_quality

from hf_blend.cli.output import say

app = typer.Typer(help=__doc__, add_completion=False)
Count = Annotated[int, typer.Option(min=1, help="Questions.")]


def shown(found: dict[str, Any]) -> None:
    """Print a result file."""
    typer.echo(json.dumps(found, indent=1))


@app.command()
def context_shift(
    windows: Annotated[int, typer.Option(min=2, help="Windows that are read, then written.")] = 20,
) -> None:
    """Read stories and write text for many windows with a cache of one; each shift beside a fresh prefill."""
    shown(measure_context_shift(windows, progress=say))


@app.command()
def self_extend(
    times: Annotated[list[int], typer.Option(min=1, help="Prompt length in trained lengths.")] = [1, 2, 4],  # noqa: B006
    count: Count = 200,
) -> None:
    """Ask about a story among filler, beyond the trained length, with Self-Extend and without."""
    shown(measure_self_extend(tuple(times), count, progress=say))


@app.command()
def sparse_quality(
    count: Count = 200,
    method: Annotated[list[str], typer.Option(help="Scores blocks.")] = ["gsa", "mean-key", "kvstar", "quest"],  # noqa: B006
) -> None:
    """Answer with dense and sparse steps, locked and unlocked."""
    shown(measure_sparse_quality(count, method, progress=say))


@app.command()
def sparse_offload(count: Count = 200) -> None:
    """Answer from selected blocks of K and V on disk."""
    shown(measure_sparse_offload_answers(count, progress=say))


@app.command()
def partial_quality(
    count: Count = 200,
    model: Annotated[str, typer.Option(help="chains, reference, or a folder with one's tokenizer.")] = "chains",
    batch: Annotated[int, typer.Option(min=1, help="Questions of one forward.")] = 1,
    ratio: Annotated[float, typer.Option(help="Share of the tokens that is recomputed.")] = 0.15,
) -> None:
    """Answer over a part of the stored KV, after a restart."""
    shown(measure_partial_quality(count, model, batch, ratio, progress=say))


@app.command()
def eviction(
    stories: Annotated[int, typer.Option(min=2, help="Stories whose chunks are the corpus.")] = 24,
    questions: Annotated[int, typer.Option(min=1, help="Questions about each.")] = 4,
    requests: Annotated[int, typer.Option(min=1, help="Of one run of traffic.")] = 1000,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of traffic.")] = 10,
    cap: Annotated[list[float], typer.Option(help="Of the memory tier, as a share.")] = [0.1, 0.3],  # noqa: B006
    served: Annotated[int, typer.Option(min=0, help="Requests of each cap to serve; 0 measures no times.")] = 48,
) -> None:
    """Compare hit rates, bytes and first tokens under Zipf traffic: LRU, LFU, and importance by attention."""
    plan = EvictionPlan("chains", stories, questions, requests, seeds, caps=tuple(cap), served=served)
    shown(measure_eviction(plan, progress=say))


if __name__ == "__main__":
    app()
