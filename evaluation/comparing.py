# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Two runs of `hf-blend eval` beside each other: the difference of every method, over the samples that both answered.

Of a pair of runs with one model each, the models may differ; else a row is one model's.
"""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_blend.errors import ConfigError

from .bootstrap import interval
from .folder import LINES, whole_lines

Line = Mapping[str, Any]


def compared(one: Path, other: Path) -> list[dict[str, Any]]:
    """Pair the answers of two runs."""
    found = [_lines(one), _lines(other)]
    models = [{line["model"] for line in lines} for lines in found]
    is_apart = models[0] != models[1] and all(len(names) == 1 for names in models)
    ways = [_by_way(lines, is_apart) for lines in found]
    rows = []
    for way in ways[0]:
        pairs = [(line, ways[1][way][name]) for name, line in ways[0][way].items() if name in ways[1].get(way, {})]
        rows += [_row(way, pairs)] if pairs else []
    if not rows:
        raise ConfigError(
            f"the runs in {str(one)!r} and {str(other)!r} have no answer in common, expected some of the same task, "
            "method, ratio and sample. Run both with the same arguments but one."
        )
    return rows


def _lines(folder: Path) -> Sequence[Line]:
    path = folder / LINES
    if not path.is_file():
        raise ConfigError(f"{str(folder)!r} has no {LINES}, expected the --output-dir of `hf-blend eval`.")
    lines = whole_lines(path)[0]
    if any("score" not in line for line in lines):
        raise ConfigError(f"{str(path)!r} has a damaged line: no score, expected answers of `hf-blend eval`.")
    return lines


def _by_way(lines: Sequence[Line], is_apart: bool) -> dict[tuple[Any, ...], dict[str, Line]]:
    groups: dict[tuple[Any, ...], dict[str, Line]] = {}
    for line in lines:
        way = (line["task"], None if is_apart else line["model"], line["method"], line["ratio"])
        groups.setdefault(way, {})[line["id"]] = line
    return groups


def _row(way: tuple[Any, ...], pairs: list[tuple[Line, Line]]) -> dict[str, Any]:
    task, model, method, ratio = way
    gaps = [two["score"] - one["score"] for one, two in pairs]
    low, high = interval(gaps)
    times = [(one.get("ttft_ms"), two.get("ttft_ms")) for one, two in pairs]
    ratios = [one / two for one, two in times if one and two]
    return {
        "task": task,
        "model": model,
        "method": method,
        "ratio": ratio,
        "n": len(pairs),
        "first_score": statistics.fmean(one["score"] for one, _ in pairs),
        "second_score": statistics.fmean(two["score"] for _, two in pairs),
        "difference": statistics.fmean(gaps),
        "low": low,
        "high": high,
        "first_better": sum(gap < 0 for gap in gaps),
        "second_better": sum(gap > 0 for gap in gaps),
        "speedup": statistics.median(ratios) if ratios else None,
    }
