# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Pages of results leave nothing out: the file is changed, value by value, and the page must change with it."""

import contextlib
import copy
import json
import re
from pathlib import Path

import pytest

from hf_blend.evaluation.readme import PLACE, SOURCES, TABLES
from hf_blend.evaluation.whole_table import whole

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGES = sorted((ROOT / "docs").glob("*.md"))
LISTS = {"families", "images_read"}  # model types with verdicts; they measure nothing
SECTIONS = [
    section
    for path in PAGES
    for section in re.split(r"^(?=## )", path.read_text("utf-8"), flags=re.MULTILINE)
    if set(PLACE.findall(section)) - LISTS
]
NAMES = sorted({name for section in SECTIONS for name in PLACE.findall(section)})


def document(name):
    return json.loads((RESULTS / f"{SOURCES.get(name, name)}.json").read_text("utf-8"))


def rows_of(found, name):
    """The rows behind a table; one with another source's name has its rows under its own."""
    rows = found.get(name if name in SOURCES else "rows", [])
    return [row for row in rows if row.get("part") != "search"]  # a study searches first; its page says so


def changed(value):
    """Another value of the same kind, far enough off to be seen in a rounded cell."""
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int | float):
        return 3 * value + 17
    if isinstance(value, list):
        return [changed(one) for one in value]
    if isinstance(value, dict):
        return {key: changed(one) for key, one in value.items()}
    return f"another {value}"


def unseen(name):
    """The columns of a file whose change the page's table does not show."""
    before, missing = TABLES[name](document(name)), []
    for key in dict.fromkeys(key for row in rows_of(document(name), name) for key in row):
        other = document(name)
        for row in rows_of(other, name):
            if row.get(key) is not None:
                row[key] = changed(row[key])
        if rows_of(other, name) == rows_of(document(name), name):
            continue  # never there
        with contextlib.suppress(LookupError, StopIteration):  # rows are found by it
            missing += [key] if TABLES[name](other) == before else []
    return missing


@pytest.mark.parametrize("name", NAMES)
def test_no_column_of_the_file_is_left_out(name):
    assert unseen(name) == []


@pytest.mark.parametrize("name", NAMES)
def test_nothing_that_was_measured_once_is_left_out(name):
    """What is not in rows: settings, and figures of the whole run."""

    def leaves(found, path=()):
        for key, value in found.items():
            if isinstance(value, dict):
                yield from leaves(value, (*path, key))
            elif value is not None and not isinstance(value, list):
                yield (*path, key)

    before = TABLES[name](document(name))
    for path in leaves(document(name)):
        other = document(name)
        inner = other
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = changed(inner[path[-1]])
        assert TABLES[name](other) != before, " ".join(path)


@pytest.mark.parametrize("section", SECTIONS, ids=lambda one: one[3:30].partition("\n")[0])
def test_a_section_names_its_model_how_often_and_what_it_cannot_show(section):
    text = " ".join(section.split())
    assert re.search(r"cannot show", text)
    assert re.search(r"\bn = \d|(median|medians|fastest) of \d|\d questions", text)
    for name in PLACE.findall(section):
        found = document(name)
        row = (rows_of(found, name) or [{}])[0]
        known = (row.get("model"), found.get("shape"), found.get("machine", {}).get("shape"), "model")
        model = next(one for one in known if isinstance(one, str))
        assert model.lower() in text.lower(), f"{name}: {model}"


def test_a_left_out_column_would_be_seen(monkeypatch):
    bare = lambda found: ["| a |", "|---|", *(f"| {row['a']} |" for row in found["rows"])]  # noqa: E731
    found = {"rows": [{"a": 1, "against": 2.0, "same": 5}, {"a": 3, "against": 4.0, "same": 5}], "seed": 1}
    monkeypatch.setitem(TABLES, "bare", bare)
    monkeypatch.setitem(globals(), "document", lambda name: copy.deepcopy(found))
    assert unseen("bare") == ["against", "same"]
    monkeypatch.setitem(TABLES, "bare", whole(bare))
    assert unseen("bare") == []
    assert whole(bare)(found) == [
        "| a | against |", "|---|---|", "| 1 | 2 |", "| 3 | 4 |", "", "Also in the file: same 5; seed 1.",
    ]  # fmt: skip
