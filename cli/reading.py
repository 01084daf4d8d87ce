# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Questions and documents for a command: read, split, retrieved, and said what was left out."""

import contextlib
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from hf_blend.errors import PromptError
from hf_blend.evaluation.folder_files import ALL_FILES, FileFilter
from hf_blend.evaluation.parsing import LIMITS, FileLimits, short_reason

from .choosing import meaning_of, top_k_or_default
from .output import progress, said_if_slow, say

if TYPE_CHECKING:
    from torch import nn

    from hf_blend import ChunkStore
    from hf_blend.evaluation.asking import Question
    from hf_blend.evaluation.bundled import ModelSource
    from hf_blend.evaluation.documents import Corpus
    from hf_blend.evaluation.meaning import Encoder
    from hf_blend.evaluation.retrieving import Piece, Retriever, Splitter

CHECKING = "Checking which model this is, by all its weights, and whether it is exact: once for each run."
SAMPLE = 20_000  # letters that are looked at for words that a model does not know


class Documents:
    """Documents that were read, and what was left out, which is said."""

    def __init__(self, corpus: "Corpus", verbose: bool = False) -> None:
        self._corpus, self._verbose, self._told = corpus, verbose, 0
        self.listed = list(corpus)
        self.say_left_out()

    @property
    def left_out(self) -> list[dict[str, str]]:
        """A row for each file or document that was left out."""
        return [{"name": name, "reason": reason} for name, reason in self._corpus.left_out]

    def say_left_out(self) -> None:
        """Say what was left out since this was said last."""
        if said := self._corpus.said(self._told, names_all=self._verbose):
            say(said)
        self._told = len(self._corpus.left_out)

    @property
    def limits(self) -> FileLimits:
        """What a file may take."""
        return self._corpus.limits

    def split(self, splitters: "Iterable[Splitter]") -> "list[Piece]":
        """Split each by its own splitter; what takes too long is left out."""
        pieces, count = [], 0
        for document, splitter in zip(self.listed, splitters, strict=True):
            try:
                pieces += splitter.split(document)
                count += 1
            except PromptError as error:
                self._corpus.leave_out(document.name, short_reason(error))
        self.say_left_out()
        if not count:
            raise PromptError(f"none of {len(self.listed)} documents can be split. {self._corpus.said()} Give others.")
        return pieces


def read(
    names: Sequence[str], limits: FileLimits = LIMITS, file_filter: FileFilter = ALL_FILES, verbose: bool = False
) -> Documents:
    """Read documents, and say what was left out."""
    from hf_blend.evaluation.documents import Corpus

    return Documents(Corpus(names, sys.stdin, limits, file_filter, partial(progress, what="files")), verbose)


def load(source: "ModelSource", store: "ChunkStore | None" = None, blends: bool = True) -> "nn.Module":
    """Read a model's weights, find out who it is and whether it blends; say if a store has other models' documents."""
    from hf_blend import BlendCache, BlendConfig, ChunkStore
    from hf_blend.errors import HfBlendError
    from hf_blend.evaluation.sources import Sources
    from hf_blend.model.canary import canary_of
    from hf_blend.model.fingerprint import fingerprint

    model = source.load()
    with said_if_slow(CHECKING), contextlib.suppress(HfBlendError):  # what uses the model refuses it
        models = {indexed.fingerprint: indexed.model for indexed in (Sources(store) if store is not None else ())}
        if fingerprint(model) not in models and (names := ", ".join(sorted({*models.values()}))):
            say(
                f"The store's documents were indexed with {names}; {source.name}, as it is loaded now, finds none of "
                "their chunks. Name that model with --model, or index the documents with this one."
            )
        canary_of(model)
        if blends:
            BlendCache(model, ChunkStore.open("memory://"), BlendConfig(allow_unverified=True))
    return model


def choose_files(include: Sequence[str] | None, exclude: Sequence[str] | None) -> FileFilter:
    """The files of folders that `--include` and `--exclude` choose."""
    return FileFilter(tuple(include or ()), tuple(exclude or ()))


def split(
    documents: Documents,
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

    if not documents.listed:
        return list(bundled_pieces(source.tokenizer))
    text = "\n".join([*questions, *(document.text[:SAMPLE] for document in documents.listed)])
    if said := unknown_words(source.tokenizer, text[:SAMPLE]):
        say(f"{said} Name another with --model.")
    indexed = {} if store is None else Sources(store).chunk_tokens(documents.listed, source.name)
    others = sorted({size for size in indexed.values() if chunk_tokens not in (None, size)})
    if others:
        say(
            f"Documents were indexed with --chunk-tokens {', '.join(map(str, others))}, not {chunk_tokens}: what is "
            "stored of them is not found. Leave the option out to split them as they were indexed."
        )
    sizes = [chunk_tokens or indexed.get(document.name, CHUNK_TOKENS) for document in documents.listed]
    splitters = {size: Splitter(source.tokenizer, size, documents.limits) for size in {*sizes}}
    return documents.split(splitters[size] for size in sizes)


def read_questions(
    question: str | None,
    files: Sequence[str],
    listed: Path | None = None,
    limits: FileLimits = LIMITS,
    file_filter: FileFilter = ALL_FILES,
    verbose: bool = False,
) -> tuple[list[str], Documents]:
    """Read the questions, a line each, and the documents; neither for the bundled ones."""
    from hf_blend.evaluation.documents import read_file

    if question is None and listed is None:
        return [], read([])
    first = [question] if question is not None else []
    if listed is None:
        questions, names = [text.strip() for text in first], list(files)
    else:
        lines = [line.strip() for file in read_file(listed, str(listed)) for line in file.text.split("\n")]
        questions, names = [line for line in lines if line], [*first, *files]
    if not all(questions):
        raise PromptError(f"the question is {question!r}, but a text is expected. Write it before the documents.")
    if not names:
        told = (
            f"{questions[0]!r} is a path: write the question before it" if Path(questions[0]).exists() else "Name some"
        )
        raise PromptError(
            f"the question {questions[0]!r} came without documents. {told}, or give - for standard input."
        )
    return questions, read(names, limits, file_filter, verbose)


def prepare(
    source: "ModelSource",
    questions: Sequence[str],
    documents: Documents,
    top_k: int | None,
    chunk_tokens: int | None,
    system: str | None = None,
    max_new_tokens: int = 1,
    store: "ChunkStore | None" = None,
    encoder: "Encoder | None" = None,
) -> "list[Question]":
    """Put each question into a prompt with what is retrieved for it; without any, the bundled questions."""
    from hf_blend.evaluation import asking, bundled
    from hf_blend.evaluation.answering import build_request
    from hf_blend.evaluation.retrieving import Retriever

    if not questions:
        pages = bundled.handbook_questions()
        requests = [build_request(source.tokenizer, page["chunks"], page["question"], system) for page in pages]
        return [asking.Question(page["question"], made) for page, made in zip(pages, requests, strict=True)]
    pieces = split(documents, source, chunk_tokens, questions, store)
    most = top_k_or_default(top_k, source, pieces, max_new_tokens)
    retriever = Retriever(pieces, most, meaning_of(encoder, pieces, store))
    asks = [asking.prepare(source, retriever, question, system, max_new_tokens) for question in questions]
    say_limits(retriever, asks, source)
    return asks


def say_limits(retriever: "Retriever", asks: "Sequence[Question]", source: "ModelSource") -> None:
    """Say where retrieval found nothing, or found more than the model can read."""
    for question in asks:
        if not retriever.knows(question.name):
            say(f"No word of {question.name!r} is in the documents: their beginnings are read.")
        if question.squeezed_out:
            pieces = len(question.sources) + question.squeezed_out
            say(f"The model reads {source.positions:,} tokens: {len(question.sources)} of {pieces} pieces found fit.")
