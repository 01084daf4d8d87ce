# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Make the figures of a paper with your own model: `python benchmarks/reproduce.py cacheblend --model MODEL`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from papers.cacheblend import PAPERS, TASKS, data_files

from hf_blend.cli.options import REAL, Device, Dtype
from hf_blend.cli.output import Json, progress, say, show
from hf_blend.evaluation.bundled import choose_device
from hf_blend.evaluation.trial import EvalConfig

Paper = Annotated[str, typer.Argument(help="cacheblend, impress or kvstar.")]
Model = Annotated[str, typer.Option(help="Hub id, folder, or smollm2.")]
Data = Annotated[Path | None, typer.Option(help="Folder of JSONL files named after tasks; else they are downloaded.")]
Tasks = Annotated[list[str] | None, typer.Option("--task", help="May be repeated; the default is the paper's four.")]
Limit = Annotated[int, typer.Option(min=1, help="Samples of each task.")]
Small = Annotated[bool, typer.Option("--small", help="Two values of each thing that varies.")]
Draft = Annotated[str | None, typer.Option(help="kvstar: a smaller model with the same tokenizer; else a copy.")]
Output = Annotated[Path, typer.Option(help="Folder of the run; a stopped run resumes there.")]
SHOWN = (  # of figures that compare methods; of others all columns are
    "figure", "varied", "task", "method", "ratio", "n", "score", "charged_budget", "ttft_ms", "speedup",
)  # fmt: skip


def reproduce(
    paper: Paper,
    model: Model = REAL,
    data: Data = None,
    task: Tasks = None,
    limit: Limit = 50,
    small: Small = False,
    draft: Draft = None,
    output_dir: Output = Path("reproduction"),
    device: Device = "auto",
    dtype: Dtype = "auto",
    json: Json = False,
) -> None:
    """Run the comparisons of a paper: one JSON file, and each figure as CSV.

    Every answer is paired with full prefill on the same prompt.
    """
    if paper not in PAPERS:
        raise typer.BadParameter(f"there is no paper {paper!r}, only {', '.join(PAPERS)}")
    names = tuple(task or TASKS)
    files = data_files(data, names) if data else ()
    if data:
        left = [name for name in names if name not in dict(files)]
        names = tuple(dict(files))
        say(f"{', '.join(f'{name}: {Path(path).name}' for name, path in files)}; no file: {', '.join(left) or 'none'}")
    kind = None if dtype == "auto" else dtype
    base = EvalConfig(names, (model,), limit=limit, data=files, dtype=kind, device=str(choose_device(device)))

    def told(what: str, parts: Iterator[Any], count: int) -> Iterator[Any]:
        return progress(parts, what, total=count, quiet=json)

    if draft and paper != "kvstar":
        raise typer.BadParameter(f"--draft {draft} is for kvstar alone, but the paper is {paper}")
    made = PAPERS[paper](base, output_dir, told, small, draft)
    say(f"written to {output_dir}")
    if json:
        show(made, as_json=True)
        return
    drawn = [figure for figure in made["figures"] if figure["rows"]]
    compared = [figure for figure in drawn if "method" in figure["rows"][0]]
    for figure in drawn:
        if figure not in compared:
            show(figure["rows"], title=figure["title"], header=True)
    rows = [{"figure": figure["name"], **row} for figure in compared for row in figure["rows"]]
    if rows:
        show([{name: row[name] for name in SHOWN} for row in rows], title=paper, header=True)


def main(words: list[str] | None = None) -> None:
    """Run the command line."""
    app = typer.Typer(add_completion=False)
    app.command()(reproduce)
    app(words)


if __name__ == "__main__":
    main()
