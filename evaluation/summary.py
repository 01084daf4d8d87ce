# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""From the answers of a run to its table: means with intervals, everything paired with full prefill."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .bootstrap import interval

FULL, REUSE = "full-prefill", "full-reuse"
Line = Mapping[str, Any]


def summarised(settings: Mapping[str, Any], lines: Iterable[Line]) -> dict[str, Any]:
    """Make the table."""
    groups: dict[tuple[Any, ...], dict[str, Line]] = {}
    for line in lines:
        groups.setdefault(tuple(line[key] for key in ("task", "model", "method", "ratio")), {})[line["id"]] = line
    rows = []
    for (task, model, method, ratio), found in groups.items():
        full = groups.get((task, model, FULL, None), {})
        reuse = groups.get((task, model, REUSE, None), {})
        paired = [(line, full[name]) for name, line in found.items() if name in full]
        rows.append({"task": task, "model": model, "method": method, "ratio": ratio, **_row(paired, reuse)})
    return {"settings": dict(settings), "rows": rows}


def _row(paired: Sequence[tuple[Line, Line]], reuse: Mapping[str, Line]) -> dict[str, Any]:
    own = [line["score"] for line, _ in paired]
    gaps = [line["score"] - right["score"] for line, right in paired]
    (low, high), (gap_low, gap_high) = interval(own), interval(gaps)
    times = [line["ttft_ms"] for line, _ in paired if line["ttft_ms"] is not None]
    ratios = [right["ttft_ms"] / line["ttft_ms"] for line, right in paired if line["ttft_ms"] and right["ttft_ms"]]
    where = [line["score"] for line, right in paired if right["score"] > 0]
    return {
        "n": len(paired),
        "score": statistics.fmean(own),
        "low": low,
        "high": high,
        "charged_budget": statistics.fmean(line["charged_budget"] for line, _ in paired),
        "ttft_ms": statistics.median(times) if times else None,
        "speedup": statistics.median(ratios) if ratios else None,
        "read_bytes": _mean(line.get("read_bytes") for line, _ in paired),
        "rules": _rules(paired),
        "difference": statistics.fmean(gaps),
        "difference_low": gap_low,
        "difference_high": gap_high,
        "normalised": _normalised(paired, reuse),
        "score_where_full": statistics.fmean(where) if where else None,
        "kl": _mean(line["kl"] for line, _ in paired),
        "top1": _mean(line["top1"] for line, _ in paired),
        "exact_output": _mean(float(line["exact_output"]) for line, _ in paired),
        "prompt_tokens": statistics.fmean(line["prompt_tokens"] for line, _ in paired),
    }


def _rules(paired: Sequence[tuple[Line, Line]]) -> dict[str, float]:
    """The mean of every rule that was counted."""
    return {rule: statistics.fmean(line["scores"][rule] for line, _ in paired) for rule in paired[0][0]["scores"]}


def _normalised(paired: Sequence[tuple[Line, Line]], reuse: Mapping[str, Line]) -> float | None:
    """Where a method stands between full reuse (0) and full prefill (1), over the samples that all answered."""
    both = [(line, right, reuse[line["id"]]) for line, right in paired if line["id"] in reuse]
    if not both:
        return None
    score, right, least = (statistics.fmean(one["score"] for one in column) for column in zip(*both, strict=True))
    return (score - least) / (right - least) if abs(right - least) > 1e-9 else None


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None
