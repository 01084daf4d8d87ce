# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A corpus of many small chunks, indexed by several processes, and what a store with so many entries costs to open.

The chunks are drawn tokens and the model is a tiny one: what is measured is the machinery around computing, which is
the same for a large model. Each run is a process that starts others, by `index_dataset`. A last run is killed with all
of its processes when half of the chunks are there, and started again.
"""

import json
import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import torch

from hf_blend import ChunkStore, StoreError
from hf_blend.integrations.datasets import index_dataset
from hf_blend.model.fingerprint import fingerprint
from hf_blend.model_names import TINY, load_model

MODEL = f"{TINY}llama"
FEWEST_TOKEN, MOST_TOKEN = 3, 120


@dataclass(frozen=True)
class CorpusPlan:
    """What is measured."""

    chunks: int = 100_000
    chunk_tokens: int = 16
    workers: tuple[int, ...] = (1, 2)
    seed: int = 0


def measure_corpus(plan: CorpusPlan, progress: Callable[[str], None] | None = None) -> dict[str, Any]:
    """Index the corpus with every number of workers, kill and resume a run, and open what is stored."""
    drawn = Random(plan.seed)
    draw = partial(drawn.choices, range(FEWEST_TOKEN, MOST_TOKEN), k=plan.chunk_tokens)
    rows = list({tuple(draw()): None for _ in range(plan.chunks)})
    with TemporaryDirectory() as folder:
        root, runs = Path(folder), []
        for workers in plan.workers:
            shutil.rmtree(root / "kv", ignore_errors=True)
            done, seconds = _run(rows, root / "kv", workers)
            runs.append({"workers": workers, "seconds": seconds, "chunks_s": len(rows) / seconds, **done})
            if progress:
                progress(f"{workers} workers: {runs[-1]['chunks_s']:.0f} chunks a second")
        first = runs[0]["seconds"]
        index = reopened(root / "kv", fingerprint(_model()[0]))
        shutil.rmtree(root / "kv")
        resumed = _killed(rows, root / "kv", plan.workers[-1])
    return {
        "model": MODEL,
        "chunks": len(rows),
        "chunk_tokens": plan.chunk_tokens,
        "cores": len(os.sched_getaffinity(0)),
        "rows": [{**run, "speedup": first / run["seconds"]} for run in runs],
        "resumed": resumed,
        "index": index,
    }


def _model() -> tuple[Any, None]:
    return load_model(MODEL), None


def _start(rows: list[tuple[int, ...]], location: Path, workers: int) -> int:
    """Index in a child that leads a process group of its own; gives its id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.setsid()
        torch.set_num_threads(1)
        import datasets

        datasets.disable_progress_bars()
        dataset = datasets.Dataset.from_dict({"ids": [list(row) for row in rows]})
        settings = {"location": location, "durability": "none"}
        found = index_dataset(dataset, _model, settings, column="ids", num_proc=workers)
        _report(location).write_text(json.dumps(Counter(found["state"])))
        code = 0
    finally:
        os._exit(code)


def _run(rows: list[tuple[int, ...]], location: Path, workers: int) -> tuple[dict[str, int], float]:
    """How many chunks were computed and were there, and the seconds from the start of the process to its end."""
    started = time.perf_counter()
    _, status = os.waitpid(_start(rows, location, workers), 0)
    if status:
        raise RuntimeError(f"a run of {workers} workers ended with status {status}, expected 0")
    states = json.loads(_report(location).read_text())
    done = {"computed": states.get("computed", 0), "present": states.get("present", 0)}
    return done, time.perf_counter() - started


def _report(location: Path) -> Path:
    return location.with_name(f"{location.name}.json")


def _killed(rows: list[tuple[int, ...]], location: Path, workers: int) -> dict[str, Any]:
    child = _start(rows, location, workers)
    while _stored(location) < len(rows) // 2:
        if os.waitpid(child, os.WNOHANG)[0]:
            raise RuntimeError("a run ended before it could be killed, expected more chunks. Give --chunks more.")
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    stored = _stored(location)
    done, seconds = _run(rows, location, workers)
    left = _stored(location)
    return {"workers": workers, "stored_when_killed": stored, **done, "stored": left, "seconds": seconds}


def _stored(location: Path) -> int:
    return sum(1 for _ in (location / "objects").rglob("*.safetensors")) if location.exists() else 0


def reopened(location: Path, identity: str) -> dict[str, Any]:
    """What it costs to know every entry: from their own headers, and from the saved index."""
    entries = [path.stat().st_size for path in (location / "objects").rglob("*.safetensors")]
    found: dict[str, Any] = {"entries": len(entries), "entry_bytes": sum(entries) / len(entries)}
    shutil.rmtree(location / "index", ignore_errors=True)
    for name in ("without_index", "with_index"):
        before, started = _resident_bytes(), time.perf_counter()
        store = ChunkStore.open(location, memory_bytes=0, durability="none")
        found[f"open_{name}_s"] = time.perf_counter() - started
        prompt = list(range(FEWEST_TOKEN, MOST_TOKEN))
        store.find(identity, (1,), prompt)
        found[f"first_find_{name}_s"] = time.perf_counter() - started
        found[f"resident_{name}_bytes"] = _resident_bytes() - before
        started = time.perf_counter()
        store.find(identity, (1,), prompt)
        found[f"find_{name}_s"] = time.perf_counter() - started
        known = store.counts(identity)[0]
        if known != len(entries):
            raise StoreError(
                f"the index knows {known} chunks, expected {len(entries)}. Run hf-blend store check on {location}."
            )
        store.close()
    found["index_bytes"] = sum(path.stat().st_size for path in (location / "index").iterdir() if path.is_file())
    return found


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
