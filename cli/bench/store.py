# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What verifying costs."""

from pathlib import Path
from typing import Annotated

import typer

from ..options import Rounds
from ..output import Json, say, show

__all__ = ["store"]

Entries = Annotated[int, typer.Option(min=1, help="Large entries that are read.")]
Tokens = Annotated[int, typer.Option(min=1, help="Tokens in each.")]
Small = Annotated[int, typer.Option(min=1, help="Tiny entries that a store is opened with.")]
Folder = Annotated[Path | None, typer.Option(help="Where to write; the default is a temporary folder.")]


def store(
    entries: Entries = 8,
    tokens: Tokens = 512,
    small_entries: Small = 10_000,
    rounds: Rounds = 5,
    folder: Folder = None,
    json: Json = False,
) -> None:
    """Read and verify entries, warm and cold, beside plain reads of the same bytes; put them; open a full store.

    Examples:
        hf-blend bench store --entries 2 --tokens 16 --small-entries 20 --rounds 1 --json
        hf-blend bench store --folder .  # slow
    """
    from hf_blend.evaluation.bench.store import StorePlan, measure_store

    found = measure_store(
        StorePlan(entries, tokens, rounds=rounds, small_entries=small_entries, folder=folder), progress=say
    )
    rows = [{"state": state, **found[state]} for state in ("warm", "cold")]
    show(found if json else rows, as_json=json, title="reading entries", header=True)
