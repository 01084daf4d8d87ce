# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Who names no model gets the best that is here; it reads as much as suits it, and does not repeat itself for ever."""

import json
import os
import re
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig

from hf_blend.errors import MissingExtraError
from hf_blend.evaluation import model_choice
from hf_blend.evaluation.answering import LOOP_TIMES, LOOP_TOKENS, LoopStop, is_loop
from hf_blend.evaluation.bundled import size_of
from hf_blend.evaluation.demo.model_cache import ModelCache
from hf_blend.evaluation.model_choice import FIRST_TRY, REFUSED, choose_model, choose_top_k
from hf_blend.evaluation.retrieving import Piece
from hf_blend.model_names import PACKAGED, load_config
from tests.saved_models import save_tokenizer_of_bytes, save_tokenizer_that_chats

ROOT = Path(__file__).resolve().parents[1]

GB = 1_000_000_000


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """An empty cache of the hub and nothing converted, in a machine with 1 GB; gives the folder."""
    monkeypatch.delenv(model_choice.FOLDER)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_ASSETS_CACHE", str(tmp_path / "assets"))
    monkeypatch.setattr(model_choice, "available_bytes", lambda: GB)
    return tmp_path / "hub"


@pytest.fixture
def add(hub, tiny_model):
    """Put a random model into a cache, by default of the type llama and with a tokenizer that chats."""

    def add_model(name, layers=1, model_type="llama", chats=True, root=hub, **config):
        path = root / name
        if root == hub:
            repository = root / f"models--{name.replace('/', '--')}"
            (repository / "refs").mkdir(parents=True)
            (repository / "refs" / "main").write_text("abc")
            path = repository / "snapshots" / "abc"
        path.mkdir(parents=True)
        words = 258
        if chats:
            words = save_tokenizer_that_chats(path)
        else:
            save_tokenizer_of_bytes(path)
        sizes = {"vocab_size": words, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": layers}
        tiny_model(model_type, **{**sizes, **config}).save_pretrained(path)
        return path

    return add_model


def edit(path, **values):
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_the_largest_that_chats_is_taken_and_the_line_says_why(hub, add):
    add("a/small")
    large = add("b/large", layers=3)
    choice = choose_model("cpu")
    assert (choice.source.name, choice.source.folder) == ("b/large", str(large))
    assert re.fullmatch(r"b/large from the hub's cache, 0\.00\d+ of 1 GB free; --model names another\.", choice.reason)
    assert choice.source.load().config.num_hidden_layers == 3


def test_among_equals_an_instructed_one_is_taken_and_then_the_first_by_name(hub, add):
    add("a/base")
    add("c/base-it")
    assert choose_model("cpu").source.name == "c/base-it"
    add("b/base-Instruct")
    assert choose_model("cpu").source.name == "b/base-Instruct"


def test_what_cannot_answer_or_cannot_be_read_is_passed_over_with_a_reason(hub, add):
    add("good/one")
    add("no/template", 2, chats=False)
    add("no/blend", 2, "gpt2", num_key_value_heads=4)
    edit(add("is/quantised", 2) / "config.json", quantization_config={"quant_method": "gptq"})
    (add("for/embedding", 2) / "modules.json").write_text("[]")
    edit(add("a/classifier", 2) / "config.json", architectures=["LlamaForSequenceClassification"])
    edit(add("own/code", 2) / "config.json", model_type="mine", auto_map={"AutoConfig": "code.MyConfig"})
    edit(
        add("own/tokens", 2) / "tokenizer_config.json",
        tokenizer_class="Mine",
        auto_map={"AutoTokenizer": ["a.B", None]},
    )
    (add("broken/config", 2) / "config.json").write_text("{")
    (add("broken/tokenizer", 2) / "tokenizer.json").write_text("{")
    (add("absent/weights", 2) / "model.safetensors").unlink()
    weights = add("cut/weights", 2) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    (hub / "models--not--whole").mkdir()
    (hub / "models--a--file").write_text("")
    choice = choose_model("cpu")
    assert choice.source.name == "good/one"
    told = "\n".join(choice.skipped)
    for name, why in (
        ("no/template", "no chat template"), ("no/blend", "gpt2 do not blend"), ("is/quantised", "quantised"),
        ("for/embedding", "embeds"), ("a/classifier", "no causal"), ("own/code", "mine"), ("own/tokens", ""),
        ("broken/config", ""), ("broken/tokenizer", ""), ("absent/weights", ""), ("cut/weights", ""),
    ):  # fmt: skip
        line = next(line for line in choice.skipped if line.startswith(f"{name}: "))
        assert why in line
    assert "not--whole" in told


def test_what_is_no_regular_file_is_not_read(hub, add):
    config = add("a/pipe") / "config.json"
    config.unlink()
    os.mkfifo(config)
    writer = threading.Thread(target=config.write_text, args=["{}"])  # so that who reads it is not held up for ever
    writer.start()
    _, skipped = model_choice._candidates("auto")
    assert skipped == ["a/pipe: config.json is no regular file."]
    assert config.read_text() == "{}"
    writer.join()


def test_what_the_memory_does_not_hold_is_passed_over_in_the_dtype_it_is_loaded_in(hub, add, monkeypatch):
    add("a/small")
    add("b/large", 40)
    nbytes = (hub / "models--b--large/snapshots/abc/model.safetensors").stat().st_size
    monkeypatch.setattr(model_choice, "available_bytes", lambda: int(1.5 * nbytes))
    choice = choose_model("cpu")
    assert choice.source.name == "a/small"
    assert re.search(r": 0\.\d+ million parameters, .* is too large", choice.skipped[0])
    assert choose_model("cpu", "bfloat16").source.name == "b/large"
    assert choose_model("cpu", "bfloat16", most_parameters=100_000).source.name == "a/small"


def test_what_a_cpu_of_few_cores_would_answer_too_late_is_passed_over(hub, add, monkeypatch):
    add("small", 1)
    add("large", 4)
    assert choose_model("cpu").source.name == "large"
    monkeypatch.setattr(model_choice, "PARAMETERS_PER_CORE", 75_000 / (model_choice.os.cpu_count() or 1))
    assert choose_model("cpu").source.name == "small"


def test_converted_models_and_a_folder_of_models_are_looked_through(hub, add, tmp_path, monkeypatch):
    add("mine/parted", 2, root=tmp_path / "assets" / "hf_blend" / "models")
    choice = choose_model("cpu")
    assert (choice.source.name, "the converted models" in choice.reason) == ("mine", True)
    assert load_config("mine").num_hidden_layers == 2, "its name is taken where names of models are"
    add("owner/own", 1, root=tmp_path / "models")
    monkeypatch.setenv(model_choice.FOLDER, str(tmp_path / "models"))
    assert choose_model("cpu").source.name == "owner/own", "the folder alone"


def test_smollm2_is_called_a_first_try_wherever_it_is_from(hub, add, tmp_path, monkeypatch):
    monkeypatch.setattr("hf_blend.model_names.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match="pip install"):
        choose_model("cpu")
    add(PACKAGED["smollm2"].hub_id)
    choice = choose_model("cpu")
    assert choice.source.name == "smollm2"
    assert choice.reason.endswith(FIRST_TRY)
    monkeypatch.setenv(model_choice.FOLDER, "")
    assert choose_model("cpu").reason == FIRST_TRY, "no model is looked for"
    add("a/better", 2)
    monkeypatch.delenv(model_choice.FOLDER)
    assert FIRST_TRY not in choose_model("cpu").reason


def test_types_that_do_not_blend_are_those_of_the_results():
    rows = json.loads((ROOT / "benchmarks/results/families.json").read_text())["models"]
    assert {row["model"] for row in rows if not row["supported"]} == REFUSED


def test_ask_says_what_was_taken_and_with_verbose_what_was_not(hub, add, here, run):
    add("a/chats", 2, max_position_embeddings=4096)
    add("b/mute", 3, chats=False)
    (here / "notes.txt").write_text(
        "\n\n".join(f"The light of harbour {number} is kept by Una." for number in range(99))
    )
    words = [
        "ask",
        "Who keeps the light?",
        "notes.txt",
        "--store",
        "kv",
        "--max-new-tokens",
        "2",
        "--chunk-tokens",
        "64",
    ]
    code, _, err = run(*words)
    assert (code, "a/chats from the hub's cache" in err, "b/mute" in err) == (0, True, False), err
    assert "3 of " in err
    assert re.search(r"pieces are read for a question, as suits 0\.\d+ million parameters;", err)
    _, _, err = run(*words, "--verbose", "--top-k", "1")
    assert "Not taken: b/mute: it has no chat template." in err
    assert "pieces are read" not in err


def test_the_page_begins_with_what_was_chosen(hub, add):
    add("a/chats", 2, max_position_embeddings=4096)
    models = ModelCache(device="cpu", takes_folders=False)
    assert models.choice.source.name == "a/chats"
    assert models.take("") is models.take("a/chats")


def source(parameters, positions=None, hidden=64):
    config = AutoConfig.for_model("llama", hidden_size=hidden, num_hidden_layers=2, num_attention_heads=4)
    named = {"parameters": parameters, "positions": positions, "config": config}
    return SimpleNamespace(**named, dtype=torch.float32, device=torch.device("cpu"))


def test_choose_top_k_grows_with_the_model_and_ends_at_the_room(monkeypatch):
    pieces = [Piece("a.txt", 0, "a", tuple(range(100)))] * 20
    monkeypatch.setattr(model_choice, "available_bytes", lambda: 1000 * GB)
    assert [choose_top_k(source(size * 1e9), pieces, 0) for size in (0.1, 0.5, 1.5, 7)] == [3, 4, 6, 8]
    assert choose_top_k(source(7e9, positions=1000), pieces, 100) == 7
    assert choose_top_k(source(7e9, positions=100), pieces, 99) == 1
    assert choose_top_k(source(7e9), [], 0) == 8
    monkeypatch.setattr(model_choice, "available_bytes", lambda: 4_000_000 + 2 * 5 * 100 * 1024)
    assert choose_top_k(source(1e6, hidden=64), pieces, 0) == 3
    few = source(1e6, hidden=64)
    few.parameters, few.config.num_key_value_heads = 1_000_000, 4
    monkeypatch.setattr(model_choice, "available_bytes", lambda: 4_000_000 + 2 * 2 * 100 * 1024)
    assert choose_top_k(few, pieces, 0) == 2


def test_a_size_is_said_in_one_way():
    said = [size_of(count) for count in (134_515_008, 1_777_088_000, 2e9, 235e9)]
    assert said == [f"{size} parameters" for size in ("135 million", "1.78 billion", "2 billion", "235 billion")]


def test_is_loop_finds_repeated_words_and_sentences_and_no_list():
    words = list(range(100, 100 + LOOP_TOKENS))
    assert is_loop([7] * (LOOP_TOKENS * LOOP_TIMES))
    assert not is_loop([7] * (LOOP_TOKENS * LOOP_TIMES - 1)), "occurrences do not overlap"
    numbered = [token for number in range(LOOP_TIMES) for token in (number, *words)]
    assert is_loop([1, 2, 3, *numbered])
    assert not is_loop(numbered[: -LOOP_TOKENS - 1])
    assert not is_loop([*numbered, 5]), "it went on"
    assert not is_loop(list(range(500)))
    assert not is_loop([])


def test_loop_stop_stops_generate_and_reads_the_answer_alone(tiny_model):
    model = tiny_model()
    prompt = torch.tensor([[5] * 100])

    def always_nine(module, args, output):
        output.logits[..., 9] = 1e9
        return output

    with torch.no_grad():
        handle = model.register_forward_hook(always_nine)
        stop = LoopStop(100)
        ids = model.generate(prompt, max_new_tokens=200, do_sample=False, stopping_criteria=[stop], pad_token_id=0)
        handle.remove()
    assert stop.is_looping
    assert ids.shape[1] == 100 + LOOP_TOKENS * LOOP_TIMES
    assert not LoopStop(100)(prompt, None).any()


def test_a_stopped_answer_is_told_and_not_called_cut(small_smollm2, here, run, monkeypatch):
    monkeypatch.setattr("hf_blend.evaluation.answering.is_loop", lambda ids: len(ids) >= 3)
    _, _, err = run("ask", "--model", "smollm2", "--max-new-tokens", "30", "--store", "kv")
    assert "It began to repeat itself and was stopped: blend." in err
    assert "Cut at" not in err
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: False, readline=iter(["Who?\n", ""]).__next__))
    _, _, err = run("chat", "--model", "smollm2", "--max-new-tokens", "30", "--store", "kv")
    assert "It began to repeat itself and was stopped: blend." in err


def test_copies_of_one_model_are_taken_at_their_main_revision(hub, add):
    path = add("a/chats", 2)
    shutil.copytree(path, path.parent / "later")
    (path.parent / "later" / "config.json").write_text("{")
    assert choose_model("cpu").source.folder == str(path)
