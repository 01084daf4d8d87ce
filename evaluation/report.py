# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The page of a run: its table, quality against charged budget and against time, and what was asked for.

The page needs nothing beside itself: no script, no font, no picture from elsewhere.
"""

import io
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from html import escape
from typing import Any

from hf_blend.errors import import_extra

ENDS = ("full-prefill", "full-reuse")  # of the scale: labelled in every chart
AXES = {"charged_budget": "charged budget", "ttft_ms": "time to first token, ms"}  # what quality is drawn against
TEXT = {"svg.fonttype": "none", "svg.hashsalt": "hf_blend", "text.parse_math": False}  # words stay words in an SVG
Row = Mapping[str, Any]
Point = tuple[float, float, float, float]  # x, y, and the ends of y's interval
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2937; background: #fff; max-width: 90rem; margin: 2rem auto;
  padding: 0 1rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .7rem; text-align: right; border-bottom: 1px solid #e5e7eb; white-space: nowrap; }
th { white-space: normal; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; }
figure { margin: 0; }
figure svg { max-width: 100%; height: auto; }
.charts { display: grid; gap: 1.5rem; grid-template-columns: repeat(auto-fit, minmax(min(30rem, 100%), 1fr)); }
.wide { overflow-x: auto; }
pre { background: #f8fafc; padding: 1rem; overflow-x: auto; }
"""
NOTE = (
    "Intervals in brackets are 95 % bootstrap intervals over the samples; the difference to full prefill is paired, "
    "sample by sample. The ratio is what was asked for, the charged budget what it cost: work on the chunks over that "
    "of a full prefill, choosing included."
)


def plots(summary: Mapping[str, Any]) -> dict[str, str]:
    """Draw quality against charged budget and against time to first token, for each task and model."""
    groups, charts = _groups(summary["rows"]), {}
    for number, ((task, model), rows) in enumerate(groups.items(), 1):
        which = "" if len(groups) == 1 else f"-{number}-{_plain(task)}-{_plain(model)}"
        for key, label in AXES.items():
            if lines := _lines(rows, key):
                charts[f"quality-{key.replace('_', '-')}{which}"] = chart(lines, f"{label} ({task}, {model})")
    return charts


def chart(lines: Mapping[str, Sequence[Point]], x_label: str, y_label: str = "score") -> str:
    """Draw lines with their intervals, from 0 on, as an SVG element."""
    made = import_extra("matplotlib", extra="plot", wanted_by="a chart")
    with made.rc_context(TEXT):
        figure = import_extra("matplotlib.figure", extra="plot", wanted_by="a chart").Figure(layout="constrained")
        axes = figure.subplots()
        for name, points in lines.items():
            x, y, low, high = zip(*points, strict=True)
            reach = [[max(0.0, value - least) for value, least in zip(y, low, strict=True)]]
            reach.append([max(0.0, most - value) for value, most in zip(y, high, strict=True)])
            axes.errorbar(x, y, reach, marker="o", label=name)
            if name in ENDS:
                side = "right" if x[-1] else "left"
                axes.annotate(name, (x[-1], y[-1]), (0, 6), textcoords="offset points", ha=side)
        axes.set(xlabel=x_label, ylabel=y_label)
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        figure.legend(loc="outside lower center", ncols=3)
        text = io.StringIO()
        figure.savefig(text, format="svg")
    drawn = re.sub(r"<metadata>.*?</metadata>", "", text.getvalue(), flags=re.DOTALL)  # names a page on the web
    return drawn[drawn.index("<svg") :]


def html(summary: Mapping[str, Any]) -> str:
    """Write the page."""
    charts = "".join(f"<figure>{chart}</figure>" for chart in plots(summary).values())
    content = f"<div class=charts>{charts}</div>{html_table(summary['rows'])}"
    return page("Evaluation", content, summary.get("settings", {}))


def html_table(rows: Sequence[Row]) -> str:
    """A table for each task and model, under a heading."""
    return "".join(_section(task, model, group) for (task, model), group in _groups(rows).items())


def table(head: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    """An HTML table of texts, which are escaped here."""
    names = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in line) + "</tr>" for line in lines)
    return f'<div class="wide"><table><thead><tr>{names}</tr></thead><tbody>{body}</tbody></table></div>'


def page(title: str, content: str, settings: Mapping[str, Any]) -> str:
    """A whole HTML document."""
    settings_json = escape(json.dumps(settings, indent=1, ensure_ascii=False, default=str))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>"
        f"<h1>{escape(title)}</h1><p>{escape(NOTE)}</p>{content}"
        f"<h2>Settings</h2><pre>{settings_json}</pre></body></html>\n"
    )


def _groups(rows: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((str(row["task"]), str(row["model"])), []).append(row)
    return groups


def _lines(rows: Sequence[Row], key: str) -> dict[str, list[Point]]:
    """One line per method over its ratios; rows without a figure for this axis are left out."""
    lines: dict[str, list[Point]] = {}
    for row in sorted(rows, key=lambda row: row["ratio"] or 0.0):
        if row.get(key) is not None:
            lines.setdefault(str(row["method"]), []).append((row[key], row["score"], row["low"], row["high"]))
    return lines


def _plain(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-")[-40:]


def _section(task: str, model: str, rows: Sequence[Row]) -> str:
    rules = list(dict.fromkeys(rule for row in rows for rule in row.get("rules") or {}))
    columns = {name: write for name, write in COLUMNS.items() if any(write(row) for row in rows)}
    columns |= {rule: partial(lambda rule, row: _number((row.get("rules") or {}).get(rule)), rule) for rule in rules}
    lines = [[write(row) or "-" for write in columns.values()] for row in rows]
    return f"<h2>{escape(task)}, {escape(model)}</h2>{table(columns, lines)}"


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
