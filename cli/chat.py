# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Talk about documents, and see what was retrieved."""

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import typer

from hf_blend.errors import PromptError
from hf_blend.evaluation.parsing import FileLimits

from . import options
from .calibrating import choose_config
from .choosing import COST, LOOP, meaning_of, open_encoder, open_source, top_k_or_default
from .output import Json, say, show
from .reading import choose_files, load, read, say_limits, split

if TYPE_CHECKING:
    from hf_blend.evaluation.asking import Chat

__all__ = ["chat"]

WORDS = (
    "Ask something. /sources names what the last answer read, /stats what it cost, /reset forgets the conversation, "
    "/quit ends it."
)


def chat(
    corpus: options.Corpus = None,
    model: options.Model = None,
    store: options.Store = None,
    top_k: options.TopK = None,
    meaning: options.Meaning = None,
    ratio: options.Ratio = None,
    selector: options.Selector = None,
    chunk_tokens: options.IndexedTokens = None,
    system: options.System = None,
    max_new_tokens: options.MaxNewTokens = 256,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    allow_unverified: options.Unverified = False,
    include: options.Include = None,
    exclude: options.Exclude = None,
    file_megabytes: options.FileMegabytes = options.MEGABYTES,
    file_seconds: options.FileSeconds = options.SECONDS,
    verbose: options.Verbose = False,
    json: Json = False,
) -> None:
    """Answer one question after the other, each from the pieces of documents that it is about.

    Questions are read from standard input, a line each: from a terminal, a pipe or a file. Ctrl-C stops an answer;
    /quit, Ctrl-D or Ctrl-C at the prompt ends.

    Examples:
        hf-blend chat --store my-chunks
        hf-blend chat --store my-chunks --json
        hf-blend chat notes/ --model HuggingFaceTB/SmolLM2-135M-Instruct  # network
    """
    from hf_blend import ChunkStore
    from hf_blend.evaluation.answering import blend_config
    from hf_blend.evaluation.asking import Chat, Pipeline
    from hf_blend.evaluation.retrieving import Retriever

    blend_config(selector, recompute_ratio=ratio)  # refuses wrong settings before the weights are read
    if "-" in (names := corpus or []):
        raise PromptError(f"the documents are {names}, but standard input brings the questions here. Name files.")
    encoder = open_encoder(meaning, device)
    documents = read(names, FileLimits(file_megabytes, file_seconds), choose_files(include, exclude), verbose)
    source = open_source(model, device, dtype, verbose)
    with ChunkStore.open(store) as opened:
        pieces = split(documents, source, chunk_tokens, store=opened)
        most = top_k_or_default(top_k, source, pieces, max_new_tokens)
        retriever = Retriever(pieces, most, meaning_of(encoder, pieces, opened))
        pipeline = Pipeline(load(source, opened), source.tokenizer, opened)
        config = choose_config(pipeline, selector, ratio, allow_unverified)
        talk = Chat(pipeline, source, retriever, config, system, max_new_tokens)
        rows = list(_talk(talk, json))
    if json:
        show({"rows": rows, "left_out": documents.left_out}, as_json=True)


def _talk(talk: "Chat", json: bool) -> Iterator[dict[str, Any]]:
    """Answer until there are no more questions; gives a row for each answer."""
    if sys.stdin.isatty():
        say(WORDS)
    while (question := _next()) is not None:
        if question == "/reset":
            talk.reset()
        elif question == "/stats":
            say(talk.stats())
        elif question == "/sources":
            say(talk.question.retrieved if talk.question else "Nothing was asked yet.")
        elif question.startswith("/"):
            say(f"There is no {question.split()[0]}. {WORDS}")
        elif question:
            if not (json or sys.stdin.isatty()):
                typer.echo(typer.style(question, bold=True))
            row = _answer(talk, question, json)
            yield from [row] if row else []


def _next() -> str | None:
    """The next line; None at the end."""
    try:
        if sys.stdin.isatty():
            typer.echo("> ", nl=False, err=True)
        line = sys.stdin.readline()
    except KeyboardInterrupt:
        line = ""
    question = line.strip()
    return None if not line or question in ("/quit", "/exit") else question


def _answer(talk: "Chat", question: str, json: bool) -> dict[str, Any]:
    """Answer one question; an empty row if it was stopped or cannot be asked."""
    try:
        prepared = talk.prepare(question)
        say_limits(talk.retriever, [prepared], talk.source)
        got = talk.answer(prepared, None if json else lambda text: typer.echo(text, nl=False))
    except KeyboardInterrupt:
        say("\n(stopped)")
        return {}
    except PromptError as error:
        say(f"hf-blend: {error}")
        return {}
    if got.is_loop:
        say(f"\n{LOOP.format('blend')}")
    if not json:
        typer.echo()
        say(COST.format(got.ttft_ms / 1e3, **got.gain))
        typer.echo(f"{prepared.retrieved}\n")
    sources = [{"name": source.name, "start": source.start, "stop": source.stop} for source in prepared.sources]
    chunks = {name: getattr(got.report, f"{name}_chunks", 0) for name in ("loaded", "computed")}
    return {
        "question": question, "answer": got.text, "ttft_ms": got.ttft_ms, "sources": sources, "chunks": chunks,
        "is_loop": got.is_loop, "past_tokens": getattr(got.report, "past_tokens", 0), **got.gain,
    }  # fmt: skip
