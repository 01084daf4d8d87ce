# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The command starts light, speaks to people and to programs, says in its exit code how it went; its examples run."""

import importlib
import inspect
import io
import json
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer

import hf_blend
from hf_blend import ChunkStore, load
from hf_blend.cli import main as command
from hf_blend.cli import output
from hf_blend.cli.main import build, commands, functions, main, split_examples
from hf_blend.store import ChunkKey, ChunkKV
from tests.asking import raising

BURN = '''"""Burn."""

from hf_blend.cli.output import fail

__all__ = ["burn"]


def burn() -> None:
    """Burn.

    Examples:
        hf-blend burn
    """
    fail("2 of 3 differ.")
'''
ROOT = Path(__file__).resolve().parent.parent


def is_terminal():
    return True


@pytest.fixture(autouse=True)
def screen(here, monkeypatch):
    """A wide screen, in an empty folder."""
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def filled(tmp_path):
    """A store on disk with two chunks of 5 and 7 tokens."""
    folder = tmp_path / "kv"
    with ChunkStore.open(folder) as store:
        for tokens in (5, 7):
            layer = (torch.zeros(2, tokens, 4), torch.ones(2, tokens, 4))
            table = (torch.ones(tokens, 4), torch.zeros(tokens, 4))
            key = ChunkKey("ab" * 32, (1,), tuple(range(tokens)))
            store.put(ChunkKV(key, (layer,), (table,), (0,)))
    return str(folder)


def test_help_lists_every_command_file_with_its_first_line(run):
    code, out, _ = run("--help")
    assert code == 0
    names = {path.stem for path in (ROOT / "cli").glob("[!_]*.py")} - command.HELPERS
    assert set(command.commands()) == {name.replace("_", "-") for name in names}
    for name, line in command.commands().items():
        assert name in out
        assert line.split()[0] in out
        assert line.endswith("."), f"cli/{name}: its first docstring line is shown to users: {line!r}"
    _, of_store, _ = run("store", "--help")
    for line in re.findall(r"^  \S+  +(.*)", of_store + out, re.MULTILINE):
        assert not line.endswith("..."), "cut where the screen ends"
    _, of_ask, _ = run("ask", "--help")
    assert "env var" not in of_ask
    assert "# network" not in of_ask


def test_help_imports_no_command_and_that_of_command_no_torch():
    code = (
        "import sys\nfrom hf_blend.cli.main import main\n"
        f"for words in {[[], *([name] for name in command.commands())]}:\n"
        "    try: main([*words, '--help'])\n    except SystemExit: pass\n"
        "    heavy = {'torch', 'transformers'} | ({'hf_blend.cli.store'} if not words else set())\n"
        "    if heavy & set(sys.modules): break\n"
        "else: words = None\n"
        "print('imported by:', words)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "imported by: None"


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["stor"], "Did you mean 'store'?"),
        (["store", "stast"], "Did you mean 'stats'?"),
        (["store", "ls", "--jsno"], "--json"),
        (["store", "ls", "--limit", "0"], "greater than or equal to 1"),
    ],
)
def test_main_exits_with_2_and_suggests_near_name(run, words, hint):
    code, out, err = run(*words)
    assert code == 2
    assert out == ""
    assert hint in err


def test_debug_shows_where_error_came_from():
    with pytest.raises(hf_blend.StoreError):
        command.main(["--debug", "store", "ls", "--store", "nowhere"])


def test_store_ls_and_stats_give_one_json_document_each(run, filled, model_folder):
    code, out, err = run("store", "ls", "--store", filled, "--model", model_folder, "--json")
    entries = json.loads(out)
    assert code == 0
    assert err == ""
    newest, oldest = entries
    assert newest["created"] > oldest["created"]
    assert newest["tokens"] == 7
    assert len(newest["digest"]) == 64
    _, out, _ = run("store", "ls", "--store", filled, "--model", model_folder, "--json", "--limit", "1")
    assert json.loads(out) == [newest]
    _, out, _ = run("store", "stats", "--store", filled, "--json")
    stats = json.loads(out)
    assert stats["chunks"] == 2
    assert stats["tokens"] == 12
    assert stats["nbytes"] == newest["nbytes"] + oldest["nbytes"]
    _, out, _ = run("store", "stats", "--store", filled, "--namespace", "other", "--json")
    assert json.loads(out)["chunks"] == 0


def test_store_ls_names_chunks_by_first_words_of_their_tokenizer(run, here, model_folder):
    model, tokenizer = load(model_folder)
    with ChunkStore.open() as store:
        store.add(model, tokenizer, ["The mill\nis old."])
    for name, words in ((model_folder, {"The mill is"}), ("no-such-model", {None})):
        _, out, err = run("store", "ls", "--model", name, "--json")
        assert {row["begins"] for row in json.loads(out)} == words
        assert ("First words are left out" in err) == (name == "no-such-model")
    _, out, _ = run("store", "stats", "--json")
    assert json.loads(out)["folder"] == str(here / "home" / "chunks")


def test_show_gives_pipe_tab_separated_lines_with_units(run, filled):
    _, out, _ = run("store", "stats", "--store", filled)
    lines = dict(line.split("\t") for line in out.splitlines())
    assert lines["tokens"] == "12"
    assert re.fullmatch(r"[\d.]+ k?B", lines["nbytes"])
    assert out.isascii()


def test_show_gives_terminal_table_with_units(run, filled, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", is_terminal)
    _, out, _ = run("store", "stats", "--store", filled)
    assert re.search("nbytes.* k?B ", out)
    _, out, _ = run("store", "ls", "--store", filled)
    assert "digest" in out
    assert out.count("disk") == 2


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("read_bytes", 3_140_000, "3.14 MB"),
        ("load_ms", 1234.56, "1,234.6 ms"),
        ("recompute_ratio", 0.15, "15.0%"),
        ("tokens", 12345, "12,345"),
        ("kl", 0.31481, "0.31"),
        ("speed", 1234.5, "1,234"),
    ],
)
def test_humanise_takes_unit_from_name(name, value, text):
    assert output.humanise(name, value) == text


def test_fail_exits_with_1(run, tmp_path, monkeypatch):
    (tmp_path / "burn.py").write_text(BURN)
    monkeypatch.setattr(command, "__file__", str(tmp_path / "main.py"))
    monkeypatch.setattr(sys.modules["hf_blend.cli"], "__path__", [str(tmp_path)])
    assert run("burn") == (1, "", "2 of 3 differ.\n")
    code, out, _ = run("burn", "--help")
    assert code == 0
    assert "Examples:\n    hf-blend burn" in out
    assert list(command.commands()) == ["burn"]
    sys.modules.pop("hf_blend.cli.burn")


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (KeyError("layer 7"), 1, ["KeyError: 'layer 7'", "Run it again with --debug"]),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore"), 1,
         ["--dtype bfloat16", "Tried to allocate 2.00 GiB"]),
        (KeyboardInterrupt(), 130, ["Stopped. What is stored stays"]),
    ],
)  # fmt: skip
def test_main_turns_error_of_others_into_sentence_that_says_what_to_do(run, monkeypatch, error, code, says):
    monkeypatch.setattr("hf_blend.evaluation.bundled.open_model", raising(error))
    ended, out, err = run("index")
    assert ended == code
    assert out == ""
    for part in says:
        assert part in err
    assert "Traceback" not in err


def test_sigterm_ends_command_as_ctrl_c_does(run, monkeypatch):
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("hf_blend.evaluation.bundled.open_model", lambda *_: signal.raise_signal(signal.SIGTERM))
    code, out, err = run("index", "--model", "smollm2")
    assert code == 143
    assert out == ""
    assert "Stopped. What is stored stays, and no entry is half-written. Run the same command again." in err
    assert signal.getsignal(signal.SIGTERM) is before


def test_demo_names_its_extra_before_model_is_read(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "gradio", None)
    monkeypatch.setattr("hf_blend.evaluation.demo.loaded.open_model", raising(AssertionError()))
    code, out, err = run("demo", "--model", "smollm2")
    assert code == 2
    assert out == ""
    assert err.endswith('hf-blend demo needs gradio, which is not installed: pip install "hf-blend[demo]"\n')


@pytest.mark.parametrize("quiet_by", [{"HF_HUB_DISABLE_PROGRESS_BARS": "1"}, {}])
def test_progress_draws_bar_on_terminal_unless_environment_forbids_it(capsys, monkeypatch, quiet_by):
    monkeypatch.delenv("HF_HUB_DISABLE_PROGRESS_BARS", raising=False)
    for name, value in quiet_by.items():
        monkeypatch.setenv(name, value)
    assert list(output.progress([1, 2], "counting")) == [1, 2]
    assert capsys.readouterr() == ("", ""), "no terminal"
    monkeypatch.setattr(sys.stderr, "isatty", is_terminal)
    assert list(output.progress([1, 2], "counting")) == [1, 2]
    assert list(output.progress([1, 2], "silent", quiet=True)) == [1, 2]
    out, err = capsys.readouterr()
    assert out == ""
    assert ("counting" in err) == (not quiet_by)
    assert "silent" not in err


def test_completion_knows_sub_commands():
    shell = {"COMP_WORDS": "hf-blend store ", "COMP_CWORD": "2", "_HF_BLEND_COMPLETE": "complete_bash"}
    done = subprocess.run([sys.executable, "-m", "hf_blend"], cwd=ROOT, capture_output=True, text=True, env=shell)
    assert done.stdout.split() == ["check", "gc", "ls", "rm", "stats"]


FUNCTIONS = {}
EXAMPLES = []
LAST = {}  # of each command: the smallest example
for name in commands():
    module = importlib.import_module(f"hf_blend.cli.{name.replace('-', '_')}")
    for sub_command, function in functions(module).items():
        FUNCTIONS[name, sub_command] = function
        _, examples = split_examples(function.__doc__ or "")
        EXAMPLES += examples
        for line in examples:
            if "#" not in line:
                LAST[name] = line
SHORT = [LAST[name] for name in ("ask", "chat", "env", "eval", "index", "store", "tune", "bench")]


def marked(example: str) -> object:
    """An example as a test parameter, with the mark that its comment asks for."""
    _, _, comment = example.partition("#")
    marks = []
    if "network" in comment:
        marks.append(pytest.mark.network)
    if example not in SHORT:
        marks.append(pytest.mark.slow)
    return pytest.param(example, marks=marks, id=example)


def test_commands_have_json_and_two_examples_each():
    for (name, sub_command), function in FUNCTIONS.items():
        _, examples = split_examples(function.__doc__ or "")
        begins = f"hf-blend {name}" if name == sub_command else f"hf-blend {name} {sub_command}"
        assert len(examples) >= 2, begins
        assert "json" in inspect.signature(function).parameters, begins
        assert "--json" in " ".join(examples), begins
        for example in examples:
            assert f"{example} ".startswith(f"{begins} ")


def understood(line: str) -> str:
    """Parse a command line as the program does; what it cannot understand is returned as a sentence."""
    _, *words = shlex.split(line.replace(" --help", ""), comments=True)
    command = typer.main.get_command(build(words))
    try:
        while hasattr(command, "commands") and words and not words[0].startswith("-"):
            command = command.commands[words[0]]
            words = words[1:]
        if words:  # a command alone may be named in running text
            command.make_context(line, words)
    except (KeyError, typer.BadParameter.__base__) as wrong:  # a UsageError, whichever click typer brings
        return f"{line}: {wrong}"
    return ""


def test_examples_are_understood():
    for line in EXAMPLES:
        assert understood(line) == ""
    assert understood("hf-blend store stats --jsno")
    assert understood("hf-blend store stast")


@pytest.mark.usefixtures("small_smollm2")
@pytest.mark.parametrize("example", [marked(example) for example in EXAMPLES])
def test_example_runs(example, monkeypatch, capsys):
    words = shlex.split(example, comments=True)[1:]
    if words[0] == "demo":  # a server's threads write behind their test's end, to a file that pytest has closed
        command = [sys.executable, "-P", "-m", "hf_blend.cli.main", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stdout + done.stderr
        return
    monkeypatch.setattr(sys, "stdin", io.StringIO("What does the miller carry?\n/sources\n"))
    with pytest.raises(SystemExit) as ended:
        main(words)
    out, err = capsys.readouterr()
    assert not ended.value.code, f"exit code {ended.value.code}\n{out}\n{err}"
