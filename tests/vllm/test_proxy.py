# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The proxy in front of vLLM, with an application that stands for vLLM and gives back what it receives."""

import asyncio
import copy
import json

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import StreamingResponse
from starlette.routing import Route

from hf_blend import BlendConfig
from hf_blend.integrations.vllm.plan import plan_salt, read_params
from hf_blend.integrations.vllm.proxy import CHAT, COMPLETIONS, Proxy, make_proxy
from hf_blend.serving.tenants import Tenant
from hf_blend.serving.wire import Limits
from tests.chat_templates import CHATML, DOCUMENTS, QUESTION, TOOLS, small_tokenizer

SECRET = b"k" * 32
TENANT = Tenant("a", "a" * 20, SECRET)
TOKENIZER = copy.deepcopy(small_tokenizer())
TOKENIZER.chat_template = CHATML
TOOLED = (
    "{{ tools | tojson }}{% for one in messages %}{{ one.tool_calls | tojson if one.tool_calls }}{% endfor %}" + CHATML
)


async def echo(request):
    """Send back what came, in two parts."""
    body = json.dumps({"path": request.url.path, "body": json.loads(await request.body() or b"null")}).encode()

    async def parts():
        yield body[:7]
        yield body[7:]

    return StreamingResponse(parts(), 207, media_type="application/json")


VLLM = Starlette(routes=[Route("/{path:path}", echo, methods=["GET", "POST"])])


def send(path, body=None, *, tenants=(), headers=None, transport=None):
    """What the client receives: status, and what vLLM received."""
    proxy = Proxy(TOKENIZER, BlendConfig(), tenants)
    app = make_proxy("http://vllm", proxy, transport or httpx.ASGITransport(VLLM))

    async def run():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://proxy") as client:
            method = "GET" if body is None else "POST"
            content = body if type(body) is bytes else json.dumps(body)
            answer = await client.request(method, path, content=content, headers=headers)
            return answer.status_code, answer.json()

    return asyncio.run(run())


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_documents_become_ids_spans_and_the_salt_of_their_plan(path):
    asked = {"messages": [{"role": "user", "content": QUESTION}]} if path == CHAT else {"prompt": QUESTION}
    status, got = send(path, {"model": "m", "stream": True, "documents": DOCUMENTS, "cache_salt": "mine", **asked})
    assert (status, got["path"]) == (207, path)
    told, body = got["body"]["kv_transfer_params"], got["body"]
    ids = told["prompt_token_ids"] if path == CHAT else body["prompt"]
    text = TOKENIZER.decode(ids)
    assert all(part in text for part in (*DOCUMENTS, QUESTION))
    spans = read_params(told, ids, None).spans
    assert [TOKENIZER.decode(span.token_ids).strip() for span in spans] == DOCUMENTS
    assert body["cache_salt"] == plan_salt(ids, spans, BlendConfig())
    assert (body["model"], body["stream"], "documents" in body) == ("m", True, False)
    assert body.get("messages") == asked.get("messages")


def test_a_request_without_documents_passes_with_the_salt_of_its_tenant_alone():
    body = {"prompt": QUESTION, "kv_transfer_params": {"documents": [[0, 1]]}, "cache_salt": "forged"}
    assert send(COMPLETIONS, body)[1]["body"] == {"prompt": QUESTION}
    key = {"authorization": f"Bearer {TENANT.api_key}"}
    salts = set()
    for tenant in (TENANT, Tenant("b", TENANT.api_key, SECRET), Tenant("a", TENANT.api_key, b"l" * 32)):
        got = send(COMPLETIONS, body, tenants=[tenant], headers=key)[1]["body"]
        assert "kv_transfer_params" not in got
        salts.add(got["cache_salt"])
    assert len(salts) == 3
    assert "forged" not in salts


def test_what_cannot_be_forwarded_is_said():
    assert send(CHAT, {}, tenants=[TENANT])[0] == 401
    assert send(CHAT, b"[" * 10)[0] == send(CHAT, [])[0] == 400
    assert send(CHAT, b" " * (Limits().body_bytes + 1))[0] == 413
    for body in ({"documents": "text"}, {"documents": [""]}, {"documents": ["a"], "messages": []}):
        status, got = send(CHAT, body)
        assert (status, got["error"]["type"]) == (400, "invalid_request_error")
    assert send(COMPLETIONS, {"documents": ["a"], "prompt": ["a", "b"]})[0] == 400
    assert send("/v1/models")[1]["path"] == "/v1/models"

    class Down(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request):
            raise httpx.ConnectError("refused")

    assert send("/health", transport=Down())[0] == 502


class Broken(httpx.AsyncByteStream):
    """Events that break off."""

    closed = 0

    async def __aiter__(self):
        yield b'data: {"choices": []}\n\n'
        raise httpx.ReadError("cut")

    async def aclose(self):
        Broken.closed += 1


def test_make_proxy_ends_a_stream_that_breaks_off_with_an_error_event_and_lets_go_of_all():
    async def handle(request):
        return httpx.Response(200, headers={"content-type": "text/event-stream"}, stream=Broken())

    proxy = Proxy(TOKENIZER, BlendConfig())
    app = make_proxy("http://vllm", proxy, httpx.MockTransport(handle))

    async def run():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://proxy") as client:
            return await client.post(COMPLETIONS, json={"prompt": "a", "stream": True})

    answer = asyncio.run(run())
    first, last = answer.text.strip().split("\n\n")
    assert first == 'data: {"choices": []}'
    assert json.loads(last[6:])["error"]["message"].startswith("vLLM does not answer: ReadError")
    assert Broken.closed
    assert not proxy.running.total()


def test_make_proxy_leaves_a_request_whose_client_is_gone():
    begun, ended = asyncio.Event(), []

    async def handle(request):
        begun.set()
        try:
            await asyncio.sleep(30)
        finally:
            ended.append(request.url.path)

    proxy = Proxy(TOKENIZER, BlendConfig())
    app = make_proxy("http://vllm", proxy, httpx.MockTransport(handle))
    body = [{"type": "http.request", "body": b'{"prompt": "a"}', "more_body": False}]

    async def receive():
        if body:
            return body.pop()
        await begun.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        pass

    scope = {"type": "http", "method": "POST", "path": COMPLETIONS, "headers": [], "query_string": b""}
    asyncio.run(asyncio.wait_for(app(scope, receive, send), 10))
    assert ended == [COMPLETIONS]
    assert not proxy.running.total()


SAMPLED = {
    "min_tokens": 1, "stop_token_ids": [3], "bad_words": ["x"], "prompt_logprobs": 2, "skip_special_tokens": False,
    "structured_outputs": {"choice": ["a", "b"]}, "top_k": 5, "seed": 1, "logit_bias": {"5": 1.5}, "user": "anna",
    "stream_options": {"include_usage": True, "continuous_usage_stats": True}, "metadata": {"a": [1]},
}  # fmt: skip


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_fields_that_vllm_knows_pass_as_they_came(path):
    asked = {"messages": [{"role": "user", "content": "a"}]} if path == CHAT else {"prompt": ["a", "b"], "echo": True}
    assert send(path, {**asked, **SAMPLED})[1]["body"] == {**asked, **SAMPLED}


def test_what_vllm_would_do_to_a_prompt_that_is_made_here_is_refused_beside_documents():
    body = {"messages": [{"role": "user", "content": "a"}], "add_generation_prompt": False}
    assert send(CHAT, body)[1]["body"] == body
    status, got = send(CHAT, {**body, "documents": DOCUMENTS})
    assert status == 400
    assert got["error"]["message"].startswith("add_generation_prompt came with documents")


def test_calls_and_tools_beside_documents_are_those_of_apply_chat_template(monkeypatch):
    monkeypatch.setattr(TOKENIZER, "chat_template", TOOLED)
    call = {"id": "c", "type": "function", "function": {"name": "search", "arguments": '{"query": "clocks"}'}}
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    asked = {"role": "user", "content": QUESTION}
    got = send(CHAT, {"messages": [*messages, asked], "tools": TOOLS, "documents": DOCUMENTS})[1]["body"]
    read = copy.deepcopy(messages)
    read[1]["tool_calls"][0]["function"]["arguments"] = {"query": "clocks"}
    read.append({"role": "user", "content": "\n\n".join([*DOCUMENTS, QUESTION])})
    given = {"tools": TOOLS, "add_generation_prompt": True, "return_dict": False}
    assert got["kv_transfer_params"]["prompt_token_ids"] == TOKENIZER.apply_chat_template(read, **given)
    assert got["messages"] == [*messages, asked]
