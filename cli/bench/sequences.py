# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Sequences over one storage."""

from typing import Annotated

import typer

from ..options import Device, TimedDtype, TimedModel, timed
from ..output import Json, say, show

__all__ = ["sequences"]

Shape = Annotated[str, typer.Option(help="Shape of the model; its weights are random.")]
Prefix = Annotated[int, typer.Option(min=1, help="Tokens that all sequences share.")]
Tails = Annotated[list[int], typer.Option("--tail-tokens", min=1, help="Tokens of each sequence's own, increasing.")]
Sequences = Annotated[int, typer.Option(min=2, help="How many sequences.")]
Rounds = Annotated[int, typer.Option(min=1, help="How many steps are measured; the median counts.")]


def sequences(
    shape: Shape = "smollm2-135m",
    model: TimedModel = None,
    prefix_tokens: Prefix = 4096,
    tail_tokens: Tails = [16, 64, 256],  # noqa: B006
    sequences: Sequences = 8,
    rounds: Rounds = 7,
    dtype: TimedDtype = "float32",
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Time of a decoding step of a batch, and bytes: a shared prefix held once against stock caches.

    Examples:
        hf-blend bench sequences --shape tiny --prefix-tokens 60 --tail-tokens 4 --rounds 1 --json
        hf-blend bench sequences --tail-tokens 64  # slow
    """
    from hf_blend.evaluation.bench.sequences import SequencesPlan, measure_sequences
    from hf_blend.evaluation.bundled import choose_device

    shape = timed(shape, model)
    plan = SequencesPlan(
        shape, prefix_tokens, tuple(tail_tokens), sequences, rounds, dtype, device=str(choose_device(device))
    )
    found = measure_sequences(plan, progress=say)
    show(found if json else found["rows"], as_json=json, title=f"{shape}, {sequences} sequences", header=True)
