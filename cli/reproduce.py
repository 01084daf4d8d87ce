# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Make the figures of a paper with your own model."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from .options import Device, Dtype
from .output import Json, progress, say, show

__all__ = ["reproduce"]

Paper = Annotated[str, typer.Argument(help="cacheblend.")]
Model = Annotated[str, typer.Option(help="Hub id, folder, or a bundled model.")]
Data = Annotated[Path | None, typer.Option(help="Folder of JSONL files named after tasks; else they are downloaded.")]
Tasks = Annotated[list[str] | None, typer.Option("--task", help="May be repeated; the default is the paper's four.")]
Limit = Annotated[int, typer.Option(min=1, help="Samples of each task.")]
Small = Annotated[bool, typer.Option("--small", help="Two values of each thing that varies.")]
Output = Annotated[Path, typer.Option(help="Folder of the run; a stopped run resumes there.")]
SHOWN = ("figure", "varied", "task", "method", "ratio", "n", "score", "charged_budget", "ttft_ms", "speedup")


def reproduce(
    paper: Paper,
    model: Model = "reference",
    data: Data = None,
    task: Tasks = None,
    limit: Limit = 50,
    small: Small = False,
    output_dir: Output = Path("reproduction"),
    device: Device = "auto",
    dtype: Dtype = "auto",
    json: Json = False,
) -> None:
    """Run the comparisons of a paper: one page with plots and tables, and one JSON file.

    Every answer is paired with full prefill on the same prompt.

    Examples:
        hf-blend reproduce cacheblend --task reference-world --limit 1 --small --json  # slow
        hf-blend reproduce cacheblend --model my-model --data data --limit 20  # slow
    """
    from hf_blend.evaluation.bundled import choose_device
    from hf_blend.evaluation.reproducing import PAGE, PAPERS, TASKS, data_files
    from hf_blend.evaluation.reproducing import reproduce as run
    from hf_blend.evaluation.trial import Trial

    if paper not in PAPERS:
        raise typer.BadParameter(f"there is no paper {paper!r}, only {', '.join(PAPERS)}")
    names = tuple(task or TASKS)
    files = data_files(data, names) if data else ()
    if data:
        left = [name for name in names if name not in dict(files)]
        names = tuple(dict(files))
        say(f"{', '.join(f'{name}: {Path(path).name}' for name, path in files)}; no file: {', '.join(left) or 'none'}")
    kind = None if dtype == "auto" else dtype
    base = Trial(names, (model,), limit=limit, data=files, dtype=kind, device=str(choose_device(device)))

    def told(what: str, parts: Iterator[Any], count: int) -> Iterator[Any]:
        return progress(parts, what, total=count, quiet=json)

    made = run(PAPERS[paper](base, small), output_dir, told)
    say(f"written to {output_dir / PAGE}")
    if json:
        show(made, as_json=True)
        return
    rows = [{"figure": figure["name"], **row} for figure in made["figures"] for row in figure["rows"]]
    show([{name: row[name] for name in SHOWN} for row in rows], title=paper, header=True)
