# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Documents for a command: read, split, and said what was left out of them."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .output import say

if TYPE_CHECKING:
    from hf_blend import ChunkStore
    from hf_blend.evaluation.asking import Asked
    from hf_blend.evaluation.bundled import ModelSource
    from hf_blend.evaluation.documents import Document
    from hf_blend.evaluation.retrieving import Piece, Retriever

__all__ = ["read", "say_limits", "split"]

SAMPLE = 20_000  # letters that are looked at for words that a model does not know


def read(names: Sequence[str]) -> "list[Document]":
    """Read documents, and say what was left out."""
    from hf_blend.evaluation.documents import Corpus

    corpus = Corpus(names, sys.stdin)
    documents = list(corpus)
    if corpus.left_out:
        say(corpus.said())
    return documents


def split(
    documents: "Sequence[Document]",
    source: "ModelSource",
    chunk_tokens: int | None,
    questions: Sequence[str] = (),
    store: "ChunkStore | None" = None,
) -> "list[Piece]":
    """Split documents as they were when they were indexed; say what a model does not know, and what is not found."""
    from hf_blend.evaluation.documents import unknown_words
    from hf_blend.evaluation.retrieving import CHUNK_TOKENS, Splitter
    from hf_blend.evaluation.sources import Sources

    text = "\n".join([*questions, *(document.text[:SAMPLE] for document in documents)])
    if said := unknown_words(source.tokenizer, text[:SAMPLE]):
        say(f"{said} Name another with --model.")
    indexed = {} if store is None else Sources(store).chunk_tokens(documents, source.name)
    others = sorted({size for size in indexed.values() if chunk_tokens not in (None, size)})
    if others:
        say(
            f"Documents were indexed with --chunk-tokens {', '.join(map(str, others))}, not {chunk_tokens}: what is "
            "stored of them is not found. Leave the option out to split them as they were indexed."
        )
    splitters = {size: Splitter(source.tokenizer, size) for size in {chunk_tokens or CHUNK_TOKENS, *indexed.values()}}
    sizes = (chunk_tokens or indexed.get(document.name, CHUNK_TOKENS) for document in documents)
    return [piece for one, size in zip(documents, sizes, strict=True) for piece in splitters[size].split(one)]


def say_limits(retriever: "Retriever", asks: "Sequence[Asked]", source: "ModelSource") -> None:
    """Say where retrieval found nothing, or found more than the model can read."""
    for asked in asks:
        if not retriever.knows(asked.question):
            say(f"No word of {asked.question!r} is in the documents: their beginnings are read.")
        if asked.squeezed_out:
            found = len(asked.sources) + asked.squeezed_out
            say(f"The model reads {source.positions:,} tokens: {len(asked.sources)} of {found} pieces found fit.")
