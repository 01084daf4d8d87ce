# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Score methods, ratios and models on tasks, with intervals."""

import json as json_format
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from .options import REAL, SELECTOR, Device, Dtype, Partial
from .output import Json, progress, say, show

__all__ = ["eval"]

Tasks = Annotated[
    list[str] | None,
    typer.Argument(metavar="TASK", help="Tasks, Python files with one, or a JSONL file; the default is needle."),
]
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
ROWS = ".jsonl"  # how the name of a file of one's own ends
SHOWN = (
    "task", "model", "method", "ratio", "n", "score", "low", "high", "charged_budget", "ttft_ms", "speedup",
    "read_bytes",
)  # fmt: skip


def eval(
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
    json: Json = False,
) -> None:
    """Score methods on tasks: one line per answer in a folder, then a table.

    Every answer is paired with full prefill; intervals are 95 % bootstrap intervals over the samples. A row of a JSONL
    file has chunks, question and answers.

    Examples:
        hf-blend eval --limit 2 --ratio 0.1 --json
        hf-blend eval needle --limit 2 --method boundary --ratio 0.1
        hf-blend eval needle --limit 2 --method kv-deviation@0.1 --partial 0.25
        hf-blend eval mine.jsonl --limit 24  # network
        hf-blend eval --method all --limit 500 --batch 25 --output-dir run  # slow
        hf-blend eval musique --model mistralai/Mistral-7B-Instruct-v0.2 --limit 20  # network
    """
    from hf_blend.evaluation.blending import method_names
    from hf_blend.evaluation.bundled import choose_device
    from hf_blend.evaluation.folder import SUMMARY, RunFolder
    from hf_blend.evaluation.summary import summarise
    from hf_blend.evaluation.trial import EvalConfig, run

    names = tuple("questions" if name.endswith(ROWS) else name for name in tasks or ["needle"])
    files = [f"questions={name}" for name in tasks or () if name.endswith(ROWS)]
    methods: list[str] = []
    for name in method:
        methods += method_names() if name == "all" else [name]
    config = EvalConfig(
        tasks=names,
        models=tuple(model),
        methods=tuple(methods),
        ratios=tuple(ratio),
        limit=limit or None,
        seed=seed,
        chunk_tokens=chunk_tokens,
        chunk_order=chunk_order,
        data=_files([*(data or []), *files], names),
        batch=batch,
        dtype=None if dtype == "auto" else dtype,
        device=str(choose_device(device)),
        partial=partial,
    )
    with tempfile.TemporaryDirectory() as scratch, RunFolder(output_dir or Path(scratch), config.settings) as folder:
        run(config, folder, lambda parts, count: progress(parts, "answering", total=count, quiet=json))
        summary = summarise(config.settings, folder.lines.values())
        folder.write(SUMMARY, json_format.dumps(summary, indent=1, allow_nan=False) + "\n")
    if output_dir:
        say(f"written to {output_dir}")
    rows = [{name: row[name] for name in SHOWN} for row in summary["rows"]]
    show(summary if json else rows, as_json=json, title="evaluation", header=True)


def _files(data: list[str], tasks: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """(task, file) pairs; a file without a task is for the only one."""
    pairs = []
    for text in data:
        task, equals, path = text.partition("=")
        if equals and task in tasks:
            pairs.append((task, path))
        elif len(tasks) == 1:
            pairs.append((tasks[0], text))
        else:
            raise typer.BadParameter(f"several tasks are asked for: write --data TASK=FILE, one of {', '.join(tasks)}")
    return tuple(pairs)
