# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""`hf-blend serve`: where its options come from, and what reaches the model, the service and the log."""

import logging
import os
import platform
import subprocess
import sys
from types import SimpleNamespace

import httpx
import pytest
from worlds import REFERENCE, reference_questions

from hf_blend.cli.main import main
from hf_blend.errors import ConfigError, MissingExtraError
from hf_blend.evaluation import bundled, model_choice
from hf_blend.recipes import DEFAULT
from hf_blend.serving import heaps, run
from hf_blend.serving.prompts import text_prompt
from hf_blend.serving.tenants import Tenant, Tenants
from tests.conftest import slow_but
from tests.saved_models import save_tokenizer_that_chats
from tests.serving.processes import running

QUESTION = reference_questions()[0]
open_model = bundled.open_model  # as it is before a test replaces it
KEY = "key-of-all-0123456789"


class Reached(Exception):
    """What a command was about to do."""


@pytest.fixture
def reached(monkeypatch):
    """Run the command until it would start an engine; gives its plan, and how the model was loaded."""
    found = {}

    def find(name, device, dtype, weights):
        found.update(model=name, device=device, dtype=dtype, weights=weights)
        return SimpleNamespace(name=name, load=lambda: None, tokenizer=None, processor=lambda: None)

    def make(model, tokenizer, plan, eyes):
        assert eyes is None
        found["plan"] = plan
        raise Reached

    monkeypatch.setattr(bundled, "open_model", find)
    monkeypatch.setattr(model_choice, "open_model", find)
    monkeypatch.setattr(run, "make_service", make)
    monkeypatch.setattr(heaps, "share_heaps", lambda: found.update(is_bounded="plan" not in found))

    def start(*words):
        found.clear()
        with pytest.raises((Reached, SystemExit, ConfigError)):
            main(["serve", "--debug", *words])
        return found

    return start


def test_a_server_uses_the_device_and_the_dtype_of_other_commands(reached, monkeypatch):
    assert (reached()["device"], reached()["dtype"], reached()["weights"]) == ("auto", "auto", "auto")
    monkeypatch.setenv("HF_BLEND_SERVE_WEIGHTS", "4bit")
    assert (reached()["weights"], reached("--weights", "8bit")["weights"]) == ("4bit", "8bit")
    found = reached("--device", "cuda:1", "--dtype", "bfloat16", "--model", "here")
    assert found["is_bounded"], "the heaps of threads, before there are any"
    assert (found["device"], found["dtype"], found["model"]) == ("cuda:1", "bfloat16", "here")


def test_the_best_model_here_is_served_that_the_engine_takes(tmp_path, tiny_model, reached, monkeypatch, capsys):
    kinds = {"small": ("llama", 1), "large": ("llama", 2), "windowed": ("gemma3_text", 3)}
    for name, (kind, layers) in kinds.items():
        words = save_tokenizer_that_chats(tmp_path / name)
        tiny_model(kind, vocab_size=words, num_hidden_layers=layers).save_pretrained(tmp_path / name)
    monkeypatch.setenv(model_choice.FOLDER, str(tmp_path))
    monkeypatch.setattr(model_choice, "open_model", open_model)
    assert reached()["plan"].name == "large"
    assert f"large from {tmp_path}, " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.toml", 'max-requests = 7\nport = 1\nserved-model-name = "of the file"\n'),
        ("a.json", '{"max_requests": 7, "port": 1, "served_model_name": "of the file"}'),
    ],
)
def test_options_come_from_the_line_then_the_environment_then_a_file(name, text, reached, monkeypatch, tmp_path):
    (tmp_path / name).write_text(text)
    monkeypatch.setenv("HF_BLEND_SERVE_MAX_BODY_BYTES", "5000")
    monkeypatch.setenv("HF_BLEND_SERVE_SERVED_MODEL_NAME", "of the environment")
    plan = reached("--config", str(tmp_path / name))["plan"]
    assert (plan.limits.requests, plan.limits.body_bytes, plan.name) == (7, 5000, "of the environment")
    plan = reached("--config", str(tmp_path / name), "--max-requests", "9", "--served-model-name", "x")["plan"]
    assert (plan.limits.requests, plan.name) == (9, "x")


def test_a_server_heals_unless_it_is_told_not_to(reached):
    assert [reached(*words)["plan"].heal for words in ([], ["--heal"], ["--no-heal"])] == [True, True, False]


def test_vllm_heals_only_where_it_is_asked_for(monkeypatch):
    from hf_blend.integrations.vllm import proxy

    plans = []
    monkeypatch.setattr(proxy, "make_proxy", lambda upstream, made: plans.append(made.healing is not None))
    monkeypatch.setattr(run, "listen", lambda *settings, **more: None)
    for words in ([], ["--heal"], ["--no-heal"]):
        with pytest.raises(SystemExit, match="0"):
            main(["serve", "--no-access-log", "--upstream", "http://vllm", "--model", REFERENCE, *words])
    assert plans == [False, True, False]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("prot = 1", "has 'prot'. Did you mean 'port'?"),
        ("port = ", "cannot be read"),
        ("max-requests = 'many'", "valid integer"),
    ],
)
def test_a_file_of_options_that_makes_no_sense_is_refused(text, says, reached, tmp_path, capsys):
    (tmp_path / "a.toml").write_text(text)
    assert "plan" not in reached("--config", str(tmp_path / "a.toml"))
    err = capsys.readouterr().err
    assert "Invalid value for '--" in err
    assert says in " ".join(err.split())


def test_one_key_for_all_is_asked_for(reached, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_BLEND_SERVE_API_KEY", KEY)
    (tenant,) = reached()["plan"].tenants
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tenants, "close", lambda self: None)
        tenants = Tenants([tenant], lambda one: None)
    assert tenants.find(f"Bearer {KEY}") == tenant == Tenant(api_key=KEY)
    assert tenants.find("Bearer other") is tenants.find(None) is None
    assert not tenant.salt
    assert "plan" not in reached("--api-key", "short")
    (tmp_path / "tenants.json").write_text("{}")
    assert "plan" not in reached("--tenants", str(tmp_path / "tenants.json"))


@pytest.fixture
def access():
    """Leave the logger of requests as it was."""
    logger = logging.getLogger("hf_blend.serving.access")
    kept = (logger.handlers[:], logger.level, logger.propagate)
    yield logger
    logger.handlers[:], logger.level, logger.propagate = kept


def test_requests_are_logged_by_default(reached, access, monkeypatch):
    from hf_blend.cli import serve as module

    engine = SimpleNamespace(model=None, store=SimpleNamespace(recipe=lambda *given, **more: DEFAULT))
    service = SimpleNamespace(name="x", memory="y", engine=engine)
    monkeypatch.setattr(module, "_service", lambda *given: service)
    monkeypatch.setattr(run, "serve", lambda *given, **more: (_ for _ in ()).throw(Reached))
    reached("--no-access-log")
    assert not access.isEnabledFor(logging.INFO)
    reached()
    assert access.isEnabledFor(logging.INFO)
    assert not access.propagate


@pytest.mark.parametrize("weights", slow_but("4bit", among=["8bit", "4bit"]))
def test_a_server_with_few_bits_answers_as_a_lone_cache_with_the_same_model(weights, bench, tmp_path, caplog):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes makes 8 and 4 bits of weights")
    source = bundled.open_model(REFERENCE, "cpu", weights=weights)
    model, body = source.load(), {"model": "smollm2", "temperature": 0, "max_tokens": 8, "ignore_eos": True}
    with running((model, source.tokenizer), tmp_path) as service:
        assert service.memory.startswith(f"float32 with weights in {weights} on cpu; ")
        asked = {**body, "prompt": QUESTION["question"], "documents": QUESTION["chunks"]}
        answer = [httpx.post(f"{service.url}/v1/completions", json=asked, timeout=60).json() for _ in range(2)][1]
        assert answer["usage"]["hf_blend"]["prefill"] == "blended"
        ids = text_prompt(source.tokenizer, asked["prompt"], asked["documents"]).ids
        lone = bench.lone_answer(model, service.engine.store, ids, new=8, selector="kv-deviation")
    assert answer["choices"][0]["text"] == source.tokenizer.decode(lone, skip_special_tokens=True)
    assert not [line for line in caplog.messages if "inputs will be cast" in line]
    model.save_pretrained(tmp_path / "saved")
    with pytest.raises(ConfigError, match="saved quantised"):
        bundled.open_model(str(tmp_path / "saved"), weights=weights)


def test_weights_of_another_name_and_those_without_bitsandbytes_are_refused(monkeypatch):
    with pytest.raises(ConfigError, match="no weights named 'int8'"):
        bundled.open_model(REFERENCE, weights="int8")
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(MissingExtraError, match=r'--weights 8bit needs bitsandbytes.*hf-blend\[quant\]"'):
        bundled.open_model(REFERENCE, weights="8bit")


HEAPS = """
import ctypes, threading
from hf_blend.serving.heaps import share_heaps
if {shares}:
    share_heaps()
met = threading.Barrier(12)
def hold():
    held = [bytearray(50_000) for _ in range(20)]
    met.wait()
threads = [threading.Thread(target=hold) for _ in range(12)]
for one in threads:
    one.start()
for one in threads:
    one.join()
ctypes.CDLL(None).malloc_stats()
"""


def heaps_of_twelve_threads(shares, **more):
    kept = {name: value for name, value in os.environ.items() if name != "MALLOC_ARENA_MAX"}
    words = [sys.executable, "-c", HEAPS.format(shares=shares)]
    done = subprocess.run(words, env={**kept, **more}, capture_output=True, text=True, check=True)
    return done.stderr.count("Arena ")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has a heap for each thread")
def test_share_heaps_keeps_threads_from_having_a_heap_each_unless_the_user_says_how_many():
    alone, shared = heaps_of_twelve_threads(False), heaps_of_twelve_threads(True)
    assert shared < alone
    assert shared <= 3, "one may be there before"
    asked = {"MALLOC_ARENA_MAX": "5"}
    assert heaps_of_twelve_threads(True, **asked) == heaps_of_twelve_threads(False, **asked) == 5
