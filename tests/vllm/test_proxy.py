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


class FakeVllm:
    """Answers, and notes what it receives; a request that heals waits until it may go on."""

    def __init__(self, status=200, answer_status=200):
        self.received, self.status, self.may_heal = [], status, asyncio.Event()
        self.answer_status = answer_status

    async def handle(self, request):
        body = json.loads(request.content)
        self.received.append((request.url.path, body))
        if "priority" in body:
            await self.may_heal.wait()
            return httpx.Response(self.status, json={"choices": [{"text": "x"}]})
        if body.get("stream"):
            parts = ("The", " keeper")
            name = "delta" if "messages" in body else "text"
            rows = [
                {"choices": [{"index": 0, name: {"content": part} if name == "delta" else part}]} for part in parts
            ]
            events = "".join(f"data: {json.dumps(row)}\n\n" for row in rows) + "data: [DONE]\n\n"
            return httpx.Response(self.answer_status, headers={"content-type": "text/event-stream"}, text=events)
        choice = {"message": {"content": "The keeper"}} if "messages" in body else {"text": "The keeper"}
        return httpx.Response(self.answer_status, json={"choices": [choice]})


def healed_by(vllm, bodies, heal=True, tenants=(), key=None, path=CHAT, tokens=None):
    """Send requests one after the other, each when vLLM has healed what is behind the one before."""
    proxy = Proxy(TOKENIZER, BlendConfig(), tenants, tokens=tokens, heal=heal)
    app = make_proxy("http://vllm", proxy, httpx.MockTransport(vllm.handle))
    headers = {"authorization": f"Bearer {key}"} if key else None

    async def run():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://proxy") as client:
            for body in bodies:
                vllm.may_heal = asyncio.Event()
                answer = await asyncio.wait_for(client.post(path, json=body, headers=headers), 10)
                assert answer.status_code == vllm.answer_status, answer.text
                if proxy.healing is not None:
                    assert len(proxy.healing._tasks) <= 1, "the answer has come, and vLLM has healed nothing yet"
                    vllm.may_heal.set()
                    await asyncio.gather(*proxy.healing._tasks)
        return proxy

    return asyncio.run(run())


INLINE = {"role": "user", "content": "\n\n".join([*DOCUMENTS, QUESTION])}
NEXT = [INLINE, {"role": "assistant", "content": "The keeper"}, {"role": "user", "content": "Since when?"}]


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("tenants", [(), (TENANT,)])
def test_behind_a_blended_answer_vllm_is_asked_for_the_whole_conversation(path, is_stream, tenants):
    asked = {"messages": [INLINE]} if path == CHAT else {"prompt": INLINE["content"]}
    key = TENANT.api_key if tenants else None
    vllm = FakeVllm()
    healed_by(vllm, [{"model": "m", "stream": is_stream, "documents": DOCUMENTS, **asked}], True, tenants, key, path)
    (_, first), (heals, body) = vllm.received
    ids = first["kv_transfer_params"]["prompt_token_ids"] if path == CHAT else first["prompt"]
    assert heals == COMPLETIONS
    assert body.pop("priority") > 1 << 30, "vLLM serves smaller ones first"
    plain = {"cache_salt": plan_salt((), (), BlendConfig(), tenant="a", secret=SECRET)} if tenants else {}
    answer = TOKENIZER("The keeper", add_special_tokens=False)["input_ids"]
    assert body == {"model": "m", "prompt": [*ids, *answer], "max_tokens": 1, "temperature": 0, **plain}


def test_the_next_turn_of_a_healed_conversation_has_the_salt_of_plain_requests():
    first, second = {"messages": [INLINE], "documents": DOCUMENTS}, {"messages": NEXT, "documents": DOCUMENTS}
    for heal, tenants in ((False, ()), (True, ()), (True, (TENANT,))):
        vllm = FakeVllm()
        healed_by(vllm, [first, second], heal, tenants, TENANT.api_key if tenants else None)
        body = [row for _, row in vllm.received if "priority" not in row][1]
        told = body["kv_transfer_params"]
        ids = TOKENIZER.apply_chat_template(NEXT, add_generation_prompt=True, return_dict=False)
        assert told["prompt_token_ids"] == ids
        assert len([row for _, row in vllm.received if "priority" in row]) == heal, "a plain turn is exact as it is"
        assert bool(told["documents"]) != heal
        plain = plan_salt((), (), BlendConfig(), tenant="a", secret=SECRET) if tenants else None
        assert (body.get("cache_salt") == plain) == heal


def test_a_turn_with_further_documents_and_that_of_another_tenant_are_blended():
    key, other = TENANT.api_key, Tenant("b", "b" * 20, SECRET)
    first, second = {"messages": [INLINE], "documents": DOCUMENTS}, {"messages": NEXT, "documents": DOCUMENTS}
    vllm = FakeVllm()
    proxy = healed_by(vllm, [first, {**second, "documents": [*DOCUMENTS, "Since when?"]}], True, [TENANT, other], key)
    assert vllm.received[2][1]["kv_transfer_params"]["documents"]
    ids = vllm.received[0][1]["kv_transfer_params"]["prompt_token_ids"]
    assert proxy.healing.has_healed("a", ids, len(ids))
    assert not proxy.healing.has_healed("a", ids, len(ids) + 500)
    assert not proxy.healing.has_healed("b", ids, 1)


def test_requests_that_heal_are_bounded_and_their_errors_are_logged_once(caplog, monkeypatch):
    body = {"messages": [INLINE], "documents": DOCUMENTS}
    vllm = FakeVllm(400)
    proxy = healed_by(vllm, [body, body])
    assert len([row for _, row in vllm.received if "priority" in row]) == 2
    assert caplog.text.count("vLLM did not heal a conversation: 400") == 1
    assert not proxy.healing.has_healed("", [1] * 999, 0)
    monkeypatch.setattr("hf_blend.integrations.vllm.healing.MOST_UNDER_WAY", 0)
    vllm = FakeVllm()
    healed_by(vllm, [body])
    assert len(vllm.received) == 1
    healed_by(vllm, [{"messages": [INLINE]}])
    assert len(vllm.received) == 2, "nothing is blended without documents"


@pytest.mark.parametrize("is_stream", [False, True])
def test_nothing_is_healed_behind_an_error_an_echo_or_a_stream_that_is_too_long(is_stream, monkeypatch):
    chat = {"messages": [INLINE], "documents": DOCUMENTS, "stream": is_stream}
    text = {"prompt": INLINE["content"], "documents": DOCUMENTS, "stream": is_stream}
    for status, body, path in ((500, chat, CHAT), (200, {**text, "echo": True}, COMPLETIONS)):
        vllm = FakeVllm(answer_status=status)
        healed_by(vllm, [body], path=path)
        assert len(vllm.received) == 1
    monkeypatch.setattr("hf_blend.integrations.vllm.healing.MOST_BYTES", 20)
    vllm = FakeVllm()
    healed_by(vllm, [chat])
    assert len(vllm.received) == (1 if is_stream else 2)


def test_what_heals_leaves_vllm_room_for_one_token():
    ids = TOKENIZER.apply_chat_template([INLINE], add_generation_prompt=True, return_dict=False)
    answer = TOKENIZER("The keeper", add_special_tokens=False)["input_ids"]
    assert len(answer) > 1
    for room in range(len(answer) + 1):
        vllm = FakeVllm()
        healed_by(vllm, [{"messages": [INLINE], "documents": DOCUMENTS}], tokens=len(ids) + room + 1)
        assert vllm.received[1][1]["prompt"] == [*ids, *answer[:room]]
