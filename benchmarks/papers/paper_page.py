# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What is left of a reproduction: one JSON file, and each figure as CSV."""

import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

RESULT = "result.json"
Row = Mapping[str, Any]
Groups = Mapping[tuple[str, str], Mapping[str, Row]]  # (task, way) → sample → line


def write_paper(result: Mapping[str, Any], folder: Path) -> None:
    """Write `result.json`, and each figure as CSV, numbers in full."""
    for figure in result["figures"]:
        rows = figure["rows"]
        with (folder / f"{figure['name']}.csv").open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, columns_of(rows), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    (folder / RESULT).write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", "utf-8")


def by_way(lines: Iterable[Row]) -> Groups:
    """Group the answers of a run."""
    groups: dict[tuple[str, str], dict[str, Row]] = {}
    for line in lines:
        groups.setdefault((line["task"], line["method"]), {})[line["id"]] = line
    return groups


def columns_of(rows: Sequence[Row]) -> list[str]:
    """The names of all columns, in the order in which rows first have them."""
    return list(dict.fromkeys(name for row in rows for name in row))
