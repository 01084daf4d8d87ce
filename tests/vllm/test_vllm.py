# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""vLLM on the CPU with a real model: what the connector answers is what vLLM alone, or a lone BlendCache, answers.

`make test-vllm` makes an environment with vLLM and runs this.
"""

import importlib.util
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from hf_blend import BlendCache, BlendConfig, ChunkStore
from hf_blend.integrations.vllm import plan_salt
from tests.vllm.conftest import differing

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: use make test-vllm"),
]

ENGINE = Path(__file__).with_name("engine.py")
REQUESTS = int(os.environ.get("HF_BLEND_VLLM_REQUESTS", "40"))
FULL = BlendConfig(recompute_ratio=1.0)
TENANTS = [{"name": name, "api_key": name * 20, "secret": name.encode().hex() * 32} for name in "ab"]
WARM_UP = list(range(1000, 1064))


class Prompt(NamedTuple):
    """Token ids of a prompt in its parts."""

    prefix: list[int]
    documents: list[list[int]]
    question: list[int]


@pytest.fixture(scope="module")
def prompts(model, texts):
    """Prompts over 2 to 6 documents in any order, some over none."""
    tokenizer = model[1]
    passages, questions = texts
    documents = [tokenizer.encode(f"{passage}\n\n") for passage in passages]
    prefix = tokenizer.encode("<|im_start|>user\n")
    draw = random.Random(0)
    prompts = []
    for number in range(REQUESTS):
        chosen = [] if number % 7 == 0 else draw.sample(documents, draw.randint(2, 6))
        question = tokenizer.encode(f"{questions[number % len(questions)]}<|im_end|>\n<|im_start|>assistant\n")
        prompts.append(Prompt(prefix, chosen, question))
    return prompts


def plain(prompt: Prompt) -> dict[str, Any]:
    """A request as the engine takes it that names no documents."""
    ids = [*prompt.prefix]
    for document in prompt.documents:
        ids += document
    return {"ids": ids + prompt.question}


def named(prompt: Prompt, config: BlendConfig, tenant: Any = None) -> dict[str, Any]:
    """A request that names its documents, if it has any, and bears the salt of its plan."""
    request = plain(prompt)
    if not prompt.documents:
        return request
    spans = []
    start = len(prompt.prefix)
    for document in prompt.documents:
        spans.append([start, start + len(document)])
        start += len(document)
    name = ""
    secret = None
    if tenant is not None:
        name = tenant["name"]
        secret = bytes.fromhex(tenant["secret"])
    salt = plan_salt(request["ids"], spans, config, tenant=name, secret=secret)
    return {**request, "documents": spans, "tenant": name, "salt": salt}


def run(folder: Path, model: Any, steps: list[Any], *, caching: bool = False, **extra: Any) -> dict[str, Any]:
    """Run an engine, with the connector where it has settings."""
    steps = [[{"ids": WARM_UP}], *steps]
    job = {"model": model[2], "steps": steps, "caching": caching, "extra": extra or None}
    job_file = folder / "job.json"
    out_file = folder / "out.json"
    job_file.write_text(json.dumps(job))
    command = [sys.executable, "-P", str(ENGINE), str(job_file), str(out_file)]
    engine = subprocess.run(command, capture_output=True, text=True, check=False)
    assert engine.returncode == 0, engine.stdout[-2000:] + engine.stderr[-4000:]
    result = json.loads(out_file.read_text())
    result["steps"] = result["steps"][1:]
    result["log"] = engine.stdout + engine.stderr
    return result


def filled(requests: list[Any]) -> list[int]:
    """How many tokens of each request the connector fills in."""
    return [len(request["ids"]) - 1 if "documents" in request else 0 for request in requests]


def cached(answers: list[Any]) -> list[int]:
    """How many vLLM did not compute."""
    return [answer["cached"] for answer in answers]


@pytest.fixture(scope="module")
def alone(model, prompts, tmp_path_factory):
    """What vLLM answers without the connector."""
    result = run(tmp_path_factory.mktemp("alone"), model, [[plain(prompt) for prompt in prompts]])
    return result["steps"][0]


def test_answers_at_ratio_one_are_those_of_vllm_alone(model, prompts, alone, tmp_path):
    (tmp_path / "tenants.json").write_text(json.dumps({"tenants": TENANTS}))
    with_documents = [named(prompt, FULL, TENANTS[number % 2]) for number, prompt in enumerate(prompts)]
    without = [plain(prompt) for prompt in prompts]
    extra = {"store": str(tmp_path / "store"), "recompute_ratio": 1.0, "tenants": str(tmp_path / "tenants.json")}
    result = run(tmp_path, model, [with_documents, without, with_documents], caching=True, **extra)
    blended, after, again = result["steps"]
    assert not differing(blended, alone)
    assert cached(blended) == filled(with_documents)
    assert not differing(after, alone), "a plain request of the same ids"
    assert not differing(again, alone)
    assert result["not_shared"] == []


def test_answers_at_15_percent_are_those_of_lone_cache(model, prompts, tmp_path):
    smollm2, tokenizer, _ = model
    config = BlendConfig(recompute_ratio=0.15)
    with_documents = [named(prompt, config) for prompt in prompts]
    without = [plain(prompt) for prompt in prompts]
    result = run(tmp_path, model, [with_documents, without], store=str(tmp_path / "store"), recompute_ratio=0.15)
    expected = []
    with ChunkStore.open(tmp_path / "alone") as store:
        for prompt in prompts:
            cache = None
            inputs = {"input_ids": torch.tensor([plain(prompt)["ids"]])}
            if prompt.documents:
                cache = BlendCache(smollm2, store, config)
                parts = {"prefix": prompt.prefix, "chunks": prompt.documents, "question": prompt.question}
                inputs = cache.inputs(tokenizer, **parts)
            output = smollm2.generate(**inputs, past_key_values=cache, max_new_tokens=12, do_sample=False)
            expected.append({"tokens": output[0, inputs["input_ids"].shape[1] :].tolist()})
    assert not differing(result["steps"][0], expected)
    assert not differing(result["steps"][1], expected), "chunks that are found in the ids"


def test_faults_of_store_and_model_change_no_answer(model, prompts, alone, tmp_path):
    requests = [named(prompt, FULL) for prompt in prompts[:12]]
    steps = [requests, "damage", requests, "remove", requests, "break", requests]
    extra = {"store": str(tmp_path / "store"), "recompute_ratio": 1.0, "memory_bytes": 0}
    result = run(tmp_path, model, steps, **extra)
    for answers in result["steps"]:
        assert not differing(answers, alone[:12])
        assert {answer["finish"] for answer in answers} <= {"length", "stop"}
    blended = filled(requests)
    assert [cached(answers) for answers in result["steps"]] == [blended, blended, blended, [0] * len(requests)]
    assert result["log"].count("is computed by vLLM: MemoryError") == sum(map(bool, blended))


@pytest.fixture
def small_device(tmp_path):
    """A folder on a device of 24 MB."""
    folder = tmp_path / "device"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"nothing can be mounted here: {mounted.stderr.decode():.80}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_full_disk_and_lost_remote_change_no_answer(model, prompts, alone, tmp_path, small_device):
    """First all is stored, then the disk's entries go, then the remote folder, then the room on the disk."""
    far = tmp_path / "far"
    count = min(6, REQUESTS)
    requests = [named(prompt, FULL) for prompt in prompts[:count]]
    steps = [requests, "remove", requests, "lose", "remove", requests, "remove", "fill", requests]
    extra = {"store": str(small_device), "remote": f"file://{far}", "recompute_ratio": 1.0, "memory_bytes": 0}
    result = run(tmp_path, model, steps, **extra)

    blended = filled(requests)
    for answers in result["steps"]:
        assert not differing(answers, alone[:count])
        assert cached(answers) == blended
    assert [*tmp_path.glob("far.gone/objects/**/*.safetensors")], "nothing was in the remote folder"
    assert not [*small_device.rglob("*.safetensors")], "something was stored on a full disk"

    named_tokens = 0
    for request in requests:
        named_tokens += sum(stop - start for start, stop in request.get("documents", ()))
    said = re.findall(r"is blended: .* (\d+) exact, (\d+) reusable, .* (\d+) computed;", result["log"])
    exact, reusable, computed = (sum(map(int, counts)) for counts in zip(*said, strict=True))
    assert len(said) == 4 * sum(map(bool, blended))
    assert exact + reusable == 4 * named_tokens
    assert computed > 0
    assert "is computed by vLLM" not in result["log"]


def test_request_without_its_salt_is_computed_by_vllm(model, prompts, alone, tmp_path):
    requests = [{**named(prompt, BlendConfig()), "salt": ""} for prompt in prompts[:6]]
    result = run(tmp_path, model, [requests], caching=True, store=str(tmp_path / "store"))
    (answers,) = result["steps"]
    assert not differing(answers, alone[:6])
    assert set(cached(answers)) == {0}
    assert "expected what plan_salt makes of its documents" in result["log"]
