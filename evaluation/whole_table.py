# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Tables that leave nothing out: what a table does not read of its document is added to it.

A value that differs between rows becomes a column; one that is alike in all of them, or is none of a row, is said in
the line below the table. Lists outside of rows say what the rows vary, and are left to these.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Document = Mapping[str, Any]
Table = Callable[[Any], list[str]]
Rows = Callable[[Any], Sequence[Any]]


def every_row(document: Any) -> Sequence[Any]:
    """The rows of a document, in their order."""
    rows: Sequence[Any] = document["rows"]
    return rows


def whole(table: Table, rows_of: Rows | None = every_row, name: str = "rows") -> Table:
    """Complete a table.

    Args:
        table: makes the lines from a document.
        rows_of: the rows that the table shows, in its order; None where a line is not a row.
        name: of the rows in the document.

    Returns:
        Makes the lines, every value of the document in them.
    """

    def made(document: Document) -> list[str]:
        seen = _watched(document)
        lines = table(seen)
        shown = [] if rows_of is None else list(rows_of(seen))
        left = [key for key in dict.fromkeys(key for row in shown for key in row) if not _is_shown(key, shown)]
        alike = [key for key in left if all(row.peek(key) == shown[0].peek(key) for row in shown)]
        extra = [key for key in left if key not in alike]
        if extra:
            lines = _widened(lines, shown, extra)
        rest = [(key, shown[0].peek(key)) for key in alike] + _unread(seen, name)
        said = "; ".join(f"{_words(key)} {_text(value)}" for key, value in rest)
        return [*lines, "", f"Also in the file: {said}."] if rest else lines

    return made


class _Watched(dict[str, Any]):
    """A mapping that notes which of its values are read."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        super().__init__({key: _watched(value) for key, value in given.items()})
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)

    def peek(self, key: str) -> Any:
        """A value, unnoticed."""
        return super().get(key)


def _watched(value: Any) -> Any:
    if isinstance(value, Mapping):
        return _Watched(value)
    return [_watched(one) for one in value] if isinstance(value, list) else value


def _is_shown(key: str, rows: Sequence[_Watched]) -> bool:
    """Whether a value was read of every row, or of the first for all that are alike."""
    if all(key in row.read for row in rows if key in row):
        return True
    return key in rows[0].read and all(row.peek(key) == rows[0].peek(key) for row in rows)


def _widened(lines: list[str], rows: Sequence[_Watched], keys: Sequence[str]) -> list[str]:
    """The same table with columns more."""
    head = next(place for place, line in enumerate(lines) if line.startswith("|"))
    made = [*lines[:head], f"{lines[head]} {' | '.join(map(_words, keys))} |", lines[head + 1] + "---|" * len(keys)]
    for line, row in zip(lines[head + 2 : head + 2 + len(rows)], rows, strict=True):
        made.append(f"{line} {' | '.join(_text(row.peek(key)) for key in keys)} |")
    return made + lines[head + 2 + len(rows) :]


def _unread(document: _Watched, rows: str, before: str = "") -> list[tuple[str, Any]]:
    """What was not read outside of the rows, with the names that lead there."""
    found: list[tuple[str, Any]] = []
    for key in document:
        value = document.peek(key)
        if isinstance(value, _Watched):
            found += _unread(value, rows, f"{before}{key} ")
        elif key != rows and key not in document.read and value is not None and not isinstance(value, list | tuple):
            found.append((f"{before}{key}", value))
    return found


def _words(key: str) -> str:
    return key.replace("_", " ")


def _text(value: Any) -> str:
    """A value in a cell."""
    if value is None or value == {}:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{_words(str(key))} {_text(one)}" for key, one in value.items())
    if isinstance(value, list | tuple):
        return f"[{', '.join(_text(one) for one in value)}]"
    return " ".join(json.dumps(value, ensure_ascii=False).strip('"').replace("|", "/").replace("\\n", " ").split())
