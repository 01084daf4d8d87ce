# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What the documents say runs: Python blocks in the order of the page, command lines against the real command line."""

import copy
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pictures
import pytest
import typer
from tables import PLACE, filled
from worlds import reference_questions

import hf_blend
from hf_blend import BlendConfig, ChunkStore, plugins
from hf_blend.cli.main import build, commands
from hf_blend.verify.runner import check_names

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NEEDED = {  # page: packages of extras
    "frameworks.md": ("langchain_core", "llama_index", "haystack"),
    "indexing.md": ("datasets",),
}
CHATTING = ("rag_app.md", "first_model.md")  # pages whose prompts are messages; the README has a test of its own
NOTES = ["The light of Skerry is kept by Una Moss.", "A lantern costs four pounds.", "The boat is red.", "Tea is at 6"]
LINK = re.compile(r"\]\((?!https?:)([^)\s]*)\)")


def name(path):
    return str(path.relative_to(ROOT))


def blocks(path, *languages):
    return [text for language, text in BLOCK.findall(path.read_text("utf-8")) if language in languages]


def command_lines(path):
    """Lines that begin with one of our programs, without comments; also in plain blocks and in running text."""
    text = "\n".join(blocks(path, "", "bash", "console"))
    text += "\n" + "\n".join(re.findall(r"`((?:hf-blend|make) [^`]+)`", BLOCK.sub("", path.read_text("utf-8"))))
    lines = [line.removeprefix("$ ").partition("  #")[0].strip() for line in text.splitlines()]
    return [line for line in lines if line.startswith(("hf-blend ", "make "))]


LINES = sorted({line for path in PAGES for line in command_lines(path)})


@pytest.fixture
def ready(reference, tmp_path, monkeypatch):
    """What a page's blocks find ready, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_BLEND_HOME", str(tmp_path / "home"))
    one = reference_questions()[0]
    return {
        "model": reference[0],
        "assistant": copy.deepcopy(reference[0]),
        "tokenizer": copy.deepcopy(reference[1]),
        "documents": one["chunks"],
        "question": one["question"],
        "system": None,
        "store": ChunkStore.open("memory://"),
    }


@pytest.mark.parametrize("path", [path for path in PAGES[1:] if blocks(path, "python")], ids=name)
def test_the_python_of_the_page_runs(path, ready, request):
    if path.name in CHATTING:
        model, tokenizer = request.getfixturevalue("smollm2")
        ready |= {"model": model, "tokenizer": copy.deepcopy(tokenizer), "documents": NOTES, "question": "Who is it?"}
    for package in NEEDED.get(path.name, ()):
        pytest.importorskip(package, reason=f"{path.name} needs {package}: pip install hf-blend[dev]")
    for number, text in enumerate(blocks(path, "python")):
        exec(compile(text, f"{name(path)}, block {number}", "exec"), ready)


@pytest.mark.parametrize("line", LINES)
def test_the_command_line_is_understood(line):
    words = shlex.split(re.sub(r"\b(MODEL|FOLDER)\b", "tiny:llama", line).replace(" N", " 1").replace(" B", " 1"))
    if words[0] == "make":
        done = subprocess.run(["make", "-n", words[1]], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return
    command, words = typer.main.get_command(build(words)), words[1:]
    context = command.make_context("hf-blend", list(words)) if words[0].startswith("-") else None
    while context is None and hasattr(command, "commands"):
        assert words[0] in command.commands, f"{line}: no command named {words[0]}"
        command, words = command.commands[words[0]], words[1:]
    if context is None and words and "--help" not in words:
        command.make_context(line, list(words))  # raises UsageError for what it does not know


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_every_link_leads_somewhere(path):
    for target in LINK.findall(path.read_text("utf-8")):
        file, _, anchor = target.partition("#")
        found = (path.parent / file).resolve() if file else path
        assert found.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", found.read_text("utf-8"), re.MULTILINE)
            slugs = {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
            assert anchor in slugs, target


@pytest.mark.parametrize("path", [path for path in PAGES if PLACE.search(path.read_text("utf-8"))], ids=name)
def test_the_tables_are_those_of_the_committed_results(path):
    assert filled(path.read_text("utf-8"), ROOT / "benchmarks" / "results") == path.read_text("utf-8")


def test_every_page_is_in_the_list_of_pages():
    listed = set(LINK.findall((ROOT / "docs" / "README.md").read_text("utf-8")))
    assert {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"} <= listed


def test_the_site_is_built_without_a_warning_and_fetches_nothing(tmp_path):
    pytest.importorskip("mkdocs", reason="mkdocs is not installed: pip install hf-blend[docs]")
    command = [sys.executable, "-P", "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    pages = {path.stem: path.read_text("utf-8") for path in tmp_path.glob("*.html")}
    assert {path.stem for path in (ROOT / "docs").glob("*.md")} - {"README"} <= set(pages)
    fetched = [re.findall(r'(?:src|<link[^>]* href)="(?:https?:)?//[^"]*', text) for text in pages.values()]
    assert not [one for found in fetched for one in found]
    assert 'href="../' not in "".join(pages.values())


@pytest.mark.parametrize("picture", pictures.PICTURES)
def test_the_picture_is_drawn_from_the_committed_results(picture):
    drawn = (ROOT / "docs" / "pictures" / f"{picture}.svg").read_text("utf-8")
    assert drawn == f"{pictures.PICTURES[picture]()}\n", "run make docs"


def test_the_reference_has_every_public_word_and_setting():
    page = (ROOT / "docs" / "reference.md").read_text("utf-8")
    missing = [word for word in hf_blend.__all__ if not word.startswith("__") and f"`{word}`" not in page]
    missing += [word for word in BlendConfig().to_dict() if f"`{word}`" not in page]
    assert not missing, "run make docs"


def test_the_reference_names_no_method_that_is_not_there():
    def known(kind):
        return set(check_names() if kind == "verify" else plugins.describe(kind))

    page = (ROOT / "docs" / "reference.md").read_text("utf-8").partition("## Methods by name")[2]
    for kind, text in re.findall(r"^### `([\w.]+)`\n(.*?)(?=^##|\Z)", page, re.MULTILINE | re.DOTALL):
        assert set(re.findall(r"^\* `([^`]+)`", text, re.MULTILINE)) <= known(kind), kind


def test_all_commands_are_spoken_of_somewhere():
    assert {line.split()[1] for line in LINES if line.startswith("hf-blend ")} >= set(commands()) - {"eval"}
