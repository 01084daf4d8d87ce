# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Questions and documents for a command: read, split, retrieved, and said what was left out."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hf_blend.errors import PromptError

from .output import say

if TYPE_CHECKING:
    from hf_blend import ChunkStore
    from hf_blend.evaluation.asking import Question
    from hf_blend.evaluation.bundled import ModelSource
    from hf_blend.evaluation.documents import Document
    from hf_blend.evaluation.retrieving import Piece, Retriever

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
    """Split documents as they were when they were indexed; say what a model does not know, and what is not found.

    Without documents, the pages of the bundled handbook are given.
    """
    from hf_blend.evaluation.documents import unknown_words
    from hf_blend.evaluation.indexing import bundled_pieces
    from hf_blend.evaluation.retrieving import CHUNK_TOKENS, Splitter
    from hf_blend.evaluation.sources import Sources

    if not documents:
        return list(bundled_pieces(source.tokenizer))
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


def read_questions(
    question: str | None, files: Sequence[str], listed: Path | None = None
) -> "tuple[list[str], list[Document]]":
    """Read the questions and the documents; neither for the bundled ones."""
    from hf_blend.evaluation.documents import read_file

    if question is None and listed is None:
        return [], []
    first = [question] if question is not None else []
    if listed is None:
        given, names = [one.strip() for one in first], list(files)
    else:
        (lines,) = read_file(listed, str(listed))
        given, names = [line.strip() for line in lines.text.splitlines() if line.strip()], [*first, *files]
    if not all(given):
        raise PromptError(f"the question is {question!r}, but a text is expected. Write it before the documents.")
    if not names:
        told = f"{given[0]!r} is a path: write the question before it" if Path(given[0]).exists() else "Name some"
        raise PromptError(f"the question {given[0]!r} came without documents. {told}, or give - for standard input.")
    return given, read(names)


def prepare(
    source: "ModelSource",
    questions: Sequence[str],
    documents: "Sequence[Document]",
    top_k: int,
    chunk_tokens: int | None,
    system: str | None = None,
    max_new_tokens: int = 1,
    store: "ChunkStore | None" = None,
) -> "list[Question]":
    """Put each question into a prompt with what is retrieved for it; without any, the bundled questions."""
    from hf_blend.evaluation import asking, bundled
    from hf_blend.evaluation.answering import request
    from hf_blend.evaluation.retrieving import Retriever

    if not questions:
        pages = bundled.handbook_questions()
        given = [request(source.tokenizer, one["chunks"], one["question"], system) for one in pages]
        return [asking.Question(one["question"], made) for one, made in zip(pages, given, strict=True)]
    retriever = Retriever(split(documents, source, chunk_tokens, questions, store), top_k)
    asks = [asking.prepare(source, retriever, question, system, max_new_tokens) for question in questions]
    say_limits(retriever, asks, source)
    return asks


def say_limits(retriever: "Retriever", asks: "Sequence[Question]", source: "ModelSource") -> None:
    """Say where retrieval found nothing, or found more than the model can read."""
    for asked in asks:
        if not retriever.knows(asked.name):
            say(f"No word of {asked.name!r} is in the documents: their beginnings are read.")
        if asked.squeezed_out:
            found = len(asked.sources) + asked.squeezed_out
            say(f"The model reads {source.positions:,} tokens: {len(asked.sources)} of {found} pieces found fit.")
