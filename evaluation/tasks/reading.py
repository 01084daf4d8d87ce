# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Reading samples from a file: `id`, `chunks`, `question` and `answers` in each line, and a clear word where not."""

import json
from pathlib import Path
from typing import Any

from hf_blend.errors import PromptError


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read a file with one JSON object per line.

    Args:
        path: the file.

    Returns:
        The rows, an `id` added where there is none.

    Raises:
        PromptError: the file cannot be read, is empty, or a line has not what a sample needs.
    """
    try:
        lines = path.read_text("utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"the data {str(path)!r} cannot be read: {error}. Give a JSONL file.") from error
    rows: dict[str, dict[str, Any]] = {}
    for number, line in enumerate(lines, 1):
        if line.strip():
            row = _row(path, number, line)
            if rows.setdefault(str(row["id"]), row) is not row:
                raise PromptError(f"line {number} of {str(path)!r} has the id {row['id']!r} again. Give it its own.")
    if not rows:
        raise PromptError(f"the data {str(path)!r} has no line. Write one JSON object per line.")
    return list(rows.values())


def _row(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise PromptError(f"line {number} of {str(path)!r} is no JSON: {error}. Correct it.") from error
    is_row = isinstance(row, dict) and _are_texts(row.get("chunks")) and _are_texts(row.get("answers"))
    if not is_row or not isinstance(row.get("question"), str) or not all(row["chunks"]):
        raise PromptError(
            f"line {number} of {str(path)!r} is {line[:60]!r}, but an object with chunks (texts, none empty), "
            "question (a text) and answers (texts) is wanted."
        )
    return {"id": str(number), **row}


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, str) for one in value)
