# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""`benchmarks/reproduce.py` makes a paper's figures on a model in a folder, and goes on where it was stopped."""

import json

import pytest
from papers import cacheblend as cacheblend_figures
from papers import kvstar
from papers.cacheblend import data_files
from reproduce import main

from hf_blend.errors import ConfigError
from hf_blend.evaluation.answering import blend_config
from hf_blend.evaluation.bundled import load_model
from hf_blend.evaluation.methods.base import EvalMethod
from tests.asking import jsonl


@pytest.fixture
def asked(published, tmp_path, monkeypatch):
    """Arguments of a run over two questions of a real set, cut short."""
    (tmp_path / "data").mkdir()
    rows = [json.loads(line) for line in (published / "musique_cacheblend.jsonl").read_text("utf-8").splitlines()[:2]]
    cut = [{**row, "chunks": [chunk[:200] for chunk in row["chunks"][:3]]} for row in rows]
    jsonl(tmp_path / "data" / "musique.jsonl", *cut)
    monkeypatch.setattr(kvstar, "TEXT_TOKENS", 16)
    init = EvalMethod.__init__
    monkeypatch.setattr(EvalMethod, "__init__", lambda self, *given: init(self, *given[:3], 1))
    arguments = ["--data", str(tmp_path / "data"), "--limit", "2", "--small", "--json", "--device", "cpu"]
    return [*arguments, "--output-dir", str(tmp_path / "run")]


@pytest.fixture
def saved(tmp_path, tiny_model, mistral_tokenizer):
    """Saves a random model of some sizes with a published tokenizer, and gives its folder."""

    def save(name, **sizes):
        path = tmp_path / name
        tiny_model(vocab_size=32000, max_position_embeddings=32768, **sizes).save_pretrained(path)
        mistral_tokenizer.save_pretrained(path)
        return str(path)

    return save


@pytest.fixture
def untied(saved):
    return saved("untied", num_hidden_layers=4, hidden_size=32, num_attention_heads=8, num_key_value_heads=4)


def made_by(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert not ended.value.code
    found = json.loads(capsys.readouterr().out)
    return found, {figure["name"]: figure["rows"] for figure in found["figures"]}


@pytest.mark.slow
def test_figures_are_made_on_folder_with_real_set_and_stopped_run_goes_on(saved, asked, tmp_path, monkeypatch, capsys):
    arguments = ["cacheblend", "--model", saved("model", num_hidden_layers=5, hidden_size=16), *asked]
    loaded = []
    monkeypatch.setattr(cacheblend_figures, "load_model", lambda *given: loaded.append(given) or load_model(*given))
    _, figures = made_by(arguments, capsys)
    assert len(loaded) == 1, "one model for all figures"
    assert set(figures) == {
        "methods", "ratio", "check-layer", "chunk-tokens", "chunks", "batch", "storage",
    }  # fmt: skip
    exact = [row for row in figures["ratio"] if row["ratio"] == 1.0]
    assert [row["difference"] for row in exact] == [0.0]

    monkeypatch.setattr("hf_blend.evaluation.trial._Bench.answer", None)  # nothing is answered again
    assert made_by(arguments, capsys)[1] == figures


def test_folder_without_task_and_layer_that_is_no_number_are_refused(tmp_path):
    (tmp_path / "news.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match=r"no JSONL file for any of musique.*musique\.jsonl"):
        data_files(tmp_path, ("musique",))
    with pytest.raises(ConfigError, match="check_layers has 'first', expected layers"):
        blend_config("kv-deviation:check_layers=first")
