# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The way of a new user: own documents, an own model, and mistakes."""

import io
import json
import random
import re
import shlex
import shutil
import socket
from pathlib import Path

import pytest
from worlds import REFERENCE

pytest.importorskip("semantic_text_splitter", reason="the extra rag is not installed: pip install hf-blend[rag]")
pytest.importorskip("bm25s", reason="the extra rag is not installed: pip install hf-blend[rag]")

FILES = 24
WORDS = "harbour light boat river mill keeper winter north cliff storm rope barrel market letter wheel".split()


def prose(number: int) -> str:
    """Five paragraphs that nobody wrote."""
    draw = random.Random(number)
    words = [draw.choices(WORDS, k=3) for _ in range(20)]
    sentences = [f"The {one} of place {number} holds a {two} by the {three}." for one, two, three in words]
    return "\n\n".join(" ".join(sentences[start : start + 4]) for start in range(0, 20, 4))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A folder with documents, and files that are none."""
    folder = tmp_path_factory.mktemp("written")
    (folder / "notes" / "archive").mkdir(parents=True)
    for number in range(0, FILES, 2):
        (folder / "notes" / f"note-{number:02d}.txt").write_text(prose(number))
        (folder / "notes" / "archive" / f"note-{number + 1:02d}.MD").write_text(prose(number + 1))
    (folder / "notes" / "table.xlsx").write_bytes(b"PK\x03\x04\x00")
    (folder / "binary.txt").write_bytes(b"\x00\xff\x00")
    (folder / "empty.txt").write_text("\n")
    (folder / "file").write_text("a file")
    return folder


@pytest.fixture
def here(here, written, monkeypatch):
    """Be in a copy of that folder, with nothing on standard input."""
    shutil.copytree(written, here, dirs_exist_ok=True)
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    return here


def test_documents_are_indexed_asked_listed_and_removed(here, run, model_folder):
    def told(*words):
        code, out, err = run(*words, "--store", "kv", "--json")
        assert code == 0, err
        return json.loads(out)

    found = told("index", "notes", "--model", model_folder)
    assert found["documents"] == FILES
    assert found["stored"] == found["chunks"] >= FILES

    text = (here / "notes" / "note-06.txt").read_text()
    question = f"What is said of {' '.join(text.split()[:12])}?"
    answered = told("ask", question, "notes", "--model", model_folder, "--max-new-tokens", 2)
    assert answered["chunks"]["computed"] <= 1  # the beginning of the prompt
    source = answered["rows"][0]["sources"][0]
    assert source["name"] == "notes/note-06.txt"
    assert text[source["start"] : source["stop"]].strip()

    first, *rows = told("store", "ls")
    assert told("store", "rm", first["digest"][:20]) == {"removed": 1}
    assert told("store", "ls") == rows
    assert told("store", "rm", "--model", first["fingerprint"][:8]) == {"removed": len(rows)}


# Command lines that go wrong, and what the answer has to say; MODEL is the own model, FOLDERS the broken ones
MISTAKES = json.loads(Path(__file__).with_name("mistakes.json").read_text("utf-8"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory, model_folder):
    """Folders with models that cannot be used."""
    from transformers import AutoConfig

    path = tmp_path_factory.mktemp("broken")
    for name, model_type in (("bare", "llama"), ("bert", "bert"), ("t5", "t5")):
        AutoConfig.for_model(model_type).save_pretrained(path / name)
    shutil.copytree(model_folder, path / "small")
    config = json.loads((path / "small" / "config.json").read_text())
    (path / "small" / "config.json").write_text(json.dumps({**config, "vocab_size": 100}))
    return path


def test_mistake_is_sentence_with_exit_code_2_before_any_weight_is_read(here, run, folders, model_folder, monkeypatch):
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("weights were read"))
    wrong = []
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        names = {"MODEL": model_folder, "FOLDERS": str(folders), "PORT": str(port), "REFERENCE": REFERENCE}
        for line, says in MISTAKES:
            words = [re.sub("|".join(names), lambda found: names[found[0]], word) for word in shlex.split(line)]
            code, out, err = run(*words)
            if (code, out) != (2, "") or says not in err or "Traceback" in err:
                wrong.append((words, code, out, err))
    assert not wrong
