# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The way of a new user: own documents, an own model directory, an index, a restart, ten questions, and mistakes."""

import json

import pytest

from hf_blend.cli.main import main

DOCUMENTS = {
    "a.txt": "The lighthouse was built on the north cliff. Its keeper is called Mara, who came from Velden.\n",
    "b.txt": "Mara's brother Tomas repairs boats in the harbour. He owns a grey dog.\n",
    "c.md": "In winter the harbour freezes, and the boats are drawn up to the old mill.\n",
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with documents, ten questions, and nothing else."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_BLEND_HOME", str(tmp_path / "home"))
    (tmp_path / "docs").mkdir()
    for name, text in DOCUMENTS.items():
        (tmp_path / "docs" / name).write_text(text)
    (tmp_path / "ten.txt").write_text("".join(f"Who keeps the light, number {n}?\n" for n in range(10)))
    return tmp_path


@pytest.fixture
def run(capsys):
    def run_words(*words):
        with pytest.raises(SystemExit) as ended:
            main(words)
        return ended.value.code or 0, *capsys.readouterr()

    return run_words


def test_ten_questions_over_an_indexed_folder_compute_no_document_again(here, run, model_folder):
    code, out, err = run("index", "docs", "--model", model_folder, "--store", "kv", "--json")
    assert (code, json.loads(out)["stored"]) == (0, 3), err
    asked = ("ask", "--questions", "ten.txt", "docs", "--model", model_folder, "--store", "kv", "--json")
    for beginnings in (1, 0):  # what stands before the first document is no part of an index
        code, out, err = run(*asked, "--max-new-tokens", "2")
        found = json.loads(out)
        assert code == 0, err
        assert [row["question"] for row in found["rows"]] == (here / "ten.txt").read_text().splitlines()
        assert found["chunks"]["computed"] == beginnings
        assert found["chunks"]["loaded"] >= 30


def test_a_word_that_the_bundled_model_does_not_know_is_said(here, run):
    code, _, err = run("ask", "Who keeps the light?", "docs", "--store", "kv", "--max-new-tokens", "1")
    assert code == 0
    assert "This model knows 298 words" in err
    assert "Name another with --model." in err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["ask", "Who?", "nowhere"], "nowhere"),
        (["ask", "Who?"], "came without documents"),
        (["ask", "Who?", "docs", "--model", "dosc"], "(but 'docs' is)"),
        (["ask", "Who?", "docs", "--model", "./own"], "there is no folder './own'"),
        (["ask", "--questions", "none.txt", "docs"], "none.txt"),
        (["inspect", "Who?", "docs/a.tx"], "a.tx"),
    ],
)
def test_a_mistake_is_answered_with_a_sentence(here, run, words, says):
    code, out, err = run(*words)
    assert code in (1, 2)
    assert out == ""
    assert says in err
    assert "Traceback" not in err
