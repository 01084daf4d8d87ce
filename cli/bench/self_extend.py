# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Reading beyond the trained length."""

from typing import Annotated

import typer

from ..output import Json, say, show

__all__ = ["self_extend"]

Times = Annotated[list[int], typer.Option(min=1, help="Prompt length in trained lengths; may be repeated.")]
Count = Annotated[int, typer.Option(min=1, help="Questions at each length.")]


def self_extend(times: Times = [1, 2, 4], count: Count = 200, json: Json = False) -> None:  # noqa: B006
    """Questions about a story among filler, at 1, 2 and 4 times the trained length, with Self-Extend and without.

    Examples:
        hf-blend bench self-extend --times 1 --count 2 --json
        hf-blend bench self-extend --times 2 --times 4 --count 50  # slow
    """
    from hf_blend.evaluation.bench.self_extend import measure_self_extend

    found = measure_self_extend(tuple(times), count, progress=say)
    show(found if json else found["rows"], as_json=json, title="needle questions, exact match", header=True)
