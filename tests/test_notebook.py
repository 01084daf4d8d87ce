# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The notebook runs as it is written, from the first cell to the last, without a kernel."""

import ast
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

NOTEBOOK = json.loads((Path(__file__).parents[1] / "examples" / "quickstart.ipynb").read_text("utf-8"))
CODE = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def plain(cell):
    """A cell as Python: what IPython does with a line of `%` is left out."""
    lines = cell.splitlines()
    return "\n".join(line[: -len(line.lstrip())] + "pass" if line.lstrip().startswith("%") else line for line in lines)


def test_notebook_is_short_was_run_in_order_and_every_cell_is_python():
    assert len(NOTEBOOK["cells"]) <= 10
    assert all(ast.parse(plain(cell)).body for cell in CODE)
    cells = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == [1, 2, 3]
    said = "".join("".join(output["text"]) for output in cells[1]["outputs"])
    assert re.findall(r"\d+ chunks loaded, \d+ computed", said) == [
        "0 chunks loaded, 13 computed",
        "13 chunks loaded, 0 computed",
    ]
    (drawn,) = cells[2]["outputs"]
    assert "".join(drawn["data"]["text/html"]).count('data-state="done"') == 3


def run_notebook(monkeypatch):
    """Run all cells; the names that they leave, and what was displayed."""
    texts = []
    names = {}
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(HTML=texts.append))
    for cell in CODE:
        exec(compile(plain(cell), "quickstart.ipynb", "exec"), names)
    return names, texts


@pytest.mark.slow
@pytest.mark.usefixtures("here", "small_smollm2")
def test_notebook_runs_and_draws_three_answers(monkeypatch):
    names, (figure,) = run_notebook(monkeypatch)
    assert names["first"].computed_chunks == names["second"].loaded_chunks > 12
    assert figure.count('data-state="done"') == 3
    assert 'class="hb-token hb-chosen"' in figure
