# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The tables of the README, written from the committed results, so that no number is typed.

python -m hf_blend.evaluation.readme
"""

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PLACE = re.compile(r"<!--table:(?P<name>\w+)-->\n.*?<!--end-->", re.DOTALL)


def filled(text: str, results: Path) -> str:
    """Put every table in its place.

    Args:
        text: Markdown with places `<!--table:NAME-->` … `<!--end-->`.
        results: folder with `NAME.json` for each.

    Returns:
        The same text with the tables made anew.
    """
    return PLACE.sub(lambda place: _table(place["name"], results), text)


def _table(name: str, results: Path) -> str:
    document = json.loads((results / f"{name}.json").read_text("utf-8"))
    lines = {"reference": _reference, "ttft": _ttft}[name](document)
    return "\n".join([f"<!--table:{name}-->", *lines, "<!--end-->"])


def _reference(document: dict[str, Any]) -> list[str]:
    """Exact match of every method, paired with full prefill."""
    lines = [
        f"n = {document['rows'][0]['n']} questions.",
        "",
        "| method | nominal | charged | exact match | difference to full prefill |",
        "|---|---|---|---|---|",
    ]
    for row in document["rows"]:
        low, high = row["difference_interval"]
        gap = "" if row["nominal_ratio"] is None else f"{row['difference_to_full']:+.3f} [{low:+.3f}, {high:+.3f}]"
        shares = [_share(row["nominal_ratio"]), _share(row["charged_budget"])]
        cells = [row["method"], *shares, f"{row['exact_match']:.3f}", gap]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _ttft(document: dict[str, Any]) -> list[str]:
    """Speed-up at every ratio, beside the bound."""
    full, machine = document["full"], document["machine"]
    lines = [
        f"Full prefill {full['ttft_ms'] / 1e3:.2f} s, decoding {full['decode_tokens_s']:.1f} tokens/s; "
        f"torch {machine['torch']}, transformers {machine['transformers']}, {machine['threads']} threads.",
        "",
        "| nominal | charged | first token | speed-up | FLOP bound | share of it | realign | select | decoding |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in document["rows"]:
        shares = [_share(row["ratio"]), _share(row["charged_budget"]), f"{row['ttft_ms'] / 1e3:.2f} s"]
        speed = [f"{row['speedup']:.2f} x", f"{row['flop_bound']:.2f} x", _share(row["bound_share"])]
        spent = [f"{row['realign_ms']:.0f} ms", f"{row['select_ms']:.0f} ms", f"{row['decode_vs_dynamic']:.2f} x"]
        cells = [*shares, *speed, *spent]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.0f} %"


def main() -> None:
    """Rewrite the README of this checkout."""
    readme = ROOT / "README.md"
    readme.write_text(filled(readme.read_text("utf-8"), ROOT / "benchmarks" / "results"), encoding="utf-8")


if __name__ == "__main__":
    main()
