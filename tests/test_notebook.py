# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The notebook runs as it is written, from the first cell to the last, without a kernel."""

import ast
import json
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


def test_notebook_is_short_holds_no_output_and_every_cell_is_python():
    assert len(NOTEBOOK["cells"]) <= 10
    assert not any(cell.get("outputs") for cell in NOTEBOOK["cells"])
    assert all(ast.parse(plain(cell)).body for cell in CODE)


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
