# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Every example in the help of a command is run, in an empty folder."""

import importlib
import io
import shlex
import subprocess
import sys

import pytest

from hf_blend.cli.main import commands, functions, main, split_examples

FUNCTIONS = {
    (name, command): function
    for name in commands()
    for command, function in functions(importlib.import_module(f"hf_blend.cli.{name.replace('-', '_')}")).items()
}


def marked(example: str) -> object:
    """An example as a test parameter, with the mark that its comment asks for."""
    marks = [getattr(pytest.mark, word) for word in ("slow", "network") if word in example.partition("#")[2].split()]
    return pytest.param(example, marks=marks, id=example)


EXAMPLES = [line for function in FUNCTIONS.values() for line in split_examples(function.__doc__ or "")[1]]


@pytest.mark.parametrize(("name", "command"), FUNCTIONS)
def test_every_command_has_two_examples_that_call_it(name, command):
    _, examples = split_examples(FUNCTIONS[name, command].__doc__ or "")
    begins = f"hf-blend {name}" if name == command else f"hf-blend {name} {command}"
    assert len(examples) >= 2
    assert all(f"{example} ".startswith(f"{begins} ") for example in examples)


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
