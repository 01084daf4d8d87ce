# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Reading and writing past the window."""

from typing import Annotated

import typer

from ..output import Json, say, show

__all__ = ["context_shift"]

Windows = Annotated[int, typer.Option(min=2, help="How many windows are read, and then written.")]


def context_shift(windows: Windows = 20, json: Json = False) -> None:
    """Read stories and write text for many windows with a cache of one; each shift beside a fresh prefill.

    Examples:
        hf-blend bench context-shift --windows 2 --json  # slow
        hf-blend bench context-shift --windows 20  # slow
    """
    from hf_blend.evaluation.bench.context_shift import measure_context_shift

    found = measure_context_shift(windows, progress=say)
    rows = [{"part": name, **found[name]} for name in ("reading", "writing")]
    if json:
        show(found, as_json=True)
        return
    for row in rows:
        show(row, title=row.pop("part"))
