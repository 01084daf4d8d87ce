# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""vLLM on the CPU with a real model: what the connector answers is what vLLM alone, or a lone BlendCache, answers.

`make test-vllm` makes an environment with vLLM and runs this.
"""

import contextlib
import importlib.util
import json
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_blend import BlendCache, BlendConfig, ChunkStore
from hf_blend.integrations.vllm import plan_salt
from tests.conftest import PUBLISHED
from tests.servers import Server, redis_command

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: use make test-vllm"),
]

ENGINE = Path(__file__).with_name("engine.py")
REQUESTS = int(os.environ.get("HF_BLEND_VLLM_REQUESTS", "40"))
TIE = 1e-3  # of log probability; vLLM's kernels and transformers' differ by less than 1e-4
TENANTS = [{"name": name, "api_key": name * 20, "secret": name.encode().hex() * 32} for name in "ab"]
WARM_UP = list(range(1000, 1064))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """SmolLM2 and its tokenizer, and the folder that vLLM loads."""
    from hf_blend.evaluation.bundled import load_model

    made, tokenizer = load_model(None)
    made = made.float()
    folder = tmp_path_factory.mktemp("model")
    made.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return made, tokenizer, str(folder)


@pytest.fixture(scope="module")
def requests(model):
    """Requests over 2 to 6 documents in any order, some over none: (prefix, documents, question) in token ids."""
    tokenizer = model[1]
    draw = random.Random(0)
    made = []
    documents, questions = texts()
    ids = [tokenizer.encode(f"{text}\n\n") for text in documents]
    for number in range(REQUESTS):
        chosen = [] if number % 7 == 0 else draw.sample(ids, draw.randint(2, 6))
        asks = f"{questions[number % len(questions)]}<|im_end|>\n<|im_start|>assistant\n"
        made.append((tokenizer.encode("<|im_start|>user\n"), chosen, tokenizer.encode(asks)))
    return made


def texts() -> tuple[list[str], list[str]]:
    """Passages of HotpotQA where the published file is, else of the handbook; and questions about them."""
    path = PUBLISHED / "hotpotqa_natural.jsonl"
    if path.exists():
        rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()[:8]]
        passages = [text[:320] for row in rows for text in row["chunks"]]
        return list(dict.fromkeys(passages))[:24], [row["question"] for row in rows]
    from hf_blend.evaluation.bundled import handbook_pages, handbook_questions

    passages = [part[:320] for page in handbook_pages().values() for part in page.split("\n\n") if len(part) > 200]
    return passages[:24], [row["question"] for row in handbook_questions()]


def as_sent(request: Any, config: BlendConfig | None = None, tenant: Any = None) -> dict[str, Any]:
    """A request as the engine takes it; with a config it names its documents, and has the salt of its plan."""
    prefix, documents, question = request
    ids = list(prefix)
    spans = []
    for document in documents:
        spans.append([len(ids), len(ids) + len(document)])
        ids += document
    ids += question
    if config is None or not spans:
        return {"ids": ids}
    name, secret = (tenant["name"], bytes.fromhex(tenant["secret"])) if tenant else ("", None)
    salt = plan_salt(ids, spans, config, tenant=name, secret=secret)
    return {"ids": ids, "documents": spans, "tenant": name, "salt": salt}


def run(
    tmp_path: Path, model: Any, steps: list[Any], *, caching: bool = False, server: int = 0, **extra: Any
) -> dict[str, Any]:
    """Run an engine, with the connector where it has settings."""
    job = {"model": model[2], "steps": [[{"ids": WARM_UP}], *steps], "caching": caching, "extra": extra or None}
    job |= {"server": server}
    (tmp_path / "job.json").write_text(json.dumps(job))
    given = [sys.executable, "-P", str(ENGINE), str(tmp_path / "job.json"), str(tmp_path / "out.json")]
    done = subprocess.run(given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = json.loads((tmp_path / "out.json").read_text())
    return {**found, "steps": found["steps"][1:], "log": done.stdout + done.stderr}


def differing(given: list[Any], expected: list[Any]) -> list[Any]:
    """The answers that differ where the two best tokens were not as good as equal."""
    odd = []
    for number, (one, other) in enumerate(zip(given, expected, strict=True)):
        pairs = list(zip(one["tokens"], other["tokens"], strict=False))
        at = next((place for place, (a, b) in enumerate(pairs) if a != b), None)
        if at is None and len(one["tokens"]) == len(other["tokens"]):
            continue
        if at is None or one["gaps"][at] > TIE:
            odd.append((number, one["tokens"], other["tokens"]))
    return odd


def filled(requests: list[Any]) -> list[int]:
    """How many tokens of each request the connector fills in."""
    return [len(one["ids"]) - 1 if "documents" in one else 0 for one in requests]


def cached(answers: list[Any]) -> list[int]:
    """How many vLLM did not compute."""
    return [one["cached"] for one in answers]


@pytest.fixture(scope="module")
def alone(model, requests, tmp_path_factory):
    """What vLLM answers without the connector."""
    return run(tmp_path_factory.mktemp("alone"), model, [[as_sent(one) for one in requests]])["steps"][0]


def test_at_ratio_one_every_answer_is_that_of_vllm_alone(model, requests, alone, tmp_path):
    config = BlendConfig(recompute_ratio=1.0)
    (tmp_path / "tenants.json").write_text(json.dumps({"tenants": TENANTS}))
    named = [as_sent(one, config, TENANTS[number % 2]) for number, one in enumerate(requests)]
    plain = [as_sent(one) for one in requests]
    extra = {"store": str(tmp_path / "store"), "recompute_ratio": 1.0, "tenants": str(tmp_path / "tenants.json")}
    found = run(tmp_path, model, [named, plain, named], caching=True, **extra)
    blended, after, again = found["steps"]
    assert not differing(blended, alone)
    assert cached(blended) == filled(named)
    assert not differing(after, alone), "a plain request of the same ids"
    assert not differing(again, alone)
    assert found["not_shared"] == []


def test_at_15_percent_every_answer_is_that_of_lone_cache(model, requests, tmp_path):
    plain_model = model[0]
    config = BlendConfig(recompute_ratio=0.15)
    store = str(tmp_path / "store")
    named = [as_sent(one, config) for one in requests]
    bare = [{"ids": one["ids"]} for one in named]
    found = run(tmp_path, model, [named, bare], store=store, recompute_ratio=0.15)
    expected = []
    with ChunkStore.open(tmp_path / "own") as own:
        for prefix, documents, question in requests:
            cache = BlendCache(plain_model, own, config)
            if documents:
                inputs = cache.inputs(model[1], prefix=prefix, chunks=documents, question=question)
            else:
                inputs = {"input_ids": torch.tensor([[*prefix, *question]])}
                cache = None
            output = plain_model.generate(**inputs, past_key_values=cache, max_new_tokens=12, do_sample=False)
            expected.append({"tokens": output[0, inputs["input_ids"].shape[1] :].tolist()})
    assert not differing(found["steps"][0], expected)
    assert not differing(found["steps"][1], expected), "chunks that are found in the ids"


def test_no_fault_of_store_changes_answer(model, requests, alone, tmp_path):
    config = BlendConfig(recompute_ratio=1.0)
    named = [as_sent(one, config) for one in requests[:12]]
    extra = {"store": str(tmp_path / "store"), "recompute_ratio": 1.0, "memory_bytes": 0}
    found = run(tmp_path, model, [named, "damage", named, "remove", named, "break", named], **extra)
    for step in found["steps"]:
        assert not differing(step, alone[:12])
        assert {one["finish"] for one in step} <= {"length", "stop"}
    blended = filled(named)
    assert [cached(step) for step in found["steps"]] == [blended] * 3 + [[0] * len(named)]
    assert found["log"].count("is computed by vLLM: MemoryError") == sum(map(bool, blended))


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


def test_full_disk_and_redis_that_was_killed_change_no_answer(model, requests, alone, tmp_path, small_device):
    """First all is stored, then the disk's entries go, then the server, then the room on the disk."""
    server = Server(redis_command, tmp_path)
    client = pytest.importorskip("redis").Redis(port=server.port)
    url = f"redis://127.0.0.1:{server.port}/0"
    held = [0]
    config = BlendConfig(recompute_ratio=1.0)
    count = min(6, REQUESTS)

    def look():
        with contextlib.suppress(Exception):
            while True:
                held.append(client.dbsize())
                time.sleep(0.1)

    threading.Thread(target=look, daemon=True).start()
    named = [as_sent(one, config) for one in requests[:count]]
    steps = [named, "remove", named, "kill", "remove", named, "remove", "fill", named]
    extra = {"store": str(small_device), "remote": url, "recompute_ratio": 1.0, "memory_bytes": 0}
    try:
        found = run(tmp_path, model, steps, server=client.info()["process_id"], **extra)
    finally:
        client.close()
        server.kill()
    blended = filled(named)
    for step in found["steps"]:
        assert not differing(step, alone[:count])
        assert cached(step) == blended
    assert max(held) > 0, "nothing was in Redis"
    assert not [*small_device.rglob("*.safetensors")], "something was stored on a full disk"
    named_tokens = sum(stop - start for one in named for start, stop in one.get("documents", ()))
    counted = {name.partition("hf_blend_")[2]: value for name, value in found["counted"].items()}
    assert counted["blended_requests"] == 4 * sum(map(bool, blended))
    assert counted["reused_tokens"] + counted["recomputed_tokens"] == 4 * named_tokens
    assert counted["failed_requests"] == 0
    assert counted["computed_chunks"] > 0


def test_request_without_its_salt_is_computed_by_vllm(model, requests, alone, tmp_path):
    config = BlendConfig()
    named = [{**as_sent(one, config), "salt": ""} for one in requests[:6]]
    found = run(tmp_path, model, [named], caching=True, store=str(tmp_path / "store"))
    assert not differing(found["steps"][0], alone[:6])
    assert {one["cached"] for one in found["steps"][0]} == {0}
    assert "expected what plan_salt makes of its documents" in found["log"]
