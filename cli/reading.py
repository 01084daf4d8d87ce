# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Questions and documents for a command: read, split, retrieved, and said what was left out."""

import contextlib
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from hf_blend.errors import PromptError

from .options import REAL
from .output import progress, said_if_slow, say

if TYPE_CHECKING:
    from torch import nn

    from hf_blend import ChunkStore
    from hf_blend.evaluation.asking import Question
    from hf_blend.evaluation.bundled import ModelSource
    from hf_blend.evaluation.documents import Corpus
    from hf_blend.evaluation.retrieving import Piece, Retriever

CHECKING = "Reading all weights to know which model this is and, the first time, checking that it blends exactly."
COST = "First token after {:.2f} s: {reused_tokens} of {prompt_tokens} tokens reused, {recomputed_tokens} recomputed."


def read(names: Sequence[str]) -> "Corpus":
    """Read documents, and say what was left out."""
    from hf_blend.evaluation.documents import read_corpus

    corpus = read_corpus(names, sys.stdin, partial(progress, what="files"))
    if corpus.left_out:
        say(corpus.summary())
    return corpus


def read_for(question: str | None, names: Sequence[str]) -> "Corpus":
    """Read the documents that a question is about; none for the bundled questions."""
    if question is None:
        return read([])
    if not question.strip():
        raise PromptError(f"the question is {question!r}, but a text is expected. Write it before the documents.")
    if not names:
        advice = f"{question!r} is a path: write the question before it" if Path(question).exists() else "Name some"
        raise PromptError(f"the question {question!r} came without documents. {advice}, or give - for standard input.")
    return read(names)


def load(source: "ModelSource", store: "ChunkStore | None" = None, blends: bool = True) -> "nn.Module":
    """Read a model's weights, find out who it is and whether it blends; say if a store has other models' documents."""
    from hf_blend import BlendCache, BlendConfig, ChunkStore
    from hf_blend.errors import HfBlendError
    from hf_blend.model.identity import fingerprint

    if source.name == REAL and blends:
        say(f"{REAL} has 135 M parameters: it often answers wrongly, by full prefill too. --model names another.")
    model = source.load()
    with said_if_slow(CHECKING), contextlib.suppress(HfBlendError):  # what uses the model refuses it
        identity = fingerprint(model)
        stored = [] if store is None else [entry.fingerprint for entry in store.entries()]
        if stored and identity not in stored:
            say(
                f"The store's {len(stored):,} chunks are of other models; {source.name}, as it is loaded now, finds "
                "none of them. Name their model with --model, or index the documents with this one."
            )
        if blends:
            BlendCache(model, ChunkStore.open("memory://"), BlendConfig(allow_unverified=True))
    return model


def split(corpus: "Corpus", source: "ModelSource", chunk_tokens: int) -> "list[Piece]":
    """Split documents; without any, give the bundled handbook's pages."""
    from hf_blend.evaluation.indexing import bundled_pieces
    from hf_blend.evaluation.retrieving import Splitter

    if not corpus.documents:
        return list(bundled_pieces(source.tokenizer))
    return Splitter(source.tokenizer, chunk_tokens).split_all(corpus.documents)


def say_limits(retriever: "Retriever", question: "Question", source: "ModelSource") -> None:
    """Say where retrieval found nothing, or found more than the model can read."""
    if not retriever.knows(question.name):
        say(f"No word of {question.name!r} is in the documents: their beginnings are read.")
    if question.squeezed_out:
        fitting = len(question.sources)
        pieces = fitting + question.squeezed_out
        say(f"The model reads {source.positions:,} tokens: {fitting} of {pieces} chunks found fit.")
