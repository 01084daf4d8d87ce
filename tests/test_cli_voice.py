# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""All commands speak alike: options are explained in sentences, --json is everywhere, and pipes hear nothing else."""

import importlib
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

from hf_blend.cli.main import commands, functions, split_examples

ROOT = Path(__file__).resolve().parent.parent
FUNCTIONS = {
    (name, command): function
    for name in commands()
    for command, function in functions(importlib.import_module(f"hf_blend.cli.{name.replace('-', '_')}")).items()
}


def test_every_command_has_json_and_shows_it_in_an_example():
    without = [
        names
        for names, function in FUNCTIONS.items()
        if "json" not in inspect.signature(function).parameters
        or not any("--json" in line for line in split_examples(function.__doc__ or "")[1])
    ]
    assert without == []


@pytest.fixture
def piped(tmp_path):
    """Run a command line as a pipe would; gives exit code, stdout and stderr."""

    def run(*words):
        command = [sys.executable, "-P", "-m", "hf_blend", *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        return done.returncode, done.stdout, done.stderr

    return run


@pytest.mark.parametrize(
    "words",
    [("size", "tiny:llama"), pytest.param(("inspect", "--selector", "boundary"), marks=pytest.mark.slow)],
    ids=lambda words: words[0],
)
def test_a_pipe_hears_one_document_and_no_bars(words, piped):
    code, out, err = piped(*words, "--json")
    assert code == 0
    assert json.loads(out)
    assert err == ""
    assert "\x1b" not in out
