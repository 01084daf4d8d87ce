# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Ask a question over documents, and see what reusing their KV changes."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .output import Json, fail, say, show

if TYPE_CHECKING:
    from hf_blend.evaluation.asking import Asked, Reply
    from hf_blend.prefill.report import BlendReport

__all__ = ["ask"]

Question = Annotated[str | None, typer.Argument(help="The question; without one, the bundled questions are asked.")]
Files = Annotated[list[str] | None, typer.Argument(help="Documents to ask about: files, folders; - is stdin.")]
Questions = Annotated[
    Path | None, typer.Option(help="File with a question on each line; all arguments are documents then.")
]
Model = Annotated[str | None, typer.Option(help="Hub id or path; the default is a bundled model.")]
Store = Annotated[str | None, typer.Option("--store", help="Folder of the chunk store; the default is the library's.")]
Ratio = Annotated[float, typer.Option(help="Share of the reusable tokens that is recomputed, 0 to 1.")]
Selector = Annotated[str, typer.Option(help="Which tokens are recomputed: a method, with its options.")]
Compare = Annotated[bool, typer.Option("--compare", help="Beside blending, also full prefill and full reuse.")]
ChunkTokens = Annotated[int, typer.Option(min=1, help="Documents are cut into chunks of this many tokens.")]
System = Annotated[str | None, typer.Option(help="Text before the documents.")]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="Where an answer is cut.")]
Unverified = Annotated[bool, typer.Option("--allow-unverified", help="Use a model that was not found to be exact.")]


def ask(
    question: Question = None,
    files: Files = None,
    questions: Questions = None,
    model: Model = None,
    store: Store = None,
    ratio: Ratio = 0.15,
    selector: Selector = "kv-deviation",
    compare: Compare = False,
    chunk_tokens: ChunkTokens = 512,
    system: System = None,
    max_new_tokens: MaxNewTokens = 32,
    allow_unverified: Unverified = False,
    json: Json = False,
) -> None:
    """Answer from documents, reusing what is stored of them and storing what is not.

    Examples:
        hf-blend ask --store my-chunks
        hf-blend ask --store my-chunks --compare --json
        hf-blend ask "Who keeps the light?" notes.txt --model HuggingFaceTB/SmolLM2-135M-Instruct  # network
    """
    from hf_blend import ChunkStore
    from hf_blend.evaluation import asking
    from hf_blend.evaluation.answering import blend_config
    from hf_blend.evaluation.bundled import load_model

    given = [question] if question else []
    if questions is not None:
        files, given = [*given, *(files or [])], _lines(questions)
    if given and not files:
        question = given[0]
        fail(f"the question {question!r} came without documents. Name files behind it, or - for standard input.")
    config = blend_config(selector, recompute_ratio=ratio, allow_unverified=allow_unverified)
    model = model or ("reference" if given else "chains")
    loaded, tokenizer = load_model(model)
    replies: list[Reply] = []
    reports: list[BlendReport] = []
    with ChunkStore.open(store) as opened:
        for asked in _asked(model, tokenizer, given, files or [], chunk_tokens, system):
            if compare and (warmed := asking.warm(loaded, tokenizer, opened, asked, asking.Method("blend", config))):
                reports.append(warmed)
            for method in asking.methods(config, compare):
                stream = None if json or compare else _stream
                replies.append(asking.ask(loaded, tokenizer, opened, asked, method, max_new_tokens, stream))
                if stream:
                    typer.echo()
            if compare and not json:
                _marked(asked, replies[-1])
    reports += [reply.answer.report for reply in replies if reply.answer.report and not compare]
    _result(replies, reports, compare, json)


def _asked(
    model: str, tokenizer: Any, questions: list[str], files: list[str], chunk_tokens: int, system: str | None
) -> "list[Asked]":
    from hf_blend.evaluation.asking import Asked, pieces, split
    from hf_blend.evaluation.bundled import long_questions, quickstart_questions
    from hf_blend.evaluation.documents import gather, unknown_words

    if not questions:
        given = long_questions() if model == "chains" else quickstart_questions()
        names = ("prefix", "chunks", "question")
        return [Asked({name: one[name] for name in names}, one["question"], one["answer"]) for one in given]
    texts = gather(files, sys.stdin)
    if said := unknown_words(tokenizer, "\n".join([*texts, *questions])):
        say(f"{said} Name another with --model.")
    chunks = [chunk for text in texts for chunk in split(tokenizer, text, chunk_tokens)]
    return [Asked(pieces(tokenizer, chunks, question, system), question) for question in questions]


def _lines(path: Path) -> list[str]:
    """The questions in a file."""
    from hf_blend.evaluation.asking import read_documents

    return [line.strip() for line in read_documents([str(path)], ())[0].splitlines() if line.strip()]


def _stream(text: str) -> None:
    typer.echo(text, nl=False)


def _marked(asked: "Asked", reply: "Reply") -> None:
    """Show the documents with the recomputed tokens standing out."""
    typer.echo(typer.style(f"\n{asked.question}", bold=True))
    typer.echo(" ".join(_mark(text) if chosen else text for text, chosen in reply.tokens))


def _mark(text: str) -> str:
    """A recomputed token, standing out on a terminal and in a pipe."""
    shown = text.replace("\n", "\u23ce")
    return (typer.style(shown, reverse=True) if sys.stdout.isatty() else f"[{shown}]") + "\n" * text.count("\n")


def _result(replies: "list[Reply]", reports: "list[BlendReport]", compare: bool, json: bool) -> None:
    chunks = {
        "computed": sum(report.computed_chunks for report in reports),
        "loaded": sum(report.loaded_chunks for report in reports),
    }
    rows = [reply.row for reply in replies]
    if json:
        show({"rows": rows, "chunks": chunks}, as_json=True)
    elif compare:
        typer.echo()
        show([_readable(row) for row in rows], title="recomputed tokens stand out above", header=True)
    if not json:
        say(f"{chunks['loaded']} chunks loaded, {chunks['computed']} computed (the beginning of a prompt is one, too)")


def _readable(row: dict[str, Any]) -> dict[str, Any]:
    right = {True: "right", False: "WRONG", None: ""}[row["correct"]]
    return {
        **row,
        "correct": right,
        "ttft_ms": round(row["ttft_ms"], 1),
        "charged_budget": f"{row['charged_budget']:.0%}",
    }
