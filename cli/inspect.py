# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Look inside one prompt: deviation, attention and what each selector takes."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .output import Json, fail, say, show

if TYPE_CHECKING:
    from hf_blend.evaluation.inspecting import Inspection

__all__ = ["inspect"]

Question = Annotated[str | None, typer.Argument(help="The question; without one, the first bundled one.")]
Files = Annotated[list[str] | None, typer.Argument(help="Documents to look into: files, folders; - is stdin.")]
Model = Annotated[str | None, typer.Option(help="Hub id or path; the default is the bundled reference model.")]
Selectors = Annotated[list[str] | None, typer.Option("--selector", help="A method, with options; may be repeated.")]
Ratio = Annotated[float, typer.Option(min=0.0, max=1.0, help="At which the selectors are compared.")]
Png = Annotated[Path | None, typer.Option(help="Draw the picture into this file; needs the extra plot.")]
ChunkTokens = Annotated[int, typer.Option(min=1, help="Documents are cut into chunks of this many tokens.")]
Store = Annotated[str, typer.Option(help="Where chunks are kept.")]


def inspect(
    question: Question = None,
    files: Files = None,
    model: Model = None,
    selector: Selectors = None,
    ratio: Ratio = 0.1,
    png: Png = None,
    chunk_tokens: ChunkTokens = 64,
    store: Store = "memory://",
    json: Json = False,
) -> None:
    """Show, for one prompt, how far stored KV is from that of a full prefill, and what the selectors do about it.

    Examples:
        hf-blend inspect --selector auto --selector kv-deviation
        hf-blend inspect --selector auto --json
        hf-blend inspect "Who keeps the light?" notes.txt --model HuggingFaceTB/SmolLM2-135M-Instruct  # network
    """
    from hf_blend import ChunkStore
    from hf_blend.evaluation.bundled import load_model
    from hf_blend.evaluation.inspecting import Inspector
    from hf_blend.evaluation.inspecting_plot import draw

    if question is not None and not files:
        fail(f"the question {question!r} came without documents. Name files behind it, or - for standard input.")
    loaded, tokenizer = load_model(model)
    with ChunkStore.open(store) as opened:
        pieces = _pieces(tokenizer, question, files or [], chunk_tokens)
        found = Inspector(loaded, tokenizer, opened, pieces).look(selector, ratio)
    if png is not None:
        draw(found, png)
        say(f"drawn into {png}")
    if json:
        show(found.to_dict(), as_json=True)
    else:
        _tables(found)


def _pieces(tokenizer: Any, question: str | None, files: list[str], chunk_tokens: int) -> dict[str, Any]:
    from hf_blend.evaluation.bundled import quickstart_questions
    from hf_blend.evaluation.documents import gather
    from hf_blend.evaluation.prompting import request, split

    if question is None:
        first = quickstart_questions()[0]
        return {name: first[name] for name in ("prefix", "chunks", "question")}
    texts = gather(files, sys.stdin)
    chunks = [chunk for text in texts for chunk in split(tokenizer, text, chunk_tokens)]
    return request(tokenizer, chunks, question, None)


def _tables(found: "Inspection") -> None:
    layers = [
        {
            "layer": layer,
            "mean_deviation": sum(row) / len(row),
            "rank_correlation": found.rank_correlation[layer],
            "attended_ratio": found.sparsity[layer],
        }
        for layer, row in enumerate(found.deviation)
    ]
    show(layers, header=True, title="by layer")
    ratios = [{"ratio": one, "attention_deviation": value} for one, value in found.attention_deviation.items()]
    show(ratios, header=True, title=f"the question's attention, tokens chosen by {found.selector}")
    for name, taken in found.chosen.items():
        typer.echo(typer.style(f"\n{name} at {found.ratio:g}", bold=True))
        typer.echo(" ".join(_mark(*pair) for pair in zip(found.tokens, taken, strict=True)))


def _mark(text: str, taken: bool) -> str:
    return typer.style(f"[{text.strip() or '⏎'}]", fg="yellow", bold=True) if taken else text
