# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The instruments that ask the bundled models run, and give what their committed files hold."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
RUNS = {
    "context_shift": "context-shift --windows 2",
    "self_extend": "self-extend --times 1 --count 2",
    "sparse_quality": "sparse-quality --count 1 --method gsa",
    "sparse_offload_answers": "sparse-offload --count 1",
    "partial_quality": "partial-quality --count 1 --model reference",
    "eviction": "eviction --stories 2 --questions 1 --requests 20 --seeds 2 --cap 0.5 --served 1",
}


def made(words):
    command = [sys.executable, str(BENCHMARKS / "toys" / "run.py"), *words.split()]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_every_instrument_can_be_asked_for():
    shown = made("--help")
    assert all(words.split()[0] in shown for words in RUNS.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_an_instrument_makes_what_its_file_holds(name):
    kept = json.loads((BENCHMARKS / "results" / f"{name}.json").read_text("utf-8"))
    assert json.loads(made(RUNS[name])).keys() == kept.keys()
