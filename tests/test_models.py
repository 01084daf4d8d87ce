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
@pytest.mark.parametrize(("model_type", "says"), [("t5", "encoder-decoder"), ("bert", "an encoder"), ("vit", "vit")])
def test_what_is_no_decoder_is_named_with_its_type(model_type, says, tmp_path):
    with pytest.raises(UnsupportedModelError, match=says) as caught:
        open_model(config_folder(tmp_path, model_type))
    assert "decoder-only" in str(caught.value)


@unread
@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_a_folder_without_tokenizer_is_named_with_the_way_to_add_one(model_type, tmp_path):
    with pytest.raises(ConfigError, match=r"has no tokenizer .*save_pretrained"):
        open_model(config_folder(tmp_path, model_type))


@unread
def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(model_folder, tmp_path):
    shutil.copytree(model_folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 100}))
    with pytest.raises(ConfigError, match="258 tokens, but its model has embeddings for 100"):
        open_model(str(tmp_path))


@unread
@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"device": "cuda:99"}, "cuda:99"),
        ({"device": "gpu"}, "'gpu' cannot be used"),
        ({"dtype": "bf16"}, "Did you mean 'bfloat16'"),
        ({"name": "./nowhere"}, "no folder './nowhere'"),
    ],
)
def test_a_wrong_device_dtype_or_folder_is_refused(given, says):
    with pytest.raises(ConfigError, match=says):
        open_model(**given)


@unread
def test_a_folder_without_config_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="config of the model"):
        open_model(str(tmp_path))


@unread
def test_a_hub_that_cannot_be_reached_is_asked_nothing(monkeypatch):
    monkeypatch.setattr(bundled, "_hub_is_reachable", lambda: False)
    with pytest.raises(ConfigError, match="hub cannot be reached"):
        open_model("nobody/nothing")


def test_a_damaged_file_of_weights_is_named(model_folder, tmp_path):
    shutil.copytree(model_folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="weights of the model"):
        open_model(str(tmp_path)).load()


def test_device_and_dtype_are_those_that_were_asked_for(model_folder):
    model, _ = load_model(model_folder, "cpu", "bfloat16")
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    assert {weight.device.type for weight in load_model(model_folder)[0].parameters()} == {"cpu"}
    automatic = open_model(model_folder)
    assert automatic.device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert automatic.positions == 2048
