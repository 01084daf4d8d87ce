# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""`transformers serve`, over a model's folder with our `custom_generate/generate.py`, reuses what a store has."""

import json
import shutil
import sys

import httpx
import pytest

from hf_blend import BlendCache, ChunkStore, load
from hf_blend.evaluation.bundled import handbook_pages
from tests.chat_templates import user
from tests.servers import ROOT, Server

pytest.importorskip("fastapi", reason='the stock server needs pip install "transformers[serving]"')
EXAMPLE = ROOT / "examples" / "custom_generate" / "custom_generate"
SERVE = "from transformers.cli.transformers import main; main()"
GREEDY = {"do_sample": False, "max_new_tokens": 12}


@pytest.fixture
def folder(small_hub, tmp_path, monkeypatch):
    """The folder of a small model that chats, with our `generate` in it, and a store of ours in the user's folder."""
    monkeypatch.setenv("HF_BLEND_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (snapshot,) = small_hub.glob("models--*/snapshots/*")
    shutil.copytree(snapshot, tmp_path / "model")
    shutil.copytree(EXAMPLE, tmp_path / "model" / "custom_generate")
    return tmp_path / "model"


@pytest.fixture
def server(folder, tmp_path):
    """The stock server."""
    words = ["serve", str(folder), "--trust-remote-code", "--device", "cpu", "--host", "127.0.0.1", "--port"]
    made = Server(lambda port: [sys.executable, "-P", "-c", SERVE, *words, str(port)], tmp_path, patience_s=120)
    yield made
    made.kill()


def test_transformers_serve_answers_as_blend_cache_does(folder, server):
    model, tokenizer = load(str(folder))
    documents = list(handbook_pages().values())[:4]
    messages = [user("\n\n".join([*documents, "Who keeps the hut?"]))]
    with ChunkStore.open() as store:
        store.add(model, tokenizer, documents)
        cache = BlendCache(model, store)
        inputs = cache.inputs_from_messages(tokenizer, messages)
        blended = model.generate(**inputs, **cache.keyword, **GREEDY)
        assert cache.report.loaded_chunks == len(documents)
    stock = model.generate(**inputs, **GREEDY)
    assert not blended.equal(stock), "nothing is tested"
    expected = tokenizer.decode(blended[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)

    url = f"http://127.0.0.1:{server.port}/v1/chat/completions"
    body = {"model": str(folder), "messages": messages, "temperature": 0, "max_tokens": GREEDY["max_new_tokens"]}
    answer = httpx.post(url, json=body, timeout=120).json()
    assert answer["choices"][0]["message"]["content"] == expected
    pieces = []
    with httpx.stream("POST", url, json={**body, "stream": True}, timeout=120) as events:
        for line in events.iter_lines():
            if line.startswith("data: {"):
                choices = json.loads(line.removeprefix("data: "))["choices"]
                pieces += [choice["delta"].get("content") or "" for choice in choices]
    assert "".join(pieces) == expected
