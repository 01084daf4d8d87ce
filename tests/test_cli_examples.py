# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""All commands speak alike, and every example in their help is understood; some run here, the others as slow tests."""

import importlib
import inspect
import io
import json
import shlex
import subprocess
import sys

import pytest
import typer

from hf_blend.cli.main import build, commands, functions, main, split_examples

FUNCTIONS = {
    (name, command): function
    for name in commands()
    for command, function in functions(importlib.import_module(f"hf_blend.cli.{name.replace('-', '_')}")).items()
}


EXAMPLES = [line for function in FUNCTIONS.values() for line in split_examples(function.__doc__ or "")[1]]
UNMARKED = [line for line in EXAMPLES if "#" not in line]
LAST = {line.split()[1]: line for line in UNMARKED}  # of each command: the smallest
SHORT = [LAST[name] for name in ("ask", "chat", "env", "eval", "index", "inspect", "size", "store", "tune", "bench")]


def marked(example: str) -> object:
    """An example as a test parameter, with the mark that its comment asks for."""
    marks = [getattr(pytest.mark, word) for word in ("slow", "network") if word in example.partition("#")[2].split()]
    marks += [] if marks or example in SHORT else [pytest.mark.slow]
    return pytest.param(example, marks=marks, id=example)


def test_every_command_has_two_examples_that_call_it():
    wrong = []
    for (name, command), function in FUNCTIONS.items():
        examples = split_examples(function.__doc__ or "")[1]
        begins = f"hf-blend {name}" if name == command else f"hf-blend {name} {command}"
        wrong += [] if len(examples) >= 2 else [begins]
        wrong += [example for example in examples if not f"{example} ".startswith(f"{begins} ")]
    assert wrong == []


def understood(line: str) -> str:
    """Parse a command line as the program does; what it cannot understand is returned as a sentence."""
    words = shlex.split(line, comments=True)[1:]
    command = typer.main.get_command(build(words))
    try:
        while hasattr(command, "commands"):
            command, words = command.commands[words[0]], words[1:]
        command.make_context(line, words)
    except (KeyError, typer.BadParameter.__base__) as wrong:  # a UsageError, whichever click typer brings
        return f"{line}: {wrong}"
    return ""


def test_every_example_is_understood():
    assert [said for said in map(understood, EXAMPLES) if said] == []
    assert understood("hf-blend store stats --jsno")
    assert understood("hf-blend store stast")


@pytest.mark.usefixtures("small_smollm2")
@pytest.mark.parametrize("example", [marked(example) for example in EXAMPLES])
def test_the_example_runs(example, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_BLEND_HOME", str(tmp_path / "home"))
    words = shlex.split(example, comments=True)[1:]
    if words[0] == "demo":  # a server's threads write behind their test's end, to a file that pytest has closed
        done = subprocess.run(
            [sys.executable, "-P", "-m", "hf_blend.cli.main", *words], capture_output=True, text=True, timeout=200
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return
    monkeypatch.setattr(sys, "stdin", io.StringIO("What does the miller carry?\n/sources\n"))
    with pytest.raises(SystemExit) as ended:
        main(words)
    out, err = capsys.readouterr()
    assert not ended.value.code, f"exit code {ended.value.code}\n{out}\n{err}"


def test_every_command_has_json_and_shows_it_in_an_example():
    without = [
        names
        for names, function in FUNCTIONS.items()
        if "json" not in inspect.signature(function).parameters
        or not any("--json" in line for line in split_examples(function.__doc__ or "")[1])
    ]
    assert without == []


def test_a_pipe_hears_one_document_and_no_bars(tmp_path):
    command = [sys.executable, "-P", "-m", "hf_blend", "size", "tiny:llama", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr, "\x1b" in done.stdout) == (0, "", False)
    assert json.loads(done.stdout)
