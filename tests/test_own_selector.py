# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The guide to an own selector, from an empty file to a plot, works as it is written."""

import json
import re
import shlex
from pathlib import Path

import pytest

from hf_blend.errors import PluginNotFoundError
from hf_blend.evaluation.demo.wish import DemoRequest

GUIDE = (Path(__file__).resolve().parent.parent / "docs" / "extending.md").read_text("utf-8")
(EVAL,) = re.findall(r"^hf-blend eval --method.*$", GUIDE, re.MULTILINE)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder, and the guide's file in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_BLEND_HOME", str(tmp_path / "home"))
    code = re.search(r"Write this to `(\w+\.py)`:\n\n```python\n(.*?)```", GUIDE, re.DOTALL)
    (tmp_path / code[1]).write_text(code[2])
    return tmp_path


@pytest.mark.slow
@pytest.mark.usefixtures("small_smollm2")
def test_the_frontier_is_plotted_and_an_edited_file_is_not_mixed_with_the_old_one(here, run):
    words = shlex.split(EVAL)[1:]
    words[words.index("--limit") + 1] = "2"
    code, _, err = run(*words, "--ratio", "0.1")
    assert code == 0, err
    rows = json.loads((here / "run" / "summary.json").read_text())["rows"]
    assert {row["ratio"] for row in rows if row["method"] == "./relative_value.py"} == {0.02, 0.05, 0.15, 0.3, 0.1}
    assert (here / "run" / "quality-charged-budget.svg").read_text().startswith("<svg")
    assert (here / "run" / "report.html").exists()
    path = here / "relative_value.py"
    path.write_text(path.read_text().replace("1e-12", "1e-6"))
    code, _, err = run(*words, "--ratio", "0.1")
    assert code == 2
    assert "holds a run with files" in err


def test_a_visitor_of_the_demo_cannot_name_a_file(here):
    with pytest.raises(PluginNotFoundError, match="no selector"):
        DemoRequest("a\nb", "c?", 0.1, "./relative_value.py").config()
