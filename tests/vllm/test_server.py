# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""OpenAI's client asks vLLM's own server, on the CPU with a real model, for chats over documents."""

import importlib.util
import json
import re
import sys
import time
from collections import Counter
from typing import Any

import pytest

from hf_blend import BlendCache, BlendConfig
from hf_blend.integrations.vllm import request_fields
from tests.asking import memory
from tests.servers import Server
from tests.vllm.conftest import differing

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: use make test-vllm"),
]

CONFIG = BlendConfig(recompute_ratio=0.15)
NEW_TOKENS = 12
SECRETS = {"a": b"a" * 32, "b": b"b" * 32}
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
HITS = "vllm:prefix_cache_hits_total"  # tokens found in vLLM's own prefix cache
# What the connector's log says
BLENDED = " is blended: "
FAILED = " is computed by vLLM: "
COMPUTED_CHUNKS = r"chunks loaded, (\d+) computed;"


class Chats:
    """A client of OpenAI's for a server of vLLM that has the connector and caches prefixes."""

    def __init__(self, server: Server) -> None:
        import openai

        self.url = f"http://127.0.0.1:{server.port}"
        self._log = server.folder / "log"
        self._client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", timeout=300, max_retries=0)

    def ask(self, fields: dict[str, Any], *, stream: bool = False) -> dict[str, Any]:
        """Ask greedily: tokens, their lead over the second best, the text, and how many tokens vLLM did not compute.

        `counted` is by how much its counters rose.
        """
        before = self.counters()
        settings = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        response = self._client.chat.completions.create(
            model="smollm2",
            messages=[{"role": "user", "content": "is replaced by the messages of fields"}],
            max_tokens=NEW_TOKENS,
            temperature=0,
            logprobs=True,
            top_logprobs=2,
            extra_body={**fields, "return_tokens_as_token_ids": True},
            **settings,
        )
        text = ""
        scored = []
        usage = None
        for part in response if stream else [response]:
            usage = part.usage or usage
            for choice in part.choices:
                message = choice.delta if stream else choice.message
                text += message.content or ""
                scored += choice.logprobs.content if choice.logprobs else ()
        gaps = []
        for token in scored:
            best, second = sorted((other.logprob for other in token.top_logprobs), reverse=True)[:2]
            gaps.append(best - second)
        return {
            "text": text,
            "tokens": [int(token.token.removeprefix("token_id:")) for token in scored],
            "gaps": gaps,
            "prompt": usage.prompt_tokens,
            "cached": usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else 0,
            "counted": self.counters() - before,
        }

    def counters(self) -> Counter[str]:
        """Count what vLLM and its log say, once those of a step are there."""
        import httpx
        from prometheus_client.parser import text_string_to_metric_families

        time.sleep(1)
        counted = Counter[str]()
        for family in text_string_to_metric_families(httpx.get(f"{self.url}/metrics").text):
            for sample in family.samples:
                counted[sample.name] += int(sample.value) if sample.name == HITS else 0
        log = self._log.read_text()
        for words in (BLENDED, FAILED):
            counted[words] = log.count(words)
        counted[COMPUTED_CHUNKS] = sum(map(int, re.findall(COMPUTED_CHUNKS, log)))
        return counted


@pytest.fixture(scope="module")
def chats(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    tenants = []
    for name, secret in SECRETS.items():
        tenants.append({"name": name, "api_key": name * 20, "secret": secret.hex()})
    (folder / "tenants.json").write_text(json.dumps({"tenants": tenants}))
    transfer = {
        "kv_connector": "BlendConnector",
        "kv_connector_module_path": "hf_blend.integrations.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "store": str(folder / "store"),
            "tenants": str(folder / "tenants.json"),
            "recompute_ratio": CONFIG.recompute_ratio,
        },
    }

    def command(port: int) -> list[str]:
        environment = [f"{name}={value}" for name, value in ENVIRONMENT.items()]
        options = ["--model", model[2], "--served-model-name", "smollm2", "--host", "127.0.0.1", "--port", str(port)]
        options += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "2048", "--enable-prefix-caching"]
        options += ["--enable-prompt-tokens-details", "--kv-transfer-config", json.dumps(transfer)]
        return ["env", *environment, sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server", *options]

    server = Server(command, folder, patience_s=600)
    try:
        chats = Chats(server)
        # Until a first prompt was compared, nothing is blended
        chats.ask({"messages": [{"role": "user", "content": "Name the seven days of a week, and the twelve months."}]})
        yield chats
    finally:
        server.process.terminate()  # its engine, too
        server.process.wait(60)


def make_fields(model, texts, question, tenant="a"):
    """What a tenant sends for a question over documents."""
    messages = [{"role": "user", "content": question}]
    return request_fields(model[1], messages, texts, CONFIG, tenant=tenant, secret=SECRETS[tenant])


def answer_alone(model, fields, texts):
    """What a lone `BlendCache` over a store of its own answers."""
    with memory() as store:
        cache = BlendCache(model[0], store, CONFIG)
        inputs = cache.inputs_from_messages(model[1], fields["messages"], texts)
        output = model[0].generate(**inputs, past_key_values=cache, max_new_tokens=NEW_TOKENS, do_sample=False)
        assert cache.report.reusable_tokens > 0
    return {"tokens": output[0, inputs["input_ids"].shape[1] :].tolist()}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_chat_over_documents_in_two_orders_is_answered_as_by_lone_cache(model, texts, chats, stream):
    documents = texts[0][:4]
    question = texts[1][int(stream)]
    for ordered in (documents, documents[::-1]):
        fields = make_fields(model, ordered, question)
        answer = chats.ask(fields, stream=stream)
        assert not differing([answer], [answer_alone(model, fields, ordered)])
        assert answer["text"] == model[1].decode(answer["tokens"], skip_special_tokens=True)
        assert answer["cached"] == answer["prompt"] - 1, "all but the last token came from the connector"
        assert answer["counted"][BLENDED] == 1
        assert answer["counted"][FAILED] == 0
        assert answer["counted"][HITS] == 0, "blocks of another order"
    assert answer["counted"][COMPUTED_CHUNKS] == 0, "chunks of the first order"


def test_tenant_hits_no_block_and_no_chunk_of_another(model, texts, chats):
    documents = texts[0][4:7]
    question = texts[1][2]
    fields = make_fields(model, documents, question)
    first = chats.ask(fields)
    again = chats.ask(fields)
    other = chats.ask(make_fields(model, documents, question, tenant="b"))
    assert first["counted"][COMPUTED_CHUNKS] == len(documents)
    assert again["counted"][HITS] > 0, "or the test is empty"
    assert again["counted"][COMPUTED_CHUNKS] == 0
    assert other["counted"][HITS] == 0
    assert other["counted"][COMPUTED_CHUNKS] == len(documents)
    assert other["counted"][BLENDED] == 1
    assert not differing([again, other], [first, first])


def test_chat_without_documents_named_hits_no_blended_block(model, texts, chats):
    fields = make_fields(model, texts[0][:3], texts[1][3])
    blended = chats.ask(fields)
    plain = chats.ask({"messages": fields["messages"]})
    assert blended["counted"][BLENDED] == 1
    assert plain["prompt"] == blended["prompt"], "or the test is empty"
    assert plain["counted"][BLENDED] == 0
    assert plain["cached"] == 0


def test_salt_of_another_plan_is_refused(model, texts, chats):
    fields = make_fields(model, texts[0][:3], texts[1][4])
    other = make_fields(model, texts[0][:3], texts[1][4], tenant="b")
    answer = chats.ask({**fields, "cache_salt": other["cache_salt"]})
    assert answer["counted"][BLENDED] == 0
    assert answer["cached"] == 0
