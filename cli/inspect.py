# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Look inside one prompt: what is stored, chosen and recomputed."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hf_blend.evaluation.parsing import FileLimits

from . import options
from .choosing import open_source
from .output import Json, marked, show
from .reading import choose_files, load, prepare, read_questions

if TYPE_CHECKING:
    from hf_blend.evaluation.inspecting import Inspection

__all__ = ["inspect"]

Selectors = Annotated[list[str] | None, typer.Option("--selector", help="A method, with options; may be repeated.")]
Html = Annotated[
    Path | None,
    typer.Option(
        help="Answer by full prefill, full reuse and the first selector; write times, answers and tokens here."
    ),
]
At = Annotated[float, typer.Option("--ratio", min=0.0, max=1.0, help="At which the selectors are compared.")]


def inspect(
    question: options.Question = None,
    documents: options.Documents = None,
    model: options.Model = None,
    selector: Selectors = None,
    ratio: At = options.RATIO,
    top_k: options.TopK = None,
    chunk_tokens: options.ChunkTokens = 512,
    store: options.Place = "memory://",
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    include: options.Include = None,
    exclude: options.Exclude = None,
    file_megabytes: options.FileMegabytes = options.MEGABYTES,
    file_seconds: options.FileSeconds = options.SECONDS,
    verbose: options.Verbose = False,
    html: Html = None,
    json: Json = False,
) -> None:
    """Show, for one prompt, how far stored KV is from that of a full prefill, and what the selectors do about it.

    Examples:
        hf-blend inspect --selector query-attention --selector kv-deviation
        hf-blend inspect --html figure.html  # slow
        hf-blend inspect --selector boundary --json
        hf-blend inspect "Who keeps the light?" notes.txt --model HuggingFaceTB/SmolLM2-135M-Instruct  # network
    """
    from hf_blend import ChunkStore
    from hf_blend.evaluation.answering import blend_config
    from hf_blend.evaluation.asking import Pipeline
    from hf_blend.evaluation.demo.drawing import NEW_TOKENS, figure_of
    from hf_blend.evaluation.inspecting import Inspector

    for name in selector or ():
        blend_config(name)  # refuses what is no selector
    limits, files = FileLimits(file_megabytes, file_seconds), choose_files(include, exclude)
    questions, read = read_questions(question, documents or [], None, limits, files, verbose)
    source = open_source(model, device, dtype, verbose)
    prompt = prepare(source, questions, read, top_k, chunk_tokens, max_new_tokens=1 if html is None else NEW_TOKENS)[0]
    with ChunkStore.open(store) as opened:
        if html is not None:
            config = blend_config(selector[0] if selector else None, recompute_ratio=ratio)
            pipeline = Pipeline(load(source), source.tokenizer, opened)
            html.write_text(figure_of(pipeline, prompt, config), "utf-8")
            show({"html": str(html)} | ({"left_out": read.left_out} if json else {}), as_json=json)
            return
        inspection = Inspector(load(source), source.tokenizer, opened, prompt.request).look(selector, ratio)
    if json:
        show(asdict(inspection) | {"left_out": read.left_out}, as_json=True)
    else:
        _tables(inspection)


def _tables(inspection: "Inspection") -> None:
    layers = [
        {
            "layer": layer,
            "mean_deviation": sum(row) / len(row),
            "rank_correlation": inspection.rank_correlation[layer],
            "attended_ratio": inspection.sparsity[layer],
        }
        for layer, row in enumerate(inspection.deviation)
    ]
    show(layers, header=True, title="by layer")
    ratios = [
        {"ratio": ratio, "attention_deviation": value} for ratio, value in inspection.attention_deviation.items()
    ]
    show(ratios, header=True, title=f"the question's attention, tokens chosen by {inspection.selector}")
    numbers = {
        name: f" {number}" if len(inspection.chosen) > 1 else "" for number, name in enumerate(inspection.chosen, 1)
    }
    names = ", ".join(f"{number} {name}".strip() for name, number in numbers.items())
    typer.echo(typer.style(f"\nTokens that stand out are recomputed at {inspection.ratio:g} by {names}", bold=True))
    takers = [
        [number for taken, number in zip(row, numbers.values(), strict=True) if taken]
        for row in zip(*inspection.chosen.values(), strict=True)
    ]
    rows = zip(inspection.tokens, takers, strict=True)
    typer.echo(marked((f"{token}{''.join(chosen)}", bool(chosen)) for token, chosen in rows))
