# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Ask a question over documents: retrieve, answer with stored KV, name the sources."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_blend.errors import ConfigError, PromptError

from .options import (
    RATIO,
    SELECTOR,
    Controller,
    Device,
    Dtype,
    IndexedTokens,
    Model,
    Partial,
    Ratio,
    Selector,
    Store,
    TopK,
    Unverified,
)  # fmt: skip
from .output import Json, interruptible, say, show
from .reading import read, say_limits, split

if TYPE_CHECKING:
    from hf_blend import ChunkStore
    from hf_blend.evaluation.asking import Asked, Reply
    from hf_blend.evaluation.bundled import ModelSource
    from hf_blend.evaluation.documents import Document
    from hf_blend.prefill.report import BlendReport

__all__ = ["ask"]

Question = Annotated[str | None, typer.Argument(help="The question; without one, the bundled questions are asked.")]
Files = Annotated[list[str] | None, typer.Argument(help="Documents to ask about: files, folders; - is stdin.")]
Questions = Annotated[
    Path | None, typer.Option(help="File with a question on each line; all arguments are documents then.")
]
Compare = Annotated[bool, typer.Option("--compare", help="Beside blending, also full prefill and full reuse.")]
Rounds = Annotated[int, typer.Option(min=1, help="With --compare: times each method is timed; the median counts.")]
System = Annotated[str | None, typer.Option(help="Text before the documents.")]
MOST_SHOWN = 400  # tokens of a prompt in which the recomputed ones are marked
MaxNewTokens = Annotated[int, typer.Option(min=1, help="Where an answer is cut.")]


def ask(
    question: Question = None,
    files: Files = None,
    questions: Questions = None,
    model: Model = None,
    store: Store = None,
    top_k: TopK = 8,
    ratio: Ratio = RATIO,
    selector: Selector = SELECTOR,
    partial: Partial = None,
    controller: Controller = False,
    compare: Compare = False,
    rounds: Rounds = 1,
    chunk_tokens: IndexedTokens = None,
    system: System = None,
    max_new_tokens: MaxNewTokens = 32,
    device: Device = "auto",
    dtype: Dtype = "auto",
    allow_unverified: Unverified = False,
    json: Json = False,
) -> None:
    """Answer from the pieces of documents that a question is about, and name their sources.

    What is stored of the pieces is reused, what is not is computed and stored: hf-blend index does so ahead of time.

    Examples:
        hf-blend ask --store my-chunks
        hf-blend ask --store my-chunks --compare --json
        hf-blend ask --store my-chunks --partial 0.25 --json
        hf-blend ask --store my-chunks --controller --json  # slow
        hf-blend ask "Who keeps the light?" notes/ --model HuggingFaceTB/SmolLM2-135M-Instruct  # network
    """
    from hf_blend import ChunkStore
    from hf_blend.evaluation import asking
    from hf_blend.evaluation.answering import Method, blend_config
    from hf_blend.evaluation.bundled import open_model
    from hf_blend.loading.controller import LoadingController

    config = blend_config(selector, recompute_ratio=ratio, allow_unverified=allow_unverified)
    if rounds > 1 and not compare:
        raise ConfigError(f"got --rounds {rounds} without --compare. Methods are timed in turns only with it.")
    given, documents = _given(question, files or [], questions)
    source = open_model(model or ("reference" if given else "chains"), device, dtype)
    shown = _Shown(json, compare, is_listed=questions is not None)
    ways = asking.methods(config, compare)
    asks: list[Asked] = []
    with ChunkStore.open(store, partial=partial) as opened, interruptible(lambda: shown.kept(len(asks))):
        asks = _asks(given, documents, source, opened, top_k, chunk_tokens, system, max_new_tokens)
        loaded = source.load()
        opened.controller = LoadingController(loaded, opened, config) if controller else None
        for asked in asks:
            told = (loaded, source.tokenizer, opened, asked)
            if compare and (report := asking.warm(*told, Method("blend", config))):
                shown.reports.append(report)
            shown.begin(asked)
            replies = [asking.ask(*told, way, max_new_tokens, shown.stream) for way in ways]
            if compare:
                asking.time_again(*told, list(zip(ways, replies, strict=True)), rounds)
            shown.end(asked, replies)
    shown.result()


def _given(question: str | None, files: list[str], questions: Path | None) -> "tuple[list[str], list[Document]]":
    """The questions and the documents; neither for the bundled ones."""
    from hf_blend.evaluation.documents import read_file

    if question is None and questions is None:
        return [], []
    first = [question] if question is not None else []
    if questions is None:
        given, names = [one.strip() for one in first], files
    else:
        (listed,) = read_file(questions, str(questions))
        given, names = [line.strip() for line in listed.text.splitlines() if line.strip()], [*first, *files]
    if not all(given):
        raise PromptError(f"the question is {question!r}, but a text is expected. Write it before the documents.")
    if not names:
        told = f"{question!r} is a path: write the question before it." if Path(given[0]).exists() else "Name some."
        raise PromptError(f"the question {given[0]!r} came without documents. {told} Or give - for standard input.")
    return given, read(names)


def _asks(
    given: list[str],
    documents: "list[Document]",
    source: "ModelSource",
    store: "ChunkStore",
    top_k: int,
    chunk_tokens: int | None,
    system: str | None,
    max_new_tokens: int,
) -> "list[Asked]":
    from hf_blend.evaluation.asking import Asked, prepare
    from hf_blend.evaluation.bundled import long_questions, quickstart_questions
    from hf_blend.evaluation.retrieving import Retriever

    if not given:
        names = ("prefix", "chunks", "question")
        ours = long_questions() if source.name == "chains" else quickstart_questions()
        return [Asked({name: one[name] for name in names}, one["question"], one["answer"]) for one in ours]
    retriever = Retriever(split(documents, source, chunk_tokens, given, store), top_k)
    asks = [prepare(source, retriever, question, system, max_new_tokens) for question in given]
    say_limits(retriever, asks, source)
    return asks


class _Shown:
    """What is printed, while answers come and behind them."""

    def __init__(self, json: bool, compare: bool, is_listed: bool) -> None:
        self.reports: list[BlendReport] = []
        self._replies: list[Reply] = []
        self._json, self._compare, self._is_listed = json, compare, is_listed
        self._is_marked = False

    def stream(self, text: str) -> None:
        """Print a part of an answer as it comes."""
        if not (self._json or self._compare):
            typer.echo(text, nl=False)

    def begin(self, asked: "Asked") -> None:
        """Before a question is answered."""
        if self._is_listed and not self._json and not self._compare:
            typer.echo(typer.style(asked.question, bold=True))

    def end(self, asked: "Asked", replies: "list[Reply]") -> None:
        """When a question was answered."""
        from hf_blend.prefill.advice import Advice

        self._replies += replies
        self.reports += [reply.answer.report for reply in replies if reply.answer.report and not self._compare]
        if self._json:
            return
        if self._compare:
            typer.echo(typer.style(f"\n{asked.question}", bold=True))
            if len(tokens := replies[-1].tokens) <= MOST_SHOWN:
                self._is_marked = True
                typer.echo(" ".join(_mark(text) if chosen else text for text, chosen in tokens))
        else:
            typer.echo()
        for decided in (reply.answer.report.advice for reply in replies if reply.answer.report):
            if decided:
                say(f"Controller: {Advice(**decided)}")
        if asked.sources:
            typer.echo(f"Sources: {', '.join(asked.names)}" + ("\n" if self._is_listed else ""))

    def kept(self, count: int) -> str:
        """What Ctrl-C leaves."""
        done = sum(report.computed_chunks for report in self.reports)
        answered = len({reply.row["question"] for reply in self._replies})
        return (
            f"{answered} of {count} questions are answered; the {done} chunks computed for them are stored. Run the "
            "same command again: what is stored is loaded."
        )

    def result(self) -> None:
        """When all is answered."""
        names = ("computed", "loaded")
        chunks = {name: sum(getattr(report, f"{name}_chunks") for report in self.reports) for name in names}
        rows = [reply.row for reply in self._replies]
        if self._json:
            show({"rows": rows, "chunks": chunks}, as_json=True)
            return
        if self._compare:
            typer.echo()
            title = "recomputed tokens stand out above" if self._is_marked else None
            show([_readable(row) for row in rows], title=title, header=True)
        said = "the text before the documents counts as a chunk"
        say(f"{chunks['loaded']} chunks loaded from the store, {chunks['computed']} computed ({said})")


def _mark(text: str) -> str:
    """A recomputed token, standing out on a terminal and in a pipe."""
    shown = text.replace("\n", "\u23ce")
    return (typer.style(shown, reverse=True) if sys.stdout.isatty() else f"[{shown}]") + "\n" * text.count("\n")


def _readable(row: dict[str, Any]) -> dict[str, Any]:
    right = {True: "right", False: "WRONG", None: ""}[row["correct"]]
    return {
        **{name: value for name, value in row.items() if name not in ("sources", "advice")},
        "correct": right,
        "ttft_ms": round(row["ttft_ms"], 1),
        "charged_budget": f"{row['charged_budget']:.0%}",
    }
