# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A model that cannot be used is refused by a sentence, before its weights are read."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hf_blend.errors import ConfigError, UnsupportedModelError
from hf_blend.evaluation import bundled
from hf_blend.evaluation.bundled import load_model, open_model


def config_folder(path: Path, model_type: str, **fields: object) -> str:
    """A folder with nothing but a config: whoever reads weights fails differently."""
    AutoConfig.for_model(model_type, **fields).save_pretrained(path)
    return str(path)


@pytest.fixture
def no_weights(monkeypatch):
    """Fail where weights are read."""
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("weights were read"))


unread = pytest.mark.usefixtures("no_weights")


@unread
def test_open_model_refuses_what_cannot_be_used_by_a_sentence(model_folder, tmp_path):
    for model_type, says in (("t5", "encoder-decoder"), ("bert", "an encoder"), ("vit", "vit")):
        with pytest.raises(UnsupportedModelError, match=rf"(?s){says}.*decoder-only|decoder-only.*{says}"):
            open_model(config_folder(tmp_path / model_type, model_type))
    (tmp_path / "empty").mkdir()
    shutil.copytree(model_folder, tmp_path / "small")
    config = json.loads((tmp_path / "small" / "config.json").read_text())
    (tmp_path / "small" / "config.json").write_text(json.dumps({**config, "vocab_size": 100}))
    for given, says in (
        ({"name": config_folder(tmp_path / "llama", "llama")}, r"has no tokenizer .*save_pretrained"),
        ({"name": str(tmp_path / "small")}, "258 tokens, but its model has embeddings for 100"),
        ({"name": str(tmp_path / "empty")}, "config of the model"),
        ({"name": "./nowhere"}, "no folder './nowhere'"),
        ({"device": "cuda:99"}, "cuda:99"),
        ({"device": "gpu"}, "'gpu' cannot be used"),
        ({"dtype": "bf16"}, "Did you mean 'bfloat16'"),
    ):
        with pytest.raises(ConfigError, match=says):
            open_model(**given)


@unread
def test_open_model_asks_nothing_of_a_hub_that_cannot_be_reached(monkeypatch):
    monkeypatch.setattr(bundled, "_hub_is_reachable", lambda: False)
    with pytest.raises(ConfigError, match="hub cannot be reached"):
        open_model("nobody/nothing")


def test_load_names_a_damaged_file_of_weights(model_folder, tmp_path):
    shutil.copytree(model_folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="weights of the model"):
        open_model(str(tmp_path)).load()


def test_load_model_takes_device_and_dtype(model_folder):
    model, _ = load_model(model_folder, "cpu", "bfloat16")
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    assert {weight.device.type for weight in load_model(model_folder)[0].parameters()} == {"cpu"}
    automatic = open_model(model_folder)
    assert automatic.device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert automatic.positions == 2048
