# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A corpus of many small chunks."""

from typing import Annotated

import typer

from ..output import Json, say, show

__all__ = ["corpus"]


def corpus(
    chunks: Annotated[int, typer.Option(min=4, help="Unlike chunks.")] = 100_000,
    chunk_tokens: Annotated[int, typer.Option(min=4, help="Tokens of each.")] = 16,
    workers: Annotated[list[int], typer.Option(min=1, help="Processes of a run; may be repeated.")] = [1, 2],  # noqa: B006
    json: Json = False,
) -> None:
    """Index many small chunks with datasets and several processes, kill and resume it, and open the store.

    Examples:
        hf-blend bench corpus --chunks 60 --workers 1 --json
        hf-blend bench corpus --chunks 2000  # slow
    """
    from hf_blend.evaluation.bench.corpus import CorpusPlan, measure_corpus

    found = measure_corpus(CorpusPlan(chunks, chunk_tokens, tuple(workers)), progress=say)
    show(found if json else found["rows"], as_json=json, title="a corpus of small chunks", header=True)
