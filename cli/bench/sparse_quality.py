# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Answers over selected blocks."""

from typing import Annotated

import typer

from ..output import Json, say, show

__all__ = ["sparse_quality"]

Count = Annotated[int, typer.Option(min=1, help="Questions.")]
Methods = Annotated[list[str], typer.Option("--method", help="Which scores blocks; may be repeated.")]


def sparse_quality(
    count: Count = 200,
    method: Methods = ["gsa", "mean-key", "kvstar", "quest"],  # noqa: B006
    json: Json = False,
) -> None:
    """Right answers of the reference model with dense and sparse steps, locked and unlocked.

    Examples:
        hf-blend bench sparse-quality --count 1 --method gsa --json
        hf-blend bench sparse-quality  # slow
    """
    from hf_blend.evaluation.bench.sparse_quality import measure_sparse_quality

    found = measure_sparse_quality(count, method, progress=say)
    show(found if json else found["rows"], as_json=json, title="answers over selected blocks", header=True)
