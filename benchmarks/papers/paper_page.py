# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What is left of a reproduction: one JSON file, one page whose tables have every column of it, CSV and LaTeX."""

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from hf_blend.evaluation.report import chart, page, table

RESULT = "result.json"
PAGE = "index.html"
Row = Mapping[str, Any]
Groups = Mapping[tuple[str, str], Mapping[str, Row]]  # (task, way) → sample → line


def write_paper(result: Mapping[str, Any], folder: Path, title: str, against: tuple[str, str]) -> None:
    """Write `result.json`, `index.html`, and each figure as CSV and as a LaTeX table."""
    parts = [f"<p>This page cannot show: {escape(one)}</p>" for one in result["cannot_show"]]
    for figure in result["figures"]:
        rows = figure["rows"]
        name = figure["name"]
        parts.append(f"<h2>{escape(figure['title'])}</h2>{_chart(rows, *against)}{every_column(rows)}")
        (folder / f"{name}.csv").write_text(as_csv(rows), "utf-8")
        (folder / f"{name}.tex").write_text(as_latex(rows), "utf-8")
    (folder / RESULT).write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", "utf-8")
    (folder / PAGE).write_text(page(title, "".join(parts), result["settings"]), "utf-8")


def by_way(lines: Iterable[Row]) -> Groups:
    """Group the answers of a run."""
    groups: dict[tuple[str, str], dict[str, Row]] = {}
    for line in lines:
        groups.setdefault((line["task"], line["method"]), {})[line["id"]] = line
    return groups


def columns_of(rows: Iterable[Row]) -> list[str]:
    """The names of all columns, in the order in which rows first have them."""
    return list(dict.fromkeys(name for row in rows for name in row))


def every_column(rows: Sequence[Row]) -> str:
    """An HTML table of rows, no column left out."""
    names = columns_of(rows)
    return table((name.replace("_", " ") for name in names), ([cell(row.get(name)) for name in names] for row in rows))


def as_csv(rows: Sequence[Row]) -> str:
    """Rows as CSV, numbers in full."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns_of(rows), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def as_latex(rows: Sequence[Row]) -> str:
    """Rows as a LaTeX tabular."""
    names = columns_of(rows)
    lines = [[name.replace("_", " ") for name in names]] + [[cell(row.get(name)) for name in names] for row in rows]
    body = " \\\\\n".join(" & ".join(_escaped(one) for one in line) for line in lines)
    return f"\\begin{{tabular}}{{{'l' * len(names)}}}\n{body} \\\\\n\\end{{tabular}}\n"


def cell(value: Any) -> str:
    """A value as a table shows it."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(cell, value))}]"
    return str(value)


def _escaped(text: str) -> str:
    return "".join(f"\\{letter}" if letter in "&%$#_{}" else letter for letter in text)


def _chart(rows: Sequence[Row], column: str, words: str) -> str:
    """Quality against a column, where rows have both."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row.get(column) is not None and row.get("score") is not None:
            groups.setdefault(f"{row['task']}, {row['way']}", []).append(row)
    lines = {name: [(row[column], row["score"], *row["interval"]) for row in found] for name, found in groups.items()}
    return f"<div class=charts><figure>{chart(lines, words)}</figure></div>" if lines else ""
