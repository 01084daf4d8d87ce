# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A paper's figures on one's own model: each figure is a few runs of `trial`, in a folder that resumes where it was.

What the figures of CacheBlend vary are methods, ratios, the check layer, the length and number of chunks, the batch
and the rate of the storage. Its request rates are left out.

Source: CacheBlend (arXiv 2405.16444), figures 6, 12, 13, 15, 16, 17.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from throttled import ThrottledTier

from hf_blend import ChunkStore, plugins
from hf_blend.errors import ConfigError
from hf_blend.evaluation.bundled import load_model
from hf_blend.evaluation.folder import RunFolder
from hf_blend.evaluation.summary import summarise
from hf_blend.evaluation.trial import EvalConfig, run
from papers.impress import impress
from papers.kvstar import kvstar
from papers.paper_page import write_paper

TASKS = ("musique", "wikimqa", "samsum", "multi-news")
FILES = sorted(str(path) for path in (Path(__file__).resolve().parent.parent / "baselines").glob("*.py"))
BASELINES = ("prefix-caching", "full-reuse", *FILES)
BLEND = "kv-deviation"
CUT = 256  # tokens of a chunk where their number varies; how many chunks where nothing else is said
CHUNKS = 8
Progress = Callable[[str, Iterator[Any], int], Any]
Trial = tuple[str, EvalConfig]  # what is varied, and the run


@dataclass(frozen=True)
class ReadAtRate(EvalConfig):
    """A run whose chunks are read from a storage of some rate, in 10^9 bytes a second."""

    read_gb_s: float = 1.0

    def open_store(self) -> ChunkStore:
        """Open a store that keeps nothing ready to use."""
        return ChunkStore(None, [ThrottledTier(plugins.load("store.tiers", "memory")(), 1e9 * self.read_gb_s)])


@dataclass(frozen=True)
class Figure:
    """What one figure varies."""

    name: str
    title: str
    trials: tuple[Trial, ...]


def cacheblend(base: EvalConfig, is_small: bool = False) -> list[Figure]:
    """The figures of CacheBlend; with `is_small` the first and last value of each alone."""

    def few(values: Sequence[Any]) -> Sequence[Any]:
        return (values[0], values[-1]) if is_small else values

    # What figures vary beside what they compare, on the first task
    task = base.tasks[0]
    first = replace(base, tasks=(task,), data=tuple(pair for pair in base.data if pair[0] == task))
    compared = replace(first, methods=("full-reuse", f"{BLEND}@0.15"))

    methods = (*BASELINES, *(f"{BLEND}@{ratio}" for ratio in few((0.05, 0.15, 0.3))))
    title = "Quality and time to the first token of every method (figures 12, 13)"
    figures = [Figure("methods", title, (("", replace(base, methods=methods)),))]

    methods = ("full-reuse", *(f"{BLEND}@{ratio}" for ratio in few((0.0, 0.02, 0.05, 0.1, 0.15, 0.3, 0.5, 1.0))))
    figures.append(Figure("ratio", "Recompute ratio (figures 6, 16)", (("", replace(first, methods=methods)),)))

    methods = tuple(f"{BLEND}:check_layer={layer}@0.15" for layer in few((1, 2, 3)))
    title = "The layer at which tokens are chosen"
    figures.append(Figure("check-layer", title, (("", replace(first, methods=methods)),)))

    trials: list[Trial] = []
    for size in few((128, 256, 512)):
        trials.append((f"{size} tokens", replace(compared, chunk_tokens=size)))
    figures.append(Figure("chunk-tokens", "Length of a chunk (figure 15)", tuple(trials)))

    trials = []
    for count in few((2, 4, CHUNKS, 16)):
        trials.append((f"{count} chunks", replace(compared, chunk_tokens=CUT, most_chunks=count)))
    figures.append(Figure("chunks", "Number of chunks (figure 15)", tuple(trials)))

    trials = []
    for size in few((1, 2, 4)):
        trials.append((f"batch of {size}", replace(compared, batch=size)))
    title = "Prompts answered together: the time is that of the batch (figure 15)"
    figures.append(Figure("batch", title, tuple(trials)))

    trials = []
    for rate in few((0.5, 1.0, 4.0)):
        trials.append((f"{rate} GB/s", ReadAtRate(**vars(compared), read_gb_s=rate)))
    title = "Rate of the storage that chunks are read from (figure 17)"
    figures.append(Figure("storage", title, tuple(trials)))
    return figures


def data_files(folder: Path, tasks: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """The file of each task in a folder: a JSONL file whose name has the task's in it, the paper's own first."""
    files = sorted(folder.rglob("*.jsonl"), key=lambda path: ("cacheblend" not in path.name, str(path)))
    found = []
    for task in tasks:
        matching = [path for path in files if task in path.name.replace("_", "-").lower()]
        if matching:
            found.append((task, str(matching[0])))
    if not found:
        raise ConfigError(
            f"{str(folder)!r} has no JSONL file for any of {', '.join(tasks)}. Name files after tasks, such as "
            "musique.jsonl; each line has id, chunks, question and answers."
        )
    return tuple(found)


def _cacheblend(
    base: EvalConfig, folder: Path, progress: Progress | None = None, is_small: bool = False, draft: str | None = None
) -> dict[str, Any]:
    load = lru_cache(maxsize=1)(load_model)  # all figures are of one model
    return reproduce(cacheblend(base, is_small), folder, progress, load=load)


PAPERS: dict[str, Callable[..., dict[str, Any]]] = {"cacheblend": _cacheblend, "impress": impress, "kvstar": kvstar}


def reproduce(
    figures: Sequence[Figure],
    folder: Path,
    progress: Progress | None = None,
    load: Callable[..., tuple[Any, Any]] = load_model,
) -> dict[str, Any]:
    """Run what is missing in the folder, and write `result.json` and each figure as CSV."""
    made = []
    for figure in figures:
        rows: list[dict[str, Any]] = []
        for varied, trial in figure.trials:
            place = folder / figure.name / varied.replace(" ", "-")
            what = " ".join(one for one in (figure.name, varied) if one)
            with RunFolder(place, trial.settings) as opened:
                run(trial, opened, partial(progress, what) if progress else None, load)
                found = summarise(trial.settings, opened.lines.values())["rows"]
            rows += [{"varied": varied, **row, "method": _label(row["method"])} for row in found]
        made.append({"name": figure.name, "title": figure.title, "rows": rows})
    result = {"settings": figures[0].trials[0][1].settings, "figures": made}
    write_paper(result, folder)
    return result


def _label(method: str) -> str:
    """The name of a method; of a file, its own."""
    return Path(method).stem.replace("_", "-") if method in FILES else method
