# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Decoding speed."""

from typing import Annotated

import typer

from ..options import Device, Rounds, Shape, TimedDtype, TimedModel, timed
from ..output import Json, say, show

__all__ = ["decode"]

Contexts = Annotated[list[int], typer.Option("--context", min=1, help="Tokens in the cache; may be repeated.")]
Tokens = Annotated[int, typer.Option(min=1, help="Tokens decoded in a turn.")]


def decode(
    shape: Shape = "smollm2-135m",
    model: TimedModel = None,
    context: Contexts = [1024, 4096, 16384],  # noqa: B006
    tokens: Tokens = 8,
    rounds: Rounds = 7,
    dtype: TimedDtype = "float32",
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Tokens a second with a blend cache beside transformers' dynamic and static caches, in turns.

    Examples:
        hf-blend bench decode --shape tiny --context 64 --tokens 2 --rounds 1 --json
        hf-blend bench decode --context 4096  # slow
    """
    from hf_blend.evaluation.bench.decode import DecodePlan, measure_decode

    shape, device = timed(shape, model, device)
    found = measure_decode(DecodePlan(shape, tuple(context), tokens, rounds, dtype, device=device), progress=say)
    show(found if json else found["rows"], as_json=json, title=f"{shape}, decoding", header=True)
