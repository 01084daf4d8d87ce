# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""`hf-blend reproduce` makes a paper's figures on a model in a folder, and goes on where it was stopped."""

import json

import pytest

from hf_blend.cli.main import main
from hf_blend.errors import ConfigError
from hf_blend.evaluation.answering import blend_config
from hf_blend.evaluation.methods.base import Approach
from hf_blend.evaluation.reproducing import cacheblend, data_files
from hf_blend.evaluation.trial import Trial


@pytest.fixture
def folder(tmp_path, tiny_model, mistral_tokenizer):
    """A random model of 30 layers with a published tokenizer."""
    path = tmp_path / "model"
    model = tiny_model(vocab_size=32000, num_hidden_layers=30, hidden_size=16, max_position_embeddings=32768)
    model.save_pretrained(path)
    mistral_tokenizer.save_pretrained(path)
    return str(path)


def test_the_figures_are_made_on_a_folder_with_a_real_set_and_a_stopped_run_goes_on(
    folder, published, tmp_path, monkeypatch, capsys
):
    (tmp_path / "data").mkdir()
    rows = (published / "musique_cacheblend.jsonl").read_text("utf-8").splitlines()[:1]
    row = json.loads(rows[0])
    row["chunks"] = [chunk[:400] for chunk in row["chunks"][:3]]
    (tmp_path / "data" / "musique.jsonl").write_text(json.dumps(row) + "\n")
    init = Approach.__init__
    monkeypatch.setattr(Approach, "__init__", lambda self, *given: init(self, *given[:3], 2, *given[4:]))
    asked = ["reproduce", "cacheblend", "--model", folder, "--data", str(tmp_path / "data"), "--limit", "1", "--small"]
    asked += ["--output-dir", str(tmp_path / "run"), "--json", "--device", "cpu"]

    def made():
        with pytest.raises(SystemExit) as ended:
            main(asked)
        assert not ended.value.code
        return json.loads(capsys.readouterr().out)

    figures = {figure["name"]: figure["rows"] for figure in made()["figures"]}
    assert set(figures) == {"methods", "ratio", "check-layer", "chunk-tokens", "chunks"}
    assert {row["method"] for row in figures["check-layer"]} >= {
        "kv-deviation:check_layers=1", "kv-deviation:check_layers=3"
    }  # fmt: skip
    assert {row["varied"] for row in figures["chunks"]} == {"2 chunks", "16 chunks"}
    exact = [row for row in figures["ratio"] if row["ratio"] == 1.0]
    assert [row["difference"] for row in exact] == [0.0]
    page = (tmp_path / "run" / "index.html").read_text("utf-8")
    assert page.count("<svg") >= 5

    monkeypatch.setattr("hf_blend.evaluation.trial._Bench.answer", None)  # nothing is answered again
    assert {figure["name"]: figure["rows"] for figure in made()["figures"]} == figures


def test_the_number_of_chunks_varies():
    trials = {figure.name: figure.trials for figure in cacheblend(Trial(("needle",)))}
    assert [trial.shape().most_chunks for _, trial in trials["chunks"]] == [2, 4, 8, 16]


def test_a_folder_without_a_task_is_refused(tmp_path):
    (tmp_path / "news.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match=r"no JSONL file for any of musique.*musique\.jsonl"):
        data_files(tmp_path, ("musique",))


def test_a_layer_that_is_no_number_is_refused():
    with pytest.raises(ConfigError, match="check_layers has 'first', expected layers"):
        blend_config("kv-deviation:check_layers=first")
