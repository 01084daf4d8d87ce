# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The page of measurements is what the committed results say, is short enough to be read, and claims no more."""

import json
import re
from pathlib import Path

import measured
import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "measurements.md").read_text("utf-8")
PAGES = {path.name: path.read_text("utf-8") for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]}
TOYS = ("chain model", "chain-world", "`chains`", "reference model", "reference world", "reference-world")
MOST_WORDS, MOST_COLUMNS, MOST_ROWS = 5000, 6, 8
each = pytest.mark.parametrize("section", measured.SECTIONS, ids=lambda one: one.file)


def document(section):
    return json.loads((ROOT / "benchmarks" / "results" / f"{section.file}.json").read_text("utf-8"))


def tables(text):
    """The lines of each table of a page, without its head."""
    return [block.splitlines() for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)]


def test_the_page_is_made_from_the_committed_results():
    assert measured.page() == PAGE, "run make docs"


def test_the_page_is_short_enough_to_be_read():
    assert len(PAGE.split()) <= MOST_WORDS
    long = [rows[0] for rows in tables(PAGE) if len(rows) - 2 > MOST_ROWS]
    heads = [(name, rows[0]) for name, text in PAGES.items() for rows in tables(text)]
    assert (long, [one for one in heads if one[1].count("|") > MOST_COLUMNS + 1]) == ([], [])


@each
def test_a_section_has_its_verdict_first_and_says_how_often_and_what_it_cannot_show(section):
    written = section.written(document(section))
    assert re.match(rf"## {re.escape(section.title)}\n\n[^\n]+\? \*\*[^\n*]+\.\*\*\n\n\|", written)
    assert re.search(r"(median|fastest) of \d|n = \d", written)
    assert "annot show" in written
    assert f"(../benchmarks/results/{section.file}.json)" in written
    assert len(tables(written)) == 1


@each
def test_a_changed_figure_changes_table_and_verdict(section):
    before, found = section.written(document(section)), tripled(document(section))
    assert section.verdict(found) != section.verdict(document(section))
    assert tables(section.written(found)) != tables(before)


def tripled(value):
    """The same document with other measurements; counts of what was asked for stay."""
    if isinstance(value, float):
        return 3 * value + 17
    if isinstance(value, list):
        return [tripled(one) for one in value]
    if isinstance(value, dict):
        kept = ("ratio", "rate_gb_s", "gpu_hour", "load_to_compute")
        counts = {"right": 99, "break_even_tokens": {"any": 99}}
        return {key: one if key in kept else counts.get(key, tripled(one)) for key, one in value.items()}
    return value


def test_no_page_shows_what_a_toy_model_answers():
    told = {name: [toy for toy in TOYS if toy in text] for name, text in PAGES.items() if name != "reference.md"}
    assert {name: toys for name, toys in told.items() if toys} == {}
