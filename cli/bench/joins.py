# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""How much of stored chunks is reused in prompts that are one text."""

from typing import Annotated

import typer

from ..output import Json, say, show

__all__ = ["joins"]

Tokenizers = Annotated[list[str], typer.Option("--tokenizer", help="Folder of a tokenizer; may be repeated.")]
Passages = Annotated[str | None, typer.Option(help="JSON lines, each with a list 'chunks'; else bundled documents.")]
Count = Annotated[int, typer.Option(min=1, help="How many passages are read.")]


def joins(
    tokenizer: Tokenizers = [],  # noqa: B006
    passages: Passages = None,
    count: Count = 300,
    json: Json = False,
) -> None:
    """Store passages, join them in six ways, tokenise each prompt as a whole, and count the tokens that are reused.

    Examples:
        hf-blend bench joins
        hf-blend bench joins --json
    """
    from hf_blend.evaluation.bench.joins import bundled_passages, measure_joins, read_passages

    texts = bundled_passages() if passages is None else read_passages(passages, count)
    found = measure_joins(tokenizer, texts, progress=say)
    show(found if json else found["rows"], as_json=json, title="Tokens of stored chunks that are reused", header=True)
