# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Every program in examples/ runs, offline, and ends well."""

import runpy
import sys
from pathlib import Path

import pytest

PROGRAMS = sorted((Path(__file__).resolve().parent.parent / "examples").glob("*.py"))
NEEDED = {"langchain_rag.py": "langchain_core", "llama_index_rag.py": "llama_index.core"}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.name)
def test_the_example_runs_and_says_something(program, tmp_path, monkeypatch, capsys):
    if program.name in NEEDED:
        reason = f"{NEEDED[program.name]} is not installed: pip install hf-blend[recipes]"
        pytest.importorskip(NEEDED[program.name].partition(".")[0], reason=reason)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(program)])
    runpy.run_path(str(program), run_name="__main__")
    assert capsys.readouterr().out.strip()
