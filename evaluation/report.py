# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The page of a run: its table, quality against charged budget and against time, and what was asked for.

The page needs nothing beside itself: no script, no font, no picture from elsewhere.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from typing import Any

from .svg import Line, line_chart

ENDS = ("full-prefill", "full-reuse")  # of the scale: labelled in every chart
Row = Mapping[str, Any]
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2937; background: #fff; max-width: 90rem; margin: 2rem auto;
  padding: 0 1rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .7rem; text-align: right; border-bottom: 1px solid #e5e7eb; white-space: nowrap; }
th { white-space: normal; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; }
figure { margin: 0; }
.charts { display: grid; gap: 1.5rem; grid-template-columns: repeat(auto-fit, minmax(min(30rem, 100%), 1fr)); }
.wide { overflow-x: auto; }
pre { background: #f8fafc; padding: 1rem; overflow-x: auto; }
"""
NOTE = (
    "Intervals in brackets are 95 % bootstrap intervals over the samples; the difference to full prefill is paired, "
    "sample by sample. The ratio is what was asked for, the charged budget what it cost: work on the chunks over that "
    "of a full prefill, choosing included."
)


@dataclass(frozen=True)
class Axis:
    """What quality is drawn against: the key in a row, its words, its unit."""

    key: str
    label: str
    unit: str


AXES = (Axis("charged_budget", "charged budget", "%"), Axis("ttft_ms", "time to first token", "ms"))


def plots(summary: Mapping[str, Any]) -> dict[str, str]:
    """Draw quality against charged budget and against time to first token, for each task and model."""
    groups, found = _groups(summary["rows"]), {}
    for number, ((task, model), rows) in enumerate(groups.items(), 1):
        which = "" if len(groups) == 1 else f"-{number}-{_plain(task)}-{_plain(model)}"
        for axis in AXES:
            lines = _lines(rows, axis.key)
            if lines:
                found[f"quality-{axis.key.replace('_', '-')}{which}"] = _chart(lines, axis, f"{task}, {model}")
    return found


def html(summary: Mapping[str, Any]) -> str:
    """Write the page."""
    charts = "".join(f"<figure>{chart}</figure>" for chart in plots(summary).values())
    content = f"<div class=charts>{charts}</div>{html_table(summary['rows'])}"
    return page("Evaluation", content, summary.get("settings", {}))


def html_table(rows: Sequence[Row]) -> str:
    """A table for each task and model, under a heading."""
    return "".join(_section(task, model, found) for (task, model), found in _groups(rows).items())


def page(title: str, content: str, settings: Mapping[str, Any]) -> str:
    """A whole HTML document."""
    shown = escape(json.dumps(settings, indent=1, ensure_ascii=False, default=str))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>"
        f"<h1>{escape(title)}</h1><p>{escape(NOTE)}</p>{content}"
        f"<h2>Settings</h2><pre>{shown}</pre></body></html>\n"
    )


def _groups(rows: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((str(row["task"]), str(row["model"])), []).append(row)
    return groups


def _lines(rows: Sequence[Row], key: str) -> list[Line]:
    """One line per method over its ratios; rows without a figure for this axis are left out."""
    methods: dict[str, list[Row]] = {}
    for row in rows:
        if row.get(key) is not None:
            methods.setdefault(str(row["method"]), []).append(row)
    lines = []
    for name, found in methods.items():
        found = sorted(found, key=lambda row: row["ratio"] or 0.0)
        points = tuple((float(row[key]), float(row["score"])) for row in found)
        bars = tuple((float(row["low"]), float(row["high"])) for row in found)
        lines.append(Line(name, points, bars, label=name if name in ENDS else ""))
    return lines


def _chart(lines: Sequence[Line], axis: Axis, about: str) -> str:
    most_x = max(x for line in lines for x, _ in line.points)
    most_y = max(high for line in lines for _, high in line.bars)
    return line_chart(
        lines,
        x_label=f"{axis.label} ({about})",
        y_label="score",
        most_x=_round_above(max(most_x, 1.0) if axis.unit == "%" else most_x),
        most_y=_round_above(min(most_y, 1.0)),
        unit=axis.unit,
        background="#ffffff",
    )


def _round_above(value: float) -> float:
    """The next of …, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, … that is not below a value; 1 for nothing."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    steps = (one * power for one in (1, 2, 4, 6, 8, 10))
    return round(next(step for step in steps if step >= value * (1 - 1e-9)), 12)


def _plain(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-")[-40:]


def _section(task: str, model: str, rows: Sequence[Row]) -> str:
    rules = list(dict.fromkeys(rule for row in rows for rule in row.get("rules") or {}))
    columns = {name: write for name, write in COLUMNS.items() if any(write(row) for row in rows)}
    columns |= {rule: partial(_of_rule, rule) for rule in rules}
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    lines = ["".join(f"<td>{escape(write(row)) or '-'}</td>" for write in columns.values()) for row in rows]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return (
        f"<h2>{escape(task)}, {escape(model)}</h2>"
        f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _of_rule(rule: str, row: Row) -> str:
    return _number((row.get("rules") or {}).get(rule))


def _number(value: Any, form: str = ".3f") -> str:
    return "" if value is None else format(value, form)


def _with_interval(row: Row, name: str, low: str, high: str, form: str = ".3f") -> str:
    if row.get(name) is None:
        return ""
    ends = "" if row.get(low) is None else f" [{row[low]:{form}}, {row[high]:{form}}]"
    return f"{row[name]:{form}}{ends}"


COLUMNS: dict[str, Callable[[Row], str]] = {
    "method": lambda row: str(row["method"]),
    "ratio": lambda row: _number(row.get("ratio"), "g"),
    "n": lambda row: _number(row.get("n"), "d"),
    "score": lambda row: _with_interval(row, "score", "low", "high"),
    "difference to full prefill": lambda row: _with_interval(
        row, "difference", "difference_low", "difference_high", "+.3f"
    ),
    "normalised": lambda row: _number(row.get("normalised")),
    "where full prefill scores": lambda row: _number(row.get("score_where_full")),
    "charged budget": lambda row: _number(row.get("charged_budget"), ".1%"),
    "first token, ms": lambda row: _number(row.get("ttft_ms"), ".1f"),
    "same output": lambda row: _number(row.get("exact_output"), ".1%"),
    "same top token": lambda row: _number(row.get("top1"), ".1%"),
    "KL, nats": lambda row: _number(row.get("kl"), ".2g"),
}
