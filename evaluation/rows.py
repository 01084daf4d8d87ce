# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The rows of every JSONL file that a command reads: one schema for tune, eval, reproduce, index and bench.

A row has `chunks`, `question` and `answers`; `id` (the number of its line where it has none) and `prefix`, what
precedes the chunks, may be there. `documents` is another name of `chunks`, `answer` a single answer; a row without
chunks is a document itself, as it is elsewhere: a text, or a dict that has one. A command names the fields that it
needs: index needs chunks alone. Other fields are left as they are.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hf_blend.errors import PromptError
from hf_blend.prompt.documents import FIELDS, text_of

CHUNKS, QUESTION, ANSWERS = "chunks", "question", "answers"
SAME = {"documents": CHUNKS, "answer": ANSWERS}  # other name → field
Row = dict[str, Any]


def read_rows(path: Path, needs: Sequence[str] = (CHUNKS, QUESTION, ANSWERS)) -> list[Row]:
    """Read a file with one row per line."""
    try:
        lines = path.read_bytes().decode("utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"the data {str(path)!r} cannot be read: {error}. Give a JSONL file.") from error
    rows: dict[str, Row] = {}
    for number, line in enumerate(lines, 1):
        if line.strip():
            row = {"id": str(number), **read_row(path, number, line, needs)}
            if rows.setdefault(str(row["id"]), row) is not row:
                raise PromptError(f"line {number} of {str(path)!r} has the id {row['id']!r} again. Give it its own.")
    if not rows:
        raise PromptError(f"the data {str(path)!r} has no line. Write one JSON object per line.")
    return list(rows.values())


def read_row(path: Path, number: int, line: str, needs: Sequence[str], *, may_be_empty: bool = False) -> Row:
    """Read one line, in which chunks may be empty or not."""
    try:
        return _read(line, needs, may_be_empty)
    except (ValueError, RecursionError) as error:
        is_ours = type(error) in (ValueError, PromptError)
        why = str(error).rstrip(".") if is_ours else f"is not JSON: {getattr(error, 'msg', 'it is too deep')}"
        refusal = PromptError(f"line {number} of {str(path)!r} {why}. Correct it.")
        refusal.add_note(f"line {number} {why}")
        raise refusal from error


def _read(line: str, needs: Sequence[str], may_be_empty: bool) -> Row:
    """The row in a line; a `ValueError` says what is wrong with it."""
    content = json.loads(line)
    content = {CHUNKS: [content]} if isinstance(content, str) else content
    if not isinstance(content, dict):
        raise ValueError(f"is {line.strip()[:60]!r}, expected an object with {', '.join(needs)}")
    row: Row = {}
    for name, value in content.items():
        field = SAME.get(name, name)
        if field in row:
            raise ValueError(f"has {field} twice, as {name} and by another name, expected one of them")
        row[field] = [_checked(name, value)] if name == "answer" else _checked(name, value)
    if CHUNKS in row and "text" in row:
        raise ValueError("has text and chunks, expected one of them")
    listed = row.get(CHUNKS, [content] if not row.keys().isdisjoint(FIELDS) else [])
    texts = [
        text_of(chunk, f"holds no document: chunk {number}", may_be_empty=may_be_empty)
        for number, chunk in enumerate(listed)
    ]
    if texts:
        row = {name: value for name, value in row.items() if name not in FIELDS} | {CHUNKS: texts}
    for field in needs:
        if field not in row:
            others = (*(other for other, same in SAME.items() if same == field), *(FIELDS if field == CHUNKS else ()))
            names = " or ".join([field, *others])
            raise ValueError(f"has no {names}, expected {_expected(field)[0]}; it has {sorted(content)!r:.80}")
    return row


def _checked(name: str, value: Any) -> Any:
    what, is_good = _expected(name)
    if not is_good(value):
        raise ValueError(f"has {name}={value!r:.60}, expected {what}")
    return value


def _expected(name: str) -> tuple[str, Callable[[Any], bool]]:
    """What a field holds, in words and as a test; a field that is not in the schema may hold anything."""
    fields: dict[str, tuple[str, Callable[[Any], bool]]] = {
        CHUNKS: ("a list of documents", lambda value: isinstance(value, list) and bool(value)),
        ANSWERS: ("a list of texts", lambda value: isinstance(value, list) and {*map(type, value)} == {str}),
        QUESTION: ("a text", lambda value: isinstance(value, str)),
        "answer": ("a text", lambda value: isinstance(value, str)),
        "prefix": ("a text or null", lambda value: value is None or isinstance(value, str)),
    }
    return {**fields, "documents": fields[CHUNKS]}.get(name, ("anything", lambda value: True))
