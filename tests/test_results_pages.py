# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Pages of results name the model, how often it was measured, and what the figures cannot show."""

import json
import re
from pathlib import Path

import pytest

from hf_blend.evaluation.readme import PLACE, SOURCES

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


def document(name):
    return json.loads((RESULTS / f"{SOURCES.get(name, name)}.json").read_text("utf-8"))


def rows_of(found, name):
    """The rows behind a table; one with another source's name has its rows under its own."""
    rows = found.get(name if name in SOURCES else "rows", [])
    return [row for row in rows if row.get("part") != "search"]  # a study searches first; its page says so


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
