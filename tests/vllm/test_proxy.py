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
from hf_blend.serving.service import Tenant
from hf_blend.serving.wire import Limits
from tests.chat_templates import CHATML, DOCUMENTS, QUESTION, small_tokenizer

SECRET = b"k" * 32
TENANT = Tenant("a", "a" * 20, SECRET)
TOKENIZER = copy.deepcopy(small_tokenizer())
TOKENIZER.chat_template = CHATML


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
