# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""How time to the first token and peak memory grow with the prompt: a stock prefill and a blended one of the same ids.

Each point is measured in a process of its own, in which the chunks are stored before anything is measured. Peak memory
is what the kernel says that the process held at most during a prefill, above what it held when the prefill began; a
stock prefill's is measured likewise, so that the difference is what blending adds.
"""

import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hf_blend import BlendCache, ChunkStore, HfBlendError
from hf_blend.config import BlendConfig
from hf_blend.evaluation.bench.shapes import text_config, timed_model
from hf_blend.version import __version__

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
WARM_TOKENS = 64  # of each chunk of the first, small request: what a process finds out once is found out there


@dataclass(frozen=True)
class ScalePlan:
    """What is measured."""

    points: tuple[tuple[str, int], ...] = (
        *(("thin", tokens << 10) for tokens in (4, 16, 32, 64)),
        *(("smollm2-135m", tokens << 10) for tokens in (4, 16)),
    )
    chunk_tokens: int = 512
    question_tokens: int = 64
    ratio: float = BlendConfig.recompute_ratio
    selector: str = "kv-deviation"
    rounds: int = 3
    threads: int = 2
    dtype: str = "float32"
    seed: int = 0


def measure_scale(plan: ScalePlan, progress: Callable[[str], None] | None = None) -> dict[str, Any]:
    """Measure every point in a process of its own."""
    rows = []
    for point in plan.points:
        if progress:
            progress(f"{point[0]}, {point[1]} tokens")
        given = json.dumps(asdict(replace(plan, points=(point,))))
        environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}  # what is freed goes back to the kernel
        command = [sys.executable, "-P", __file__, given]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise HfBlendError(f"measuring {point[0]} with {point[1]} tokens ended with {done.stderr[-800:]}")
        rows.append(json.loads(done.stdout.splitlines()[-1]))
    about = {name: value for name, value in asdict(plan).items() if name != "points"}
    return {"torch": torch.__version__, "hf_blend": __version__, **about, "rows": rows}


def _child(given: str) -> None:
    """Measure the one point of a plan, and print its row."""
    settings = json.loads(given)
    row = measure_point(ScalePlan(**{**settings, "points": tuple(map(tuple, settings["points"]))}))
    sys.stdout.write(json.dumps(row) + "\n")


@torch.no_grad()
def measure_point(plan: ScalePlan) -> dict[str, Any]:
    """Measure the first point of a plan in this process."""
    torch.set_num_threads(plan.threads)
    shape, tokens = plan.points[0]
    model: Any = timed_model(shape, plan.dtype, "cpu", plan.seed)
    model.config.max_position_embeddings = max(2 * tokens, model.config.max_position_embeddings)
    store = ChunkStore.open("memory://", memory_bytes=64 << 30)
    pieces, ids = _prompt(plan, 2, WARM_TOKENS, text_config(model).vocab_size)
    for _ in range(2):
        _blend(model, store, pieces, plan)
        _stock(model, ids)
    pieces, ids = _prompt(plan, max(1, tokens // plan.chunk_tokens), plan.chunk_tokens, text_config(model).vocab_size)
    _blend(model, store, pieces, replace(plan, ratio=0.0, selector="none"))  # stores the chunks
    runs = []
    for _ in range(plan.rounds):
        stock, _ = _watched(lambda: _stock(model, ids))
        blend, report = _watched(lambda: _blend(model, store, pieces, plan))
        runs.append((stock, blend))
    return {"shape": shape, "layers": text_config(model).num_hidden_layers, **_figures(runs, report)}


def _figures(runs: list[tuple[Any, Any]], report: Any) -> dict[str, Any]:
    stock_s, blend_s = (statistics.median(run[which][0] for run in runs) for which in (0, 1))
    peaks = [[run[which][1] for run in runs if run[which][1] is not None] for which in (0, 1)]
    stock_peak, blend_peak = (max(peak) if peak else None for peak in peaks)
    speedup, cpu_speedup = (statistics.median(stock[at] / blend[at] for stock, blend in runs) for at in (0, 2))
    return {
        "tokens": report.prompt_tokens,
        "chunks": report.loaded_chunks,
        "stock_s": stock_s,
        "blend_s": blend_s,
        "speedup": speedup,
        "flop_bound": report.flop_bound,
        "bound_share": speedup / report.flop_bound,
        "cpu_bound_share": cpu_speedup / report.flop_bound,
        "charged_budget": report.charged_budget,
        "stock_peak_bytes": stock_peak,
        "blend_peak_bytes": blend_peak,
        "added_bytes": None if stock_peak is None or blend_peak is None else blend_peak - stock_peak,
        "computed_chunks": report.computed_chunks,
    }


def _prompt(plan: ScalePlan, chunks: int, chunk_tokens: int, vocabulary: int) -> tuple[dict[str, Any], torch.Tensor]:
    generator = torch.Generator().manual_seed(plan.seed)
    draw = lambda tokens: torch.randint(3, vocabulary, (tokens,), generator=generator).tolist()  # noqa: E731
    texts, question = [draw(chunk_tokens) for _ in range(chunks)], draw(plan.question_tokens)
    ids = torch.tensor([[1, *(token for text in texts for token in text), *question]])
    return {"prefix": [1], "chunks": texts, "question": question}, ids


def _stock(model: Any, ids: torch.Tensor) -> None:
    model.generate(input_ids=ids, max_new_tokens=1, min_new_tokens=1, do_sample=False)


def _blend(model: Any, store: ChunkStore, pieces: dict[str, Any], plan: ScalePlan) -> Any:
    cache = BlendCache(model, store, recompute_ratio=plan.ratio, selector=plan.selector)
    inputs = cache.inputs(None, **pieces)
    model.generate(**inputs, past_key_values=cache, max_new_tokens=1, min_new_tokens=1, do_sample=False)
    return cache.report


def _watched(run: Callable[[], Any]) -> tuple[tuple[float, int | None, float], Any]:
    """Seconds, bytes and seconds of processor time that a run took, and what it gave."""
    gc.collect()
    before = _forget_peak()
    started, started_cpu = time.perf_counter(), time.process_time()
    found = run()
    seconds, cpu_s, peak = time.perf_counter() - started, time.process_time() - started_cpu, _status("VmHWM")
    return (seconds, None if before is None or peak is None else peak - before, cpu_s), found


def _forget_peak() -> int | None:
    """Have the kernel count this process's peak memory from now on; gives what is held now, in bytes."""
    try:
        CLEAR.write_text("5")
    except OSError:
        return None
    return _status("VmRSS")


def _status(name: str) -> int | None:
    try:
        lines = STATUS.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:")), None)


if __name__ == "__main__":
    _child(sys.argv[1])
