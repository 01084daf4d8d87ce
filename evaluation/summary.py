# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""From the answers of a run to its table, and from two runs to their differences: means with bootstrap intervals."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from hf_blend.errors import ConfigError

from .folder import LINES, whole_lines

RESAMPLES, LEVEL = 2000, 0.95


def interval(scores: ArrayLike, *, of_median: bool = False) -> tuple[float, float]:
    """Percentile bootstrap interval of a mean, or of a median (Efron 1979).

    For a paired comparison give the differences: each example is then resampled with both of its scores.
    """
    return _ends((np.median if of_median else np.mean)(_resampled(np.asarray(scores, dtype=float)), axis=1))


def share_interval(parts: ArrayLike, wholes: ArrayLike) -> tuple[float, float]:
    """Percentile bootstrap interval of the sum of some figures over that of others, paired by example."""
    sums = _resampled(np.stack([np.asarray(values, dtype=float) for values in (parts, wholes)], axis=1)).sum(axis=1)
    return _ends(sums[:, 0] / sums[:, 1])


def _resampled(values: np.ndarray) -> np.ndarray:
    samples: np.ndarray = values[np.random.default_rng(0).integers(0, len(values), size=(RESAMPLES, len(values)))]
    return samples


def _ends(centres: np.ndarray) -> tuple[float, float]:
    low, high = np.quantile(centres, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


FULL, REUSE = "full-prefill", "full-reuse"
Line = Mapping[str, Any]


def summarised(settings: Mapping[str, Any], lines: Iterable[Line]) -> dict[str, Any]:
    """Make the table."""
    groups, rows = _by_variant(lines), []
    for (task, model, method, ratio), answers in groups.items():
        full = groups.get((task, model, FULL, None), {})
        reuse = groups.get((task, model, REUSE, None), {})
        paired = [(line, full[name]) for name, line in answers.items() if name in full]
        rows.append({"task": task, "model": model, "method": method, "ratio": ratio, **_row(paired, reuse)})
    return {"settings": dict(settings), "rows": rows}


def _row(paired: Sequence[tuple[Line, Line]], reuse: Mapping[str, Line]) -> dict[str, Any]:
    own = [line["score"] for line, _ in paired]
    gaps = [line["score"] - right["score"] for line, right in paired]
    (low, high), (gap_low, gap_high) = interval(own), interval(gaps)
    times = [line["ttft_ms"] for line, _ in paired if line["ttft_ms"] is not None]
    ratios = [right["ttft_ms"] / line["ttft_ms"] for line, right in paired if line["ttft_ms"] and right["ttft_ms"]]
    rules = paired[0][0]["scores"]
    return {
        "n": len(paired),
        "score": statistics.fmean(own),
        "low": low,
        "high": high,
        "charged_budget": statistics.fmean(line["charged_budget"] for line, _ in paired),
        "ttft_ms": statistics.median(times) if times else None,
        "speedup": statistics.median(ratios) if ratios else None,
        "read_bytes": _mean(line.get("read_bytes") for line, _ in paired),
        "rules": {rule: statistics.fmean(line["scores"][rule] for line, _ in paired) for rule in rules},
        "difference": statistics.fmean(gaps),
        "difference_low": gap_low,
        "difference_high": gap_high,
        "normalised": _normalised(paired, reuse),
        "score_where_full": _mean(line["score"] for line, right in paired if right["score"] > 0),
        "kl": _mean(line["kl"] for line, _ in paired),
        "top1": _mean(line["top1"] for line, _ in paired),
        "exact_output": _mean(float(line["exact_output"]) for line, _ in paired),
        "prompt_tokens": statistics.fmean(line["prompt_tokens"] for line, _ in paired),
    }


def _normalised(paired: Sequence[tuple[Line, Line]], reuse: Mapping[str, Line]) -> float | None:
    """Where a method stands between full reuse (0) and full prefill (1), over the samples that all answered."""
    both = [(line, right, reuse[line["id"]]) for line, right in paired if line["id"] in reuse]
    if not both:
        return None
    score, right, least = (statistics.fmean(line["score"] for line in column) for column in zip(*both, strict=True))
    return (score - least) / (right - least) if abs(right - least) > 1e-9 else None


def _mean(values: Iterable[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return statistics.fmean(numbers) if numbers else None


def compared(first: Path, second: Path) -> list[dict[str, Any]]:
    """Pair the answers of two runs."""
    answers = [_answers(first), _answers(second)]
    models = [{line["model"] for line in lines} for lines in answers]
    is_apart = models[0] != models[1] and all(len(names) == 1 for names in models)
    variants = [_by_variant(lines, is_apart) for lines in answers]
    rows = []
    for variant in variants[0]:
        others = variants[1].get(variant, {})
        pairs = [(line, others[name]) for name, line in variants[0][variant].items() if name in others]
        rows += [_compared_row(variant, pairs)] if pairs else []
    if not rows:
        raise ConfigError(
            f"the runs in {str(first)!r} and {str(second)!r} have no answer in common, expected some of the same "
            "task, method, ratio and sample. Run both with the same arguments but one."
        )
    return rows


def _answers(folder: Path) -> Sequence[Line]:
    path = folder / LINES
    if not path.is_file():
        raise ConfigError(f"{str(folder)!r} has no {LINES}, expected the --output-dir of `hf-blend eval`.")
    lines = whole_lines(path)[0]
    if any("score" not in line for line in lines):
        raise ConfigError(f"{str(path)!r} has a damaged line: no score, expected answers of `hf-blend eval`.")
    return lines


def _by_variant(lines: Iterable[Line], is_apart: bool = False) -> dict[tuple[Any, ...], dict[str, Line]]:
    groups: dict[tuple[Any, ...], dict[str, Line]] = {}
    for line in lines:
        variant = (line["task"], None if is_apart else line["model"], line["method"], line["ratio"])
        groups.setdefault(variant, {})[line["id"]] = line
    return groups


def _compared_row(variant: tuple[Any, ...], pairs: list[tuple[Line, Line]]) -> dict[str, Any]:
    task, model, method, ratio = variant
    gaps = [second["score"] - first["score"] for first, second in pairs]
    low, high = interval(gaps)
    times = [(first.get("ttft_ms"), second.get("ttft_ms")) for first, second in pairs]
    ratios = [first / second for first, second in times if first and second]
    return {
        "task": task,
        "model": model,
        "method": method,
        "ratio": ratio,
        "n": len(pairs),
        "first_score": statistics.fmean(first["score"] for first, _ in pairs),
        "second_score": statistics.fmean(second["score"] for _, second in pairs),
        "difference": statistics.fmean(gaps),
        "low": low,
        "high": high,
        "first_better": sum(gap < 0 for gap in gaps),
        "second_better": sum(gap > 0 for gap in gaps),
        "speedup": statistics.median(ratios) if ratios else None,
    }
