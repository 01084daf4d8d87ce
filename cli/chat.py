# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Talk about documents, and see what was retrieved."""

import os
import select
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import typer

from hf_blend.errors import PromptError

from . import options
from .choosing import choose_config
from .output import Json, say, show
from .reading import COST, load, read, say_limits, split

if TYPE_CHECKING:
    from hf_blend.evaluation.asking import Chat

__all__ = ["chat"]

WORDS = (
    "Ask something. /sources names what the last answer read, /stats what it cost, /reset forgets the conversation, "
    "/quit ends it."
)


def chat(
    corpus: options.Corpus = None,
    model: options.Model = options.REAL,
    store: options.Store = None,
    top_k: options.TopK = 4,
    ratio: options.Ratio = None,
    selector: options.Selector = None,
    chunk_tokens: options.ChunkTokens = 512,
    system: options.System = None,
    max_new_tokens: options.MaxNewTokens = 256,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    allow_unverified: options.Unverified = False,
    json: Json = False,
) -> None:
    """Answer one question after the other, each from the chunks of documents that it is about.

    The conversation is one cache, which is healed while nobody asks. Questions are read from standard input, a line
    each: from a terminal, a pipe or a file. Ctrl-C stops an answer; /quit, Ctrl-D or Ctrl-C at the prompt ends.

    Examples:
        hf-blend chat --store my-chunks
        hf-blend chat --store my-chunks --json
        hf-blend chat notes/ --model HuggingFaceTB/SmolLM2-135M-Instruct  # network
    """
    from hf_blend import ChunkStore
    from hf_blend.evaluation.answering import blend_config
    from hf_blend.evaluation.asking import Chat, Pipeline
    from hf_blend.evaluation.bundled import open_model
    from hf_blend.evaluation.retrieving import Retriever

    blend_config(selector, recompute_ratio=ratio)  # refuses wrong settings before the weights are read
    names = corpus or []
    if "-" in names:
        raise PromptError(f"the documents are {names}, but standard input brings the questions here. Name files.")
    documents = read(names)
    source = open_model(model, device, dtype)
    with ChunkStore.open(store) as opened:
        retriever = Retriever(split(documents, source, chunk_tokens), top_k)
        pipeline = Pipeline(load(source, opened), source.tokenizer, opened)
        config = replace(choose_config(pipeline, selector, ratio, allow_unverified), edits="blend")
        conversation = Chat(pipeline, source, retriever, config, system, max_new_tokens)
        rows = _converse(conversation, json)
    if json:
        show({"rows": rows, "left_out": documents.rows()}, as_json=True)


def _converse(conversation: "Chat", json: bool) -> list[dict[str, Any]]:
    """Answer until there are no more questions; gives a row for each answer."""
    if sys.stdin.isatty():
        say(WORDS)
    rows = []
    while (line := _next_line(conversation)) is not None:
        if line == "/reset":
            conversation.reset()
        elif line == "/stats":
            say(conversation.stats())
        elif line == "/sources":
            question = conversation.question
            say(question.retrieved if question else "Nothing was asked yet.")
        elif line.startswith("/"):
            say(f"There is no {line.split()[0]}. {WORDS}")
        elif line:
            if not json and not sys.stdin.isatty():
                typer.echo(typer.style(line, bold=True))
            row = _answer(conversation, line, json)
            if row is not None:
                rows.append(row)
    return rows


def _is_idle() -> bool:
    """Whether no line was typed yet; on Windows nobody can tell."""
    return os.name == "posix" and not select.select([sys.stdin], [], [], 0)[0]


def _next_line(conversation: "Chat") -> str | None:
    """The next line, until which the conversation is healed; None at the end."""
    try:
        if sys.stdin.isatty():
            typer.echo("> ", nl=False, err=True)
            conversation.heal_while(_is_idle)
        line = sys.stdin.readline()
    except KeyboardInterrupt:
        return None
    text = line.strip()
    return None if not line or text in ("/quit", "/exit") else text


def _answer(conversation: "Chat", text: str, json: bool) -> dict[str, Any] | None:
    """Answer one question; no row if it was stopped or cannot be asked."""
    tell = None if json else (lambda piece: typer.echo(piece, nl=False))
    try:
        question = conversation.prepare(text)
        say_limits(conversation.retriever, question, conversation.source)
        answer = conversation.answer(question, tell)
    except KeyboardInterrupt:
        say("\n(stopped)")
        return None
    except PromptError as error:
        say(f"hf-blend: {error}")
        return None
    if not json:
        typer.echo()
        say(COST.format(answer.ttft_ms / 1e3, **answer.cost))
        typer.echo(f"{question.retrieved}\n")
    report = answer.report
    return {
        "question": text,
        "answer": answer.text,
        "ttft_ms": answer.ttft_ms,
        "sources": question.source_rows(),
        "chunks": {"loaded": report.loaded_chunks, "computed": report.computed_chunks} if report else {},
        "past_tokens": report.past_tokens if report else 0,
        **answer.cost,
    }
