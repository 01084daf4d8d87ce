# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What the documents say runs, is so, and is what the committed results say, also in examples and in the guide."""

import copy
import importlib
import json
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import measured
import pictures
import pytest
import tables
import torch
from calls import count_calls
from tables import PLACE, filled, load_result

import hf_blend
from hf_blend import BlendConfig, ChunkStore, plugins
from hf_blend.errors import MissingExtraError, PluginNotFoundError
from hf_blend.evaluation.demo.request import DemoRequest
from tests.chat_templates import ASKED, CHATML, DOCUMENTS, QUESTION, small_tokenizer
from tests.conftest import slow_but

from .test_cli import understood

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / f"{page}.md" for page in ("README", "CONTRIBUTING", "ARCHITECTURE")]
PAGES += sorted((ROOT / "docs").glob("*.md"))
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NEEDED = {  # page: packages of extras
    "frameworks.md": ("langchain_core", "llama_index", "haystack"),
    "indexing.md": ("datasets",),
}
CHATTING = ("rag_app.md",)  # pages whose prompts are messages; the README has a test of its own
NOTES = ["The light of Skerry is kept by Una Moss.", "A lantern costs four pounds.", "The boat is red.", "Tea is at 6"]
MOST = 21842  # words of all pages in docs
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
def ready(models, here):
    """What a page's blocks find ready, in an empty folder."""
    model, tokenizer = models["spaces"]
    return {
        "model": model,
        "assistant": copy.deepcopy(model),
        "tokenizer": copy.deepcopy(tokenizer),
        "documents": [f"{text}\n" for text in DOCUMENTS],
        "question": QUESTION,
        "system": None,
        "store": ChunkStore.open("memory://"),
    }


PROGRAMS = [path for path in PAGES[1:] if blocks(path, "python")]


@pytest.mark.parametrize(
    "path", slow_but(*(path for path in PROGRAMS if path.name not in CHATTING), among=PROGRAMS), ids=name
)
def test_the_python_of_the_page_runs(path, ready, request):
    if path.name in CHATTING:
        model, tokenizer = request.getfixturevalue("smollm2")
        ready |= {"model": model, "tokenizer": copy.deepcopy(tokenizer), "documents": NOTES, "question": "Who is it?"}
    if path.name == "ARCHITECTURE.md":
        ready["tokenizer"].chat_template = CHATML
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
    assert understood(" ".join(map(shlex.quote, words))) == ""


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


def test_the_words_of_the_pages_only_become_fewer():
    count = sum(len(path.read_text("utf-8").split()) for path in (ROOT / "docs").glob("*.md"))
    assert count <= MOST, f"{count:,} words: say it shorter; nobody reads so much"


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
    drawn = pictures.path_of(picture).read_text("utf-8")
    assert drawn == f"{pictures.PICTURES[picture]()}\n", "run make docs"


def test_the_reference_has_every_public_word_and_setting():
    page = (ROOT / "docs" / "reference.md").read_text("utf-8")
    missing = [word for word in hf_blend.__all__ if not word.startswith("__") and f"`{word}`" not in page]
    missing += [word for word in BlendConfig().to_dict() if f"`{word}`" not in page]
    assert not missing, "run make docs"


def test_the_reference_names_what_a_setting_chooses_among():
    page = (ROOT / "docs" / "reference.md").read_text("utf-8")
    kinds = ("store.codecs", "store.eviction")
    assert not [name for kind in kinds for name in plugins.describe(kind) if f'"{name}"' not in page]


def test_every_selector_is_on_the_page_of_rules_once():
    page = (ROOT / "docs" / "rules.md").read_text("utf-8")
    assert sorted(re.findall(r"^[|*] `([^`]+)`", page, re.MULTILINE)) == sorted(plugins.describe("selectors"))


STEP = re.compile(r"^\* `([\w/]+\.py)` (`[\w.]+`(?:, `[\w.]+`)*)", re.MULTILINE)


IMPORTED = re.compile(r"^ *from (hf_blend[\w.]*) import ([\w, ]+)", re.MULTILINE)


def imported(text):
    return [(module, name) for module, names in IMPORTED.findall(text) for name in names.strip().split(", ")]


def test_stability_says_of_every_public_name_once_what_it_is_and_each_path_imports():
    listed = imported((ROOT / "docs" / "stability.md").read_text("utf-8"))
    assert len(listed) == len({*listed})
    assert {name for module, name in listed if module == "hf_blend"} == {*hf_blend.__all__, "plugins"} - {
        "__version__"
    }
    for module, name in listed:
        try:
            assert hasattr(importlib.import_module(module), name) or importlib.import_module(f"{module}.{name}")
        except MissingExtraError:
            assert module.startswith("hf_blend.integrations."), module


def test_stability_lists_every_path_that_a_page_imports():
    texts = [path.read_text("utf-8") for path in PAGES]
    texts = ["\n".join(re.findall(r"```py(?:thon)?\n(.*?)```", text, re.DOTALL)) for text in texts]
    listed = imported((ROOT / "docs" / "stability.md").read_text("utf-8"))
    assert {*imported("\n".join(texts))} <= {*listed}


def test_the_page_names_what_is_called_in_the_order_in_which_it_is_called():
    before, *steps, after = re.split(r"\n## (?=\d|After)", (ROOT / "ARCHITECTURE.md").read_text("utf-8"))
    assert len(steps) == 8
    parts = (STEP.findall(text) for text in ("\n".join(steps), before + after))
    named, beside = ([(file, name.strip("`")) for file, row in step for name in row.split(", ")] for step in parts)
    sources = {file: (ROOT / "hf_blend" / file).read_text("utf-8") for file, _ in beside}
    assert not [name for file, name in beside if f"def {name.rpartition('.')[2]}(" not in sources[file]]
    called = list(count_calls(selector="kv-deviation").counts)  # which the page follows, in the order of first calls
    assert not [entry for entry in named if entry not in called]
    places = [called.index(entry) for entry in named]
    assert places == sorted(places), [named[n] for n in range(1, len(named)) if places[n] < places[n - 1]]


@pytest.mark.usefixtures("small_smollm2", "here")
@pytest.mark.parametrize("program", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_the_example_runs_and_says_something(program, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(program)])
    runpy.run_path(str(program), run_name="__main__")
    assert capsys.readouterr().out.strip()


def test_the_folder_for_custom_generate_takes_messages(tiny_model):
    tokenizer = small_tokenizer("spaces")
    model = tiny_model(vocab_size=len(tokenizer), num_hidden_layers=2, max_position_embeddings=2048)
    program = ROOT / "examples" / "custom_generate" / "custom_generate" / "generate.py"
    generate = runpy.run_path(str(program))["generate"]
    store, settings = ChunkStore.open("memory://"), {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    given = {"tokenizer": tokenizer, "messages": [ASKED], "documents": DOCUMENTS, "recompute_ratio": 1.0}
    tokenizer.chat_template = CHATML
    try:
        output = generate(model, store=store, **given, **settings)
        expected = tokenizer.apply_chat_template([ASKED], add_generation_prompt=True, return_tensors="pt")["input_ids"]
    finally:
        tokenizer.chat_template = None
    assert torch.equal(output, model.generate(expected, **settings))
    assert len(store) == 4


GUIDE = (ROOT / "docs" / "extending.md").read_text("utf-8")
(EVAL,) = re.findall(r"^hf-blend eval --method.*$", GUIDE, re.MULTILINE)


@pytest.fixture
def guided(here):
    """The guide's file in an empty folder."""
    code = re.search(r"Write this to `(\w+\.py)`:\n\n```python\n(.*?)```", GUIDE, re.DOTALL)
    (here / code[1]).write_text(code[2])


@pytest.mark.slow
@pytest.mark.usefixtures("small_smollm2", "guided")
def test_the_frontier_is_plotted_and_an_edited_file_is_not_mixed_with_the_old_one(here, run):
    words = shlex.split(EVAL)[1:]
    words[words.index("--limit") + 1] = "2"
    code, _, err = run(*words, "--ratio", "0.1")
    assert code == 0, err
    rows = json.loads((here / "run" / "summary.json").read_text())["rows"]
    assert {row["ratio"] for row in rows if row["method"] == "./relative_value.py"} == {0.02, 0.05, 0.15, 0.3, 0.1}
    assert (here / "run" / "quality-charged-budget.svg").read_text().startswith("<svg")
    assert (here / "run" / "report.html").exists()
    path = here / "relative_value.py"
    path.write_text(path.read_text().replace("1e-12", "1e-6"))
    code, _, err = run(*words, "--ratio", "0.1")
    assert code == 2
    assert "holds a run with files" in err


@pytest.mark.usefixtures("guided")
def test_a_visitor_of_the_demo_cannot_name_a_file():
    with pytest.raises(PluginNotFoundError, match="no selector"):
        DemoRequest("a\nb", "c?", 0.1, "./relative_value.py").config()


def test_the_page_is_made_from_the_committed_results():
    assert measured.page() == (ROOT / "docs" / "measurements.md").read_text("utf-8"), "run make docs"


def test_the_numbers_in_the_text_are_those_of_the_committed_results():
    short = set(load_result("break_even")["break_even_tokens"].values())
    text = " ".join(PAGES[0].read_text("utf-8").split())
    assert f"from about {min(short)} tokens on" in text
    twelve = tables.robust_rows(load_result("robust"), 12)["qwen2.5-coder-1.5b", "musique"]
    reuse, default = (twelve[key]["kl"] for key in (tables.REUSE, tables.DEFAULT))
    assert f"with twelve the first row is {reuse:.2f} and {default:.2f}" in text
    assert "0.4 of its error" in " ".join((ROOT / "docs" / "choosing.md").read_text("utf-8").split())
    assert f"{default / reuse:.1f}" == "0.4"


@pytest.mark.parametrize("ratio", [None, 1.0])
def test_the_first_example_answers_and_like_stock_at_ratio_1(ratio, ready, capsys, monkeypatch, here):
    (example,) = blocks(PAGES[0], "python")
    settings = "" if ratio is None else f", recompute_ratio={ratio}"
    code = example.replace("(model, store)", f"(model, store{settings})").replace("=64)", "=12)")
    model, tokenizer = ready["model"], ready["tokenizer"]
    tokenizer.chat_template = CHATML
    monkeypatch.setattr(hf_blend, "load", lambda name: (model, tokenizer), raising=False)
    exec(compile(code, "README", "exec"), ready)
    text, report = capsys.readouterr().out.strip().rsplit("\n", 1)
    assert text.strip()
    assert "recomputed" in report
    if ratio == 1.0:
        rendered = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
        inputs = tokenizer.apply_chat_template(ready["messages"], **rendered)
        stock = model.generate(**inputs, max_new_tokens=12)[0, inputs["input_ids"].shape[1] :]
        assert text == tokenizer.decode(stock, skip_special_tokens=True).strip()
