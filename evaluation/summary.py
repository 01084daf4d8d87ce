# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""From the answers of a run to its table: means with bootstrap intervals, each answer paired with full prefill's."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

RESAMPLES = 2000
LEVEL = 0.95
FULL = "full-prefill"
REUSE = "full-reuse"
Line = Mapping[str, Any]


def interval(scores: ArrayLike, *, of_median: bool = False) -> tuple[float, float]:
    """Percentile bootstrap interval of a mean, or of a median (Efron 1979).

    For a paired comparison give the differences: each example is then resampled with both of its scores.
    """
    samples = _resampled(np.asarray(scores, dtype=float))
    centres = np.median(samples, axis=1) if of_median else samples.mean(axis=1)
    return _ends(centres)


def share_interval(parts: ArrayLike, wholes: ArrayLike) -> tuple[float, float]:
    """Percentile bootstrap interval of the sum of some figures over that of others, paired by example."""
    pairs = np.stack([np.asarray(parts, dtype=float), np.asarray(wholes, dtype=float)], axis=1)
    sums = _resampled(pairs).sum(axis=1)
    return _ends(sums[:, 0] / sums[:, 1])


def _resampled(values: np.ndarray) -> np.ndarray:
    rows = np.random.default_rng(0).integers(0, len(values), size=(RESAMPLES, len(values)))
    samples: np.ndarray = values[rows]
    return samples


def _ends(centres: np.ndarray) -> tuple[float, float]:
    low, high = np.quantile(centres, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def summarise(settings: Mapping[str, Any], lines: Iterable[Line]) -> dict[str, Any]:
    """Make the table: a row for each task, model, method and ratio."""
    groups: dict[tuple[Any, ...], dict[str, Line]] = {}
    for line in lines:
        variant = (line["task"], line["model"], line["method"], line["ratio"])
        groups.setdefault(variant, {})[line["id"]] = line
    rows = []
    for (task, model, method, ratio), answers in groups.items():
        full = groups.get((task, model, FULL, None), {})
        reuse = groups.get((task, model, REUSE, None), {})
        paired = [(line, full[name]) for name, line in answers.items() if name in full]
        rows.append({"task": task, "model": model, "method": method, "ratio": ratio, **_figures(paired, reuse)})
    return {"settings": dict(settings), "rows": rows}


def _figures(paired: Sequence[tuple[Line, Line]], reuse: Mapping[str, Line]) -> dict[str, Any]:
    """The figures of a row, of answers paired with full prefill's."""
    lines = [line for line, _ in paired]
    scores = [line["score"] for line in lines]
    low, high = interval(scores)
    gaps = [line["score"] - full["score"] for line, full in paired]
    gap_low, gap_high = interval(gaps)
    times = [line["ttft_ms"] for line in lines if line["ttft_ms"] is not None]
    speedups = [full["ttft_ms"] / line["ttft_ms"] for line, full in paired if line["ttft_ms"] and full["ttft_ms"]]
    return {
        "n": len(paired),
        "score": statistics.fmean(scores),
        "low": low,
        "high": high,
        "charged_budget": _mean(lines, "charged_budget"),
        "ttft_ms": statistics.median(times) if times else None,
        "speedup": statistics.median(speedups) if speedups else None,
        "read_bytes": _mean(lines, "read_bytes"),
        "rules": {rule: statistics.fmean(line["scores"][rule] for line in lines) for rule in lines[0]["scores"]},
        "difference": statistics.fmean(gaps),
        "difference_low": gap_low,
        "difference_high": gap_high,
        "normalised": _normalised(paired, reuse),
        "score_where_full": _mean([line for line, full in paired if full["score"] > 0], "score"),
        "kl": _mean(lines, "kl"),
        "top1": _mean(lines, "top1"),
        "exact_output": _mean(lines, "exact_output"),
        "prompt_tokens": _mean(lines, "prompt_tokens"),
    }


def _normalised(paired: Sequence[tuple[Line, Line]], reuse: Mapping[str, Line]) -> float | None:
    """Where a method is between full reuse (0) and full prefill (1), over the samples that all answered."""
    common = [(line, full) for line, full in paired if line["id"] in reuse]
    if not common:
        return None
    score = statistics.fmean(line["score"] for line, _ in common)
    most = statistics.fmean(full["score"] for _, full in common)
    least = statistics.fmean(reuse[line["id"]]["score"] for line, _ in common)
    return (score - least) / (most - least) if abs(most - least) > 1e-9 else None


def _mean(lines: Iterable[Line], name: str) -> float | None:
    """The mean of a figure, over the lines that have it."""
    values = [float(line[name]) for line in lines if line.get(name) is not None]
    return statistics.fmean(values) if values else None
