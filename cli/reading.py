# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Documents for a command: read, split, and said what was left out of them."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .output import say

if TYPE_CHECKING:
    from hf_blend.evaluation.asking import Asked
    from hf_blend.evaluation.bundled import ModelSource
    from hf_blend.evaluation.documents import Document
    from hf_blend.evaluation.retrieving import Retriever
    from hf_blend.evaluation.splitting import Piece

__all__ = ["read", "say_limits", "split"]

SAMPLE = 20_000  # letters that are looked at for words that a model does not know


def read(names: Sequence[str]) -> "list[Document]":
    """Read documents, and say what was left out.

    Args:
        names: files, folders; "-" is standard input.

    Returns:
        The documents.

    Raises:
        PromptError: a file that was named cannot be read, or there is none.
    """
    from hf_blend.evaluation.documents import Corpus

    corpus = Corpus(names, sys.stdin)
    documents = list(corpus)
    if corpus.left_out:
        say(corpus.said())
    return documents


def split(
    documents: "Sequence[Document]", source: "ModelSource", chunk_tokens: int, questions: Sequence[str] = ()
) -> "list[Piece]":
    """Split documents, and say so if the model does not know their words.

    Args:
        documents: what to split.
        source: the model.
        chunk_tokens: most tokens of a piece.
        questions: what is asked about them.

    Returns:
        The pieces.
    """
    from hf_blend.evaluation.documents import unknown_words
    from hf_blend.evaluation.splitting import Splitter

    text = "\n".join([*questions, *(document.text[:SAMPLE] for document in documents)])
    if said := unknown_words(source.tokenizer, text[:SAMPLE]):
        say(f"{said} Name another with --model.")
    return Splitter(source.tokenizer, chunk_tokens).split_all(documents)


def say_limits(retriever: "Retriever", asks: "Sequence[Asked]", source: "ModelSource") -> None:
    """Say where retrieval found nothing, or found more than the model can read."""
    for asked in asks:
        if not retriever.knows(asked.question):
            say(f"No word of {asked.question!r} is in the documents: their beginnings are read.")
        if asked.squeezed_out:
            found = len(asked.sources) + asked.squeezed_out
            say(f"The model reads {source.positions:,} tokens: {len(asked.sources)} of {found} pieces found fit.")
