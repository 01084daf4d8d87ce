# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Score methods, ratios and models on tasks, with intervals."""

import json as json_format
from pathlib import Path
from typing import Annotated, Any

import typer

from .options import REAL, SELECTOR, Device, Dtype, Partial
from .output import Json, progress, say, show

__all__ = ["eval"]

TASKS_HELP = "Tasks, or Python files with one; the default is needle. Or: compare FOLDER FOLDER, two runs."
Tasks = Annotated[list[str] | None, typer.Argument(metavar="TASK", help=TASKS_HELP)]
Models = Annotated[list[str], typer.Option("--model", help="Hub id or folder; may be repeated. Default: smollm2.")]
METHODS_HELP = "A method, or a selector, with @RATIO or without; or all; may be repeated."
Methods = Annotated[list[str], typer.Option("--method", help=METHODS_HELP)]
Ratios = Annotated[list[float], typer.Option("--ratio", help="For methods that take one; may be repeated.")]
Data = Annotated[list[str] | None, typer.Option("--data", help="JSONL file, or TASK=FILE; may be repeated.")]
Limit = Annotated[int, typer.Option(help="Samples of each task; 0 is all.")]
Seed = Annotated[int, typer.Option(help="Of drawn samples and shuffled chunks.")]
ChunkTokens = Annotated[int | None, typer.Option(help="Cut chunks anew, so many tokens each.")]
Order = Annotated[str, typer.Option(help="given, shuffled or reversed.")]
Batch = Annotated[int, typer.Option(help="Samples answered side by side; above 1 only the first are timed.")]
Output = Annotated[Path | None, typer.Option(help="Folder of the run; a stopped run goes on there.")]
Report = Annotated[bool, typer.Option("--report", help="Also write report.html and plots; needs the extra plot.")]
COMPARE = "compare"
SHOWN = (
    "task", "model", "method", "ratio", "n", "score", "low", "high", "charged_budget", "ttft_ms", "speedup",
    "read_bytes",
)  # fmt: skip


def eval(
    context: typer.Context,
    tasks: Tasks = None,
    model: Models = [REAL],  # noqa: B006
    method: Methods = ["full-prefill", "prefix-caching", "full-reuse", SELECTOR],  # noqa: B006
    ratio: Ratios = [0.02, 0.05, 0.1, 0.15, 0.3],  # noqa: B006
    data: Data = None,
    limit: Limit = 50,
    seed: Seed = 1,
    chunk_tokens: ChunkTokens = None,
    chunk_order: Order = "given",
    batch: Batch = 1,
    partial: Partial = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    output_dir: Output = None,
    report: Report = False,
    json: Json = False,
) -> None:
    """Score methods on tasks: one line per answer in a folder, then a table, and a page with plots if wanted.

    Every answer is paired with full prefill; intervals are 95 % bootstrap intervals over the samples. `eval compare`
    pairs the answers of two runs: score of the second minus score of the first.

    Examples:
        hf-blend eval --limit 2 --ratio 0.1 --json
        hf-blend eval needle --limit 2 --method boundary --ratio 0.1
        hf-blend eval needle --limit 2 --method kv-deviation@0.1 --partial 0.25
        hf-blend eval --method all --limit 500 --batch 25 --output-dir run --report  # slow
        hf-blend eval musique --model mistralai/Mistral-7B-Instruct-v0.2 --limit 20  # network
    """
    import tempfile

    from hf_blend.errors import import_extra
    from hf_blend.evaluation.blending import method_names
    from hf_blend.evaluation.bundled import choose_device
    from hf_blend.evaluation.folder import SUMMARY, RunFolder
    from hf_blend.evaluation.summary import summarised
    from hf_blend.evaluation.trial import EvalConfig, run

    if tasks and tasks[0] == COMPARE:
        return _compare(context, tasks[1:], json)
    if report:
        import_extra("matplotlib", extra="plot", wanted_by="--report")  # before anything is answered
    names = tuple(tasks or ["needle"])
    methods = tuple(name for listed in method for name in (method_names() if listed == "all" else [listed]))
    files = _files(data or [], names)
    trial = EvalConfig(
        names, tuple(model), methods, tuple(ratio), limit or None, seed, chunk_tokens, chunk_order, files, batch,
        None if dtype == "auto" else dtype, str(choose_device(device)), partial=partial,
    )  # fmt: skip

    with tempfile.TemporaryDirectory() as scratch, RunFolder(output_dir or Path(scratch), trial.settings) as folder:
        run(trial, folder, lambda parts, count: progress(parts, "answering", total=count, quiet=json))
        made = summarised(trial.settings, folder.lines.values())
        folder.write(SUMMARY, json_format.dumps(made, indent=1, allow_nan=False) + "\n")
        if report:
            _write_report(folder, made)
    if output_dir:
        say(f"written to {output_dir}")
    rows = [{name: row[name] for name in SHOWN} for row in made["rows"]]
    show(made if json else rows, as_json=json, title="evaluation", header=True)


def _compare(context: typer.Context, folders: list[str], as_json: bool) -> None:
    """Two runs beside each other."""
    from hf_blend.evaluation.summary import compared

    sources = {name: context.get_parameter_source(name) for name in context.params if name not in ("tasks", "json")}
    if others := sorted(name for name, source in sources.items() if source and source.name == "COMMANDLINE"):
        option = others[0].replace("_", "-")
        raise typer.BadParameter(f"compare takes the folders of two runs and --json, but there is --{option}, too")
    if len(folders) != 2:
        raise typer.BadParameter(f"compare takes the folders of two runs, but there are {len(folders)}")
    show(compared(Path(folders[0]), Path(folders[1])), as_json=as_json, title="second run minus first", header=True)


def _write_report(folder: Any, made: dict[str, Any]) -> None:
    from hf_blend.evaluation.report import html, plots

    folder.write("report.html", html(made))
    for name, text in plots(made).items():
        folder.write(f"{name}.svg", text)


def _files(data: list[str], tasks: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """(task, file) pairs; a file without a task is for the only one."""
    pairs = [
        pair.partition("=")[::2] if "=" in pair and pair.partition("=")[0] in tasks else ("", pair) for pair in data
    ]
    if any(not task for task, _ in pairs) and len(tasks) != 1:
        raise typer.BadParameter(f"several tasks are asked for: write --data TASK=FILE, one of {', '.join(tasks)}")
    return tuple((task or tasks[0], path) for task, path in pairs)
