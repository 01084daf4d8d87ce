# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""All commands speak alike: options are explained in sentences, --json is everywhere, and pipes hear nothing else."""

import importlib
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
import typer

from hf_blend.cli.main import commands, functions, main, split_examples

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


def test_every_option_is_explained_in_a_sentence():
    unexplained = []
    for names, function in FUNCTIONS.items():
        options = inspect.signature(function).parameters.values()
        for option in (one for one in options if one.annotation is not typer.Context):
            (told,) = [one for one in get_args(option.annotation)[1:] if hasattr(one, "help")]
            unexplained += [] if told.hidden or (told.help or "").endswith(".") else [(*names, option.name)]
    assert unexplained == []


def test_what_a_command_does_is_said_in_one_line():
    texts = {names: split_examples(function.__doc__ or "")[0] for names, function in FUNCTIONS.items()}
    long = [names for names, text in texts.items() if len(text.splitlines()[0]) >= 110 or not re.search(r"[.;]", text)]
    assert long == []


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


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["ask", "--selector", "kv-devation"], "Did you mean 'kv-deviation'?"),
        (["verify", "tiny:lama"], "Did you mean"),
        (["size", "tiny:lama"], "Did you mean"),
        (["bench", "tfft"], "Did you mean 'ttft'?"),
        (["demmo"], "Did you mean 'demo'?"),
        (["tune", "--model", "./no-model"], "there is no folder './no-model'"),
        (["inspect", "Who?", "nowhere.txt"], "no file or folder 'nowhere.txt'"),
    ],
)
def test_a_wrong_name_is_answered_with_a_right_one(words, hint, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(words)
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert hint in err
    assert "Traceback" not in err


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_can_be_shown_for_the_shell(shell, capsys, monkeypatch):
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    with pytest.raises(SystemExit) as ended:
        main(["--show-completion", shell])
    assert not ended.value.code
    assert "hf-blend" in capsys.readouterr().out
