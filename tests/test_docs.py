# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What the documents say runs, is so, and is what the committed results say, also in examples and in the guide."""

import copy
import importlib
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import measured
import pictures
import pytest
from calls import count_calls
from tables import PLACE, filled, load_result

import hf_blend
from hf_blend import BlendConfig, plugins
from hf_blend.errors import MissingExtraError
from tests.asking import memory
from tests.chat_templates import CHATML, DOCUMENTS, QUESTION, user

from .test_cli import understood

ROOT = Path(__file__).resolve().parents[1]
DOCS = sorted((ROOT / "docs").glob("*.md"))
README = ROOT / "README.md"
ARCHITECTURE = ROOT / "ARCHITECTURE.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", ARCHITECTURE, *DOCS]
NEEDED = {"frameworks.md": ("langchain_core", "llama_index", "haystack")}
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)([^)\s]*)\)")
IMPORTED = re.compile(r"^ *from (hf_blend[\w.]*) import ([\w, ]+)", re.MULTILINE)
STEP = re.compile(r"^\* `([\w/]+\.py)` (`[\w.]+`(?:, `[\w.]+`)*)", re.MULTILINE)


def read(path):
    return path.read_text("utf-8")


def name(path):
    return path.name


def blocks(path, *languages):
    found = []
    for language, text in BLOCK.findall(read(path)):
        if language in languages:
            found.append(text)
    return found


def command_lines():
    """Every line that begins with one of our programs, in blocks and in running text, without its comment."""
    found = set()
    for path in PAGES:
        lines = "\n".join(blocks(path, "", "bash", "console")).splitlines()
        lines += re.findall(r"`((?:hf-blend|make) [^`]+)`", BLOCK.sub("", read(path)))
        for line in lines:
            command = line.removeprefix("$ ").partition("  #")[0].strip()
            if command.startswith(("hf-blend ", "make ")):
                found.add(command)
    return sorted(found)


def imports_of(text):
    """Every (module, name) that is imported from hf_blend in a text."""
    found = []
    for module, names in IMPORTED.findall(text):
        for imported in names.strip().split(", "):
            found.append((module, imported))
    return found


WITH_PYTHON = [path for path in PAGES[1:] if blocks(path, "python")]
WITH_TABLES = [path for path in PAGES if PLACE.search(read(path))]


@pytest.fixture
def ready(models, here):
    """What a page's blocks find ready, in an empty folder."""
    model, tokenizer = models["spaces"]
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = CHATML
    return {
        "model": model,
        "assistant": copy.deepcopy(model),
        "tokenizer": tokenizer,
        "documents": list(DOCUMENTS),
        "question": QUESTION,
        "messages": [user("\n\n".join([*DOCUMENTS, QUESTION]))],
        "store": memory(),
    }


@pytest.mark.parametrize("path", WITH_PYTHON, ids=name)
def test_page_python_runs_without_warning(path, ready, recwarn, caplog):
    for package in NEEDED.get(path.name, ()):
        pytest.importorskip(package, reason=f"{path.name} needs {package}: pip install hf-blend[dev]")
    for number, text in enumerate(blocks(path, "python")):
        exec(compile(text, f"{path.name}, block {number}", "exec"), ready)
    said = [record.getMessage() for record in caplog.records if record.name.startswith("hf_blend")]
    assert [*said, *(str(one.message) for one in recwarn if "past_key_values" in str(one.message))] == []


@pytest.mark.parametrize("path", [*PAGES, *sorted((ROOT / "examples").rglob("*.py"))], ids=name)
def test_cache_is_passed_by_name_that_is_right_on_each_release(path):
    texts = [read(path)] if path.suffix == ".py" else blocks(path, "py", "python")
    assert [text for text in texts if "past_key_values=" in text] == []


@pytest.mark.parametrize("line", command_lines())
def test_page_command_line_is_understood(line):
    line = re.sub(r"\b(MODEL|FOLDER)\b", "tiny:llama", line).replace(" N", " 1").replace(" B", " 1")
    words = shlex.split(line)
    if words[0] == "make":
        subprocess.run(["make", "-n", words[1]], cwd=ROOT, capture_output=True, check=True)
    else:
        assert understood(" ".join(map(shlex.quote, words))) == ""


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_page_links_lead_somewhere(path):
    for target in LINK.findall(read(path)):
        file, _, anchor = target.partition("#")
        found = (path.parent / file).resolve() if file else path
        assert found.exists(), target
        if anchor:
            slugs = set()
            for heading in re.findall(r"^#+ (.+)$", read(found), re.MULTILINE):
                slug = re.sub(r"[^\w -]", "", heading.lower())
                slugs.add(slug.strip().replace(" ", "-"))
            assert anchor in slugs, target


@pytest.mark.parametrize("path", WITH_TABLES, ids=name)
def test_page_tables_are_those_of_results(path):
    assert filled(read(path), ROOT / "benchmarks" / "results") == read(path), "run make docs"


@pytest.mark.parametrize("picture", pictures.PICTURES)
def test_picture_is_drawn_from_results(picture):
    drawn = read(pictures.path_of(picture))
    assert drawn == f"{pictures.PICTURES[picture]()}\n", "run make docs"


def test_measurements_are_written_from_results():
    assert measured.page() == read(ROOT / "docs" / "measurements.md"), "run make docs"


def test_readme_numbers_are_those_of_results():
    text = " ".join(read(README).split())
    shortest = min(load_result("break_even")["break_even_tokens"].values())
    assert f"from about {shortest} tokens on" in text
    # layers, heads of K and V, width of a head, bytes of a number
    for layers, heads, width, item in ((30, 3, 64, 4), (28, 2, 128, 2), (32, 8, 128, 2)):
        megabytes = 500 * 2 * layers * heads * width * item / 1e6
        assert f"{megabytes:.0f} MB" in text


def test_site_lists_every_page_builds_and_fetches_nothing(tmp_path):
    names = {path.name for path in DOCS} - {"README.md"}
    assert names <= set(LINK.findall(read(ROOT / "docs" / "README.md")))
    pytest.importorskip("material", reason="mkdocs-material is not installed: pip install hf-blend[docs]")
    command = [sys.executable, "-P", "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.stderr == ""
    assert done.returncode == 0
    assert '<h2 id="what-it-is-worth">' in read(tmp_path / "index.html"), "README is the first page"
    site = "".join(map(read, tmp_path.glob("*.html")))
    assert not re.findall(r'(?:src|<link[^>]* href)="(?:https?:)?//[^"]*', site)
    assert 'href="../' not in site
    for page in names:
        assert (tmp_path / page).with_suffix(".html").exists()


def test_pages_are_short():
    words = {path.name: len(read(path).split()) for path in [*DOCS, ARCHITECTURE]}
    front = len(read(README).split())
    assert front <= 900
    assert words["choosing.md"] <= 1000
    assert front + sum(words.values()) <= 14_000, words


def sentences():
    """Every (page, sentence); `random.Random(seed).sample(sentences(), 40)` draws what is read by fresh eyes."""
    found = []
    for path in [README, *DOCS]:
        text = re.sub(r"<!--table.*?<!--end-->", "", BLOCK.sub("", read(path)), flags=re.DOTALL)
        prose = [line for line in text.splitlines() if not line.startswith(("#", "|", "<", "!", "["))]
        for paragraph in re.split(r"\n\s*\n|\n(?=\* )", "\n".join(prose)):
            for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z`*\[])", " ".join(paragraph.split())):
                found.append((path.name, sentence))
    return found


def test_sentence_has_no_more_than_40_words():
    assert [(page, sentence) for page, sentence in sentences() if len(sentence.split()) > 40] == []


def test_reference_has_every_public_word_setting_and_choice():
    page = read(ROOT / "docs" / "reference.md")
    for word in (*hf_blend.__all__, *BlendConfig().to_dict()):
        if word != "__version__":
            assert f"`{word}`" in page, f"{word}: run make docs"
    for choice in plugins.describe("store.codecs"):
        assert f'"{choice}"' in page, f"{choice}: run make docs"


def test_rules_have_every_selector_once():
    listed = re.findall(r"^(?:\||\* )`([^`]+)`", read(ROOT / "docs" / "rules.md"), re.MULTILINE)
    assert sorted(listed) == sorted(plugins.describe("selectors"))


def test_stability_lists_every_public_name_and_every_path_of_page_once():
    listed = imports_of(read(ROOT / "docs" / "stability.md"))
    assert len(listed) == len(set(listed))
    public = {"__version__"}
    for module, imported in listed:
        if module == "hf_blend":
            public.add(imported)
        try:
            home = importlib.import_module(module)
            assert hasattr(home, imported) or importlib.import_module(f"{module}.{imported}")
        except MissingExtraError:
            assert module.startswith("hf_blend.integrations."), module
    assert public == {*hf_blend.__all__, "plugins"}
    for path in PAGES:
        text = "\n".join(blocks(path, "py", "python"))
        assert set(imports_of(text)) <= set(listed), path.name


def functions_named(text):
    """Every (file, function) that lines such as "* `cache/turns.py` `Turns.crop`, …" name."""
    found = []
    for file, row in STEP.findall(text):
        for function in row.split(", "):
            found.append((file, function.strip("`")))
    return found


def test_architecture_names_functions_in_order_of_their_calls():
    before, *steps, after = re.split(r"\n## (?=\d|After)", read(ARCHITECTURE))
    for file, function in functions_named(before + after):
        name = function.rpartition(".")[2]
        assert f"def {name}(" in read(ROOT / "hf_blend" / file), function
    calls = count_calls(selector="kv-deviation")  # the page follows this rule
    for part in calls.values():
        for entry in part.files | part.classes:
            for name in entry.split(": "):
                assert re.search(rf"`{re.escape(name)}[`.]", read(ARCHITECTURE)), entry
    called = list(calls["prefill"].counts)
    positions = []
    for entry in functions_named("\n".join(steps)):
        assert entry in called
        positions.append(called.index(entry))
    assert positions == sorted(positions)


@pytest.mark.usefixtures("small_smollm2", "here")
@pytest.mark.parametrize("program", sorted((ROOT / "examples").glob("*.py")), ids=name)
def test_example_runs_and_prints(program, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(program)])
    runpy.run_path(str(program), run_name="__main__")
    assert capsys.readouterr().out.strip()


@pytest.mark.slow
@pytest.mark.usefixtures("small_smollm2")
def test_guide_method_is_evaluated_and_edited_file_is_refused(here, run):
    guide = read(ROOT / "docs" / "extending.md")
    ((file, text),) = re.findall(r"Write this to `(\w+\.py)`:\n\n```python\n(.*?)```", guide, re.DOTALL)
    (here / file).write_text(text)
    (line,) = re.findall(r"^hf-blend eval --method.*$", guide, re.MULTILINE)
    words = [*shlex.split(line)[1:], "--limit", "2", "--ratio", "0.1"]
    code, _, err = run(*words)
    assert code == 0, err
    summary = json.loads((here / "run" / "summary.json").read_text())
    ratios = set()
    for row in summary["rows"]:
        if row["method"] == "./relative_value.py":
            ratios.add(row["ratio"])
    assert ratios == {0.02, 0.05, 0.15, 0.3, 0.1}
    (here / file).write_text(text.replace("1e-12", "1e-6"))
    code, _, err = run(*words)
    assert code == 2
    assert "holds a run with files" in err


@pytest.mark.parametrize("ratio", [None, 1.0])
def test_readme_example_answers_and_like_stock_at_ratio_1(ratio, ready, here, capsys, monkeypatch):
    (example,) = blocks(README, "python")
    settings = "" if ratio is None else f", recompute_ratio={ratio}"
    code = example.replace("(model, store)", f"(model, store{settings})")
    model = ready["model"]
    tokenizer = ready["tokenizer"]
    folder = here / "hf_blend" / "bundled" / "handbook"
    folder.mkdir(parents=True)
    for number, text in enumerate(DOCUMENTS):
        (folder / f"{number}.md").write_text(text)
    monkeypatch.setattr(hf_blend, "load", lambda name: (model, tokenizer), raising=False)
    exec(compile(code, "README", "exec"), ready)
    first, second = re.findall(r"(\d+) chunks loaded: ", capsys.readouterr().out)
    assert (first, second) == ("0", str(len(DOCUMENTS) + 1))
    if ratio == 1.0:
        rendered = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
        inputs = tokenizer.apply_chat_template(ready["messages"], **rendered)
        tokens = inputs["input_ids"].shape[1]
        stock = model.generate(**inputs, max_new_tokens=16)
        assert ready["answer"] == tokenizer.decode(stock[0, tokens:], skip_special_tokens=True)
