# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The server and the proxy in front of vLLM have one door: every limit of the page is tried at both."""

import asyncio
import contextlib
import copy
import inspect
import json
import logging
import re
import time
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import httpx
import pytest
from openai.types import completion_create_params as text_params
from openai.types.chat import completion_create_params
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from hf_blend.errors import PromptError
from hf_blend.evaluation.pictures import Eyes
from hf_blend.serving import messages, wire
from hf_blend.serving.guard import Guard, access
from hf_blend.serving.prompts import chat_prompt, text_prompt
from hf_blend.serving.rendering import Renderer
from hf_blend.serving.tenants import Tenant, Tenants
from hf_blend.serving.wire import ChatRequest, CompletionRequest, Limits
from tests.asking import noting
from tests.chat_templates import CHATML, small_tokenizer
from tests.serving.doors import (
    CHAT,
    LONG,
    TEMPLATE,
    TEXT,
    begin,
    connect,
    picture,
    proxying,
    reset,
    status_of,
    tool,
    vllm,
)
from tests.serving.processes import running, wait_for

PAGE = Path(__file__).parents[2] / "docs" / "serving.md"
KEY = "key-of-anna-0123456789"
TENANTS = [Tenant("anna", KEY, b"a" * 32), Tenant("bert", "key-of-bert-0123456789", b"b" * 32)]
LIMITS = Limits(
    requests=2, connections=32, header_s=1.0, body_bytes=200_000, body_s=1.2, bodies=3, arriving_bytes=300_000,
    documents=8, messages=20, parts=30, render_s=0.1, images=3, pixels=5000, aspect_ratio=20.0, image_bytes=1 << 20,
    choices=2, tools=4, schema_chars=2000, stops=2, stop_chars=32, new_tokens=5,
)  # fmt: skip
TOKENS = 2048


class Door:
    """One of both, as a client meets it."""

    def __init__(self, url, limited, received=None):
        self.url, self.limited, self.received = url, limited, received
        headers = {"authorization": f"Bearer {KEY}"}
        # the door cuts what it keeps alive after `header_s`: a client that sends at that moment has no answer
        once = httpx.Limits(max_keepalive_connections=0)
        self.http = httpx.Client(base_url=url, headers=headers, timeout=60, limits=once)

    def text(self, **more):
        return self.http.post(TEXT, json={"prompt": "the", "max_tokens": 2, **more})

    def chat(self, content="the", **more):
        messages = [{"role": "user", "content": content}]
        return self.http.post(CHAT, json={"messages": messages, "max_tokens": 2, **more})

    def begin(self, length, **more):
        return begin(self.url, KEY, length, **more)


@contextlib.contextmanager
def limited_to(door, **more):
    """The limits that are read at each request, otherwise."""
    before = door.limited.limits
    door.limited.limits = replace(before, **more)
    try:
        yield
    finally:
        door.limited.limits = before


@pytest.fixture(scope="module")
def doors(reference, tmp_path_factory):
    model, tokenizer = reference
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = TEMPLATE
    given = {"tenants": TENANTS, "limits": LIMITS}
    with (
        running((model, tokenizer), tmp_path_factory.mktemp("store"), cache_tokens=TOKENS, **given) as service,
        vllm() as (upstream, received),
        proxying(upstream, tokenizer, TENANTS, LIMITS, TOKENS) as (url, proxy),
    ):
        processor = SimpleNamespace(image_processor=SimpleNamespace(size={"shortest_edge": 64}), chat_template="x")
        service.eyes = Eyes(processor, model.config, LIMITS)
        yield {"server": Door(service.url, service), "proxy": Door(url, proxy, received)}


@pytest.fixture(params=["server", "proxy"])
def door(request, doors):
    return doors[request.param]


def too_many_requests(door):
    with contextlib.ExitStack() as stack:
        body = {"prompt": "the the", "max_tokens": LONG, "ignore_eos": True, "stream": True}
        streams = [stack.enter_context(door.http.stream("POST", TEXT, json=body)) for _ in range(LIMITS.requests)]
        lines = [one.iter_lines() for one in streams]
        assert all(next(one).startswith("data:") for one in lines)
        answer = door.text()
        assert answer.headers["retry-after"]
        bert = {"authorization": f"Bearer {TENANTS[1].api_key}"}
        other = door.http.post(TEXT, json={"prompt": "the", "max_tokens": 2}, headers=bert)
        assert other.status_code == 200, "who has none under way waits for no other's"
    wait_for(lambda: not door.limited.running.total(), "the end of all requests")
    return answer.status_code


def too_many_connections(door):
    opened = [connect(door.url) for _ in range(LIMITS.connections + 1)]
    found = status_of(opened[0], 0.5)
    for one in opened[1:]:
        one.close()
    return found


def silent(door):
    opened = connect(door.url)
    began = time.monotonic()
    assert status_of(opened, 20.0) == 0
    assert time.monotonic() - began < 15
    return 0


def bodies_that_arrive(door, count, size):
    opened = [door.begin(150_000) for _ in range(count)]
    for one in opened:
        one.sendall(b" " * size)
    statuses = sorted(status_of(client) for client in opened)
    assert statuses[:-1] == [408] * (count - 1), "the others may take their time"
    return statuses[-1]


def slow_body(door):
    """A body of which a byte comes now and then: the seconds are for all of it."""
    opened = door.begin(500)
    for _ in range(10):
        opened.sendall(b" ")
        time.sleep(0.1)
    return status_of(opened, 0.9)


def endless_body(door):
    opened = door.begin(None)
    with contextlib.suppress(OSError):
        for _ in range(40):
            opened.sendall(b"2000\r\n" + b" " * 0x2000 + b"\r\n")
    return status_of(opened)


def slow_answer(door):
    with limited_to(door, request_s=0.3):
        status = door.text(max_tokens=LONG, ignore_eos=True).status_code
    if door.received is None:
        engine = door.limited.engine.batch_processor
        wait_for(lambda: not engine.has_pending_requests(), "the end of the engine's request", 1.0)  # of LONG tokens
    return status


def uncut_answer(door):
    answer = door.http.post(TEXT, json={"prompt": "the", "ignore_eos": True})
    if door.received is not None:
        assert "max_tokens" not in door.received[-1]
        return "vLLM's"
    assert answer.json()["usage"]["completion_tokens"] == LIMITS.new_tokens
    return answer.json()["choices"][0]["finish_reason"]


def stuck(door):
    if door.received is not None:
        return "vLLM's" if door.http.get("/health").json()["object"] == "fake" else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(door.limited.engine), "stuck_s", door.limited.limits.stuck_s + 1)
        return door.http.get("/health").status_code


def much_larger_picture(door):
    """A strip that is within its pixels, and is made larger: 64 x 1280, 12 bytes each."""
    answer = door.chat([{"type": "text", "text": "the"}, *[picture((2, 40))] * 2])
    return "vLLM's" if door.received and answer.status_code == 200 else answer.status_code


def of(**more):
    return lambda door: (door.chat if "messages" in more or "tools" in more else door.text)(**more).status_code


MESSAGE = {"role": "user", "content": "the"}
TRIED = {
    "requests": too_many_requests,
    "connections": too_many_connections,
    "header_s": silent,
    "body_bytes": endless_body,
    "body_s": slow_body,
    "bodies": lambda door: bodies_that_arrive(door, LIMITS.bodies + 1, 10),
    "arriving_bytes": lambda door: bodies_that_arrive(door, 3, 120_000),
    "request_s": slow_answer,
    "new_tokens": uncut_answer,
    "documents": of(documents=["the"] * 9),
    "messages": of(messages=[MESSAGE] * 21),
    "parts": of(messages=[{**MESSAGE, "content": [{"type": "text", "text": "a"}] * 16}] * 2),
    "render_s": lambda door: door.chat(documents=["the"], chat_template_kwargs={"burn": 90_000}).status_code,
    "images": lambda door: door.chat([picture((1, 1))] * 4).status_code,
    "pixels": lambda door: door.chat([picture((60, 60)), picture((60, 60))]).status_code,
    "aspect_ratio": lambda door: door.chat([picture((1, 21))]).status_code,
    "image_bytes": much_larger_picture,
    "choices": of(n=3),
    "tools": of(tools=[tool()] * 5),
    "schema_chars": of(tools=[tool(parameters={"enum": ["x" * 2000]})]),
    "stops": of(stop=["a", "b", "c"]),
    "stop_chars": of(stop="a" * 33),
    "stuck_s": stuck,
}


def rows():
    """What the page says of each limit: its default, what is beyond it, and if that is vLLM's behind the proxy."""
    page = PAGE.read_text("utf-8")
    cells = re.findall(r"^\| `(\w+)` \| ([\d.,]+) \|[^|]*\|(?: ([^|]+) \|)?$", page, re.MULTILINE)
    upstream = re.search(r"where ([^.]*)\sare vLLM's\.", page)[1]
    return {
        name: (float(value.replace(",", "")), beyond or "400", f"`{name}`" in upstream)
        for name, value, beyond in cells
    }


def said(text):
    """As a status, 0 for a connection that is cut, or the words."""
    found = re.search(r"\b[2-5]\d\d\b", text)
    return int(found[0]) if found else 0 if "is cut" in text else text.strip("` ")


def test_limits_of_the_page_are_those_there_are():
    assert {name: value for name, (value, *_) in rows().items()} == vars(Limits())
    assert set(TRIED) == {one.name for one in fields(Limits)}


@pytest.mark.parametrize("limit", TRIED)
def test_a_limit_holds_as_the_page_says(limit, door):
    _, beyond, is_upstream = rows()[limit]
    assert TRIED[limit](door) == ("vLLM's" if is_upstream and door.received is not None else said(beyond))
    assert door.text().status_code == 200


OWN = sorted(
    {*inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters, "bos_token", "messages", "tokenizer"}
)


@pytest.mark.parametrize("documents", [[], ["the"]], ids=["", "documents"])
def test_no_argument_of_the_chat_template_is_one_of_the_servers(documents, door):
    for name in OWN:
        refused = door.chat(documents=documents, chat_template_kwargs={name: TEMPLATE})
        assert (refused.status_code, f"chat_template_kwargs has {name!r}" in refused.text) == (400, True), refused.text
    assert door.chat(documents=documents, chat_template_kwargs={"enable_thinking": False}).status_code == 200


UNKNOWN = {
    "of nobody": {"tempreature": 1},
    "a template": {"chat_template": "{{ 7 * 191 }}"},
    "sizes of a processor": {"mm_processor_kwargs": {"max_pixels": 10**9}},
    "rank": {"priority": -1},
    "another request": {"request_id": "a"},
    "of extensions": {"vllm_xargs": {"a": 1}},
    "tensors": {"prompt_embeds": "AAAA"},
    "behind others": {"user": "a", "stop": "b", "\n": 1},
}


@pytest.mark.parametrize("what", UNKNOWN)
def test_a_field_that_is_unknown_is_refused_by_its_name(what, door):
    for ask in (door.chat, door.text):
        refused = ask(**UNKNOWN[what]).json()["error"]
        name = [*UNKNOWN[what]][-1]
        assert refused["message"].startswith(f"{name} is no field of this request. ")
        assert refused["param"] == name


TAKEN = {  # of each field a value that is taken, and one that is not
    "model": ("", 5), "documents": (["the"], 5), "max_tokens": (2, 0), "n": (1, 0), "temperature": (0.5, 3),
    "top_p": (0.5, 2), "top_k": (5, -2), "min_p": (0.1, 2), "repetition_penalty": (1.1, 0), "presence_penalty": (1, 3),
    "frequency_penalty": (1, -3), "logit_bias": ({"5": 1}, {"5": 101}), "seed": (5, "x"), "ignore_eos": (False, "x"),
    "stop": ("a", 5), "stream": (False, "x"), "stream_options": ({"include_usage": False}, 5),
    "response_format": ({"type": "text"}, {"type": "x"}),
}  # fmt: skip
OF_CHATS = {
    "messages": ([MESSAGE], 5), "max_completion_tokens": (2, 0), "logprobs": (True, "x"), "top_logprobs": (0, 21),
    "tools": ([], 5), "tool_choice": ("none", "x"), "chat_template_kwargs": ({"enable_thinking": False}, 5),
    "modalities": (["text"], ["audio"]), "functions": ([], [{}]), "function_call": ("none", "x"),
    "audio": (False, {"voice": "a"}), "prediction": (False, {"type": "content"}), "web_search_options": (False, {}),
    "moderation": (False, {"model": "a"}), "reasoning_effort": ("none", "x"),
}  # fmt: skip
OF_TEXTS = {
    "prompt": ("the", {}), "chunk_separator": ("", 5), "logprobs": (1, 21), "best_of": (1, 2), "echo": (False, "x"),
    "suffix": ("", "a"),
}  # fmt: skip
IGNORED = (
    "user", "metadata", "store", "service_tier", "prompt_cache_key", "prompt_cache_retention", "safety_identifier",
)  # fmt: skip
IGNORED_OF_CHATS = ("verbosity", "parallel_tool_calls", "prompt_cache_options")
BODIES = {
    "chat": (ChatRequest, TAKEN | OF_CHATS, IGNORED + IGNORED_OF_CHATS),
    "text": (CompletionRequest, TAKEN | OF_TEXTS, IGNORED),
}


def written(title):
    """The names in the first column of a table of the page, which begins so."""
    table = PAGE.read_text("utf-8").partition(f"| {title} |")[2].partition("\n\n")[0]
    cells = re.findall(r"^\| (`[^|]+) \|", table, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}


def test_fields_of_the_page_are_those_there_are_and_openai_has_no_other():
    taken = {*ChatRequest.model_fields, *CompletionRequest.model_fields}
    assert written("field of a request") == taken
    models = [one for one in vars(messages).values() if isinstance(one, type) and issubclass(one, messages.Fields)]
    models += [wire.StreamOptions, wire.Tool, wire.Function, wire.JsonSchema, wire.ResponseFormat]
    inside = {field.alias or name for model in models for name, field in model.model_fields.items()}
    assert written("field inside of one") == inside | {"response_format", "stream_options"}
    params = completion_create_params.CompletionCreateParamsBase, text_params.CompletionCreateParamsBase
    assert {*params[0].__annotations__, *params[1].__annotations__} <= taken


@pytest.mark.parametrize("kind", BODIES)
def test_each_field_is_taken_or_refused_by_its_name_at_both_doors(kind, door):
    fields, tried, ignored = BODIES[kind]
    assert {*tried, *ignored} == {*fields.model_fields}
    ask = getattr(door, kind)
    for name, (good, bad) in tried.items():
        assert ask(**{name: good}).status_code == 200, name
        refused = ask(**{name: bad})
        assert refused.status_code == 400, name
        assert refused.json()["error"]["param"].split(".")[0] == name
    assert ask(**{name: {"a": 1} for name in ignored}).status_code == 200


INSIDE = {
    "of a message": ({"nmae": "a"}, "messages.0.nmae", "Write name"),
    "of a part": ({"content": [{"type": "text", "text": "a", "cache": 1}]}, "messages.0.content.0.cache", ""),
    "of an image": (
        {"content": [{"type": "image_url", "image_url": {"url": "a", "detial": "low"}}]},
        "messages.0.content.0.image_url.detial",
        "Write detail",
    ),
    "a kind of part": ({"content": [{"type": "input_audio"}]}, "messages.0.content.0.type", "'image_url'"),
    "of a call": (
        {"tool_calls": [{"function": {"name": "a", "arguments": {}, "x": 1}}]},
        "messages.0.tool_calls.0.function.x",
        "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", INSIDE)
def test_a_field_inside_of_one_is_refused_by_its_path_and_a_near_name_is_told(what, door):
    row, path, advice = INSIDE[what]
    error = door.chat(messages=[{**MESSAGE, **row}]).json()["error"]
    assert error["param"] == path
    assert path in error["message"]
    assert advice in error["message"]


SHAPES = {
    "deep": b'{"messages":' + b"[" * 100_000,
    "deep and whole": b'{"messages": [{"role": "user", "content": "a"}], "user":' + b"[" * 9000 + b"]" * 9000 + b"}",
    "a deep argument": b'{"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"a":'
    + b"[" * 900 + b"]" * 900 + b"}}",
    "a text": b'{"messages": "hi"}',
    "an object": b'{"messages": {"role": "user"}}',
    "numbers": b'{"messages": [1, 2]}',
    "lists": b'{"messages": [[{"role": "user", "content": "a"}]]}',
    "null": b'{"messages": [null]}',
    "no role": b'{"messages": [{"content": "a"}]}',
    "an odd role": b'{"messages": [{"role": ["user"], "content": "a"}]}',
    "an odd part": b'{"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}',
    "an odd tool": b'{"messages": [{"role": "user", "content": "a"}], "tools": [5]}',
    "odd arguments": b'{"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": [1]}',
    "no object": b"[1]",
    "bytes": b"\xff\xfe{",
    "NaN": b'{"messages": [{"role": "user", "content": "a"}], "temperature": NaN}',
    "half a character": b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    "a long number": b'{"messages": [{"role": "user", "content": "a"}], "seed": ' + b"9" * 9000 + b"}",
}  # fmt: skip


@pytest.mark.parametrize("what", SHAPES)
@pytest.mark.parametrize("documents", [b"", b'"documents": ["the"], '], ids=["", "documents"])
def test_a_body_of_another_shape_is_refused_in_words(what, documents, door):
    body = SHAPES[what].replace(b"{", b"{" + documents, 1)
    refused = door.http.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert refused.status_code == 400, refused.text
    assert refused.json()["error"]["type"] == "invalid_request_error"
    assert 20 < len(refused.json()["error"]["message"]) <= 400


JSON = b'{"prompt": "the", "max_tokens": 2}'
KINDS = {
    "application/json": 200, "application/json; charset=utf-8": 200, "APPLICATION/JSON": 200,
    "application/vnd.api+json": 200, "": 200, "text/plain": 415, "application/x-www-form-urlencoded": 415,
    "application/jsonp": 415, "multipart/form-data; boundary=application/json": 415, "json": 415,
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_body_that_says_it_is_no_json_is_refused_by_the_name_of_the_header(kind, door):
    answer = door.http.post(TEXT, content=JSON, headers={"content-type": kind} if kind else {})
    assert answer.status_code == KINDS[kind], answer.text
    if answer.status_code == 415:
        assert f"the header content-type is {kind!r}" in answer.json()["error"]["message"]
        assert "prompt" not in answer.text
    of_a_page = door.http.post(TEXT, content=JSON, headers={"origin": "http://evil.example"})
    assert of_a_page.status_code == 415, "a page need not ask before it sends a body without a type"


def call(**more):
    one = {"id": "a", "type": "function", "function": {"name": "find", "arguments": {}, **more}}
    return [{"role": "assistant", "content": "", "tool_calls": [one]}, MESSAGE]


WORDS = "the miller " * 9000
PLACES = {
    "content": {"messages": [{"role": "user", "content": WORDS}]},
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": WORDS[:9000]}] * 11}]},
    "a name": {"messages": [{**MESSAGE, "name": WORDS}]},
    "an id of a call": {"messages": [MESSAGE, {"role": "tool", "content": "a", "tool_call_id": WORDS}, MESSAGE]},
    "a called name": {"messages": [MESSAGE, *call(name=WORDS)]},
    "called arguments": {"messages": [MESSAGE, *call(arguments={"a": [WORDS]})]},
    "names of arguments": {"messages": [MESSAGE, *call(arguments={WORDS: 1})]},
    "arguments as text": {"messages": [MESSAGE, *call(arguments=json.dumps({"a": WORDS}))]},
    "numbers of arguments": {"messages": [MESSAGE, *call(arguments={"a": [*range(20_000)]})]},
    "a description": {"tools": [tool(description=WORDS)]},
    "an argument": {"chat_template_kwargs": {"a": WORDS}},
    "a list of arguments": {"chat_template_kwargs": {"a": [{WORDS[:20_000] + str(one): one} for one in range(5)]}},
    "a document": {"documents": [WORDS]},
    "documents": {"documents": [WORDS[: 12_000 + one] for one in range(8)]},
}


@pytest.mark.parametrize("place", PLACES)
def test_all_that_a_template_may_write_is_counted_before_it_is_rendered(place, door, monkeypatch):
    rendered, pieces = [], []
    noting(monkeypatch, PreTrainedTokenizerBase, "apply_chat_template", lambda *_, **__: rendered.append(1))
    noting(monkeypatch, PreTrainedTokenizerFast, "encode", lambda _, text, **__: pieces.append(len(text)))
    refused = door.chat(**PLACES[place])
    assert refused.status_code == 400, refused.text
    assert re.search(r"characters of the prompt have more than \d+ tokens", refused.json()["error"]["message"])
    assert not rendered
    assert max(pieces) < 20_000


def test_what_no_tokenizer_counts_is_bounded_by_its_characters(monkeypatch):
    noting(monkeypatch, PreTrainedTokenizerFast, "encode", lambda *_, **__: pytest.fail("it was tokenized"))
    with pytest.raises(PromptError, match="the prompt has 1200000 characters, expected at most 1048576"):
        text_prompt(small_tokenizer(), "\n" * 1_200_000, [], tokens=TOKENS)


def test_a_document_that_a_message_holds_is_counted_once():
    text = "the miller " * 1500
    tokens = len(small_tokenizer().encode(text)) + 20
    assert len(chat_prompt(plain(), [{"role": "user", "content": text}], [text], tokens=tokens).ids) < tokens


def plain():
    tokenizer = copy.deepcopy(small_tokenizer())
    tokenizer.chat_template = CHATML
    return tokenizer


def test_a_tenant_whose_bodies_stall_holds_up_neither_others_nor_itself(door):
    opened = [door.begin(1000) for _ in range(LIMITS.bodies * 4)]
    for key in (KEY, TENANTS[1].api_key):
        answer = door.http.post(TEXT, content=JSON, headers={"authorization": f"Bearer {key}"})
        assert answer.status_code == 200
    assert {status_of(one) for one in opened} == {408, 429}


@pytest.fixture
def lines():
    """What is logged: of requests, and as an error."""
    rows, errors = [], []

    class Lines(logging.Handler):
        def emit(self, record):
            rows.append(record.getMessage())

    class Errors(logging.Handler):
        def emit(self, record):
            if record.levelno >= logging.ERROR or record.exc_info:
                errors.append(record.getMessage())

    level, handlers = access.level, [(access, Lines())]
    handlers += [(logging.getLogger(name), Errors()) for name in ("", "uvicorn")]
    for logger, handler in handlers:
        logger.addHandler(handler)
    access.setLevel(logging.INFO)
    yield rows, errors
    access.setLevel(level)
    for logger, handler in handlers:
        logger.removeHandler(handler)


def test_clients_that_reset_at_once_leave_a_line_each_and_no_traceback(door, lines):
    rows, errors = lines
    head = f"POST {TEXT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\ncontent-length: 34\r\n\r\n".encode()
    for part in (b"", head[:40], head, head + JSON[:9], head + JSON):
        for _ in range(6):
            opened = connect(door.url)
            opened.sendall(part)
            reset(opened)
    wait_for(lambda: len(rows) >= 12, "the lines of those whose head came whole")
    wait_for(lambda: door.text().status_code == 200, "the end of all requests")
    assert not errors


def test_guard_says_its_line_also_of_a_client_that_nobody_knows(lines):
    async def receive():
        return {"type": "http.disconnect"}

    tenants = Tenants([Tenant()], lambda tenant: None)
    guard = Guard(None, tenants, Limits(), lambda status: None)
    scope = {"type": "http", "method": "POST", "path": TEXT, "headers": [], "client": None}
    asyncio.run(guard(scope, receive, None))
    own = [line for line in lines[0] if line.startswith("- ")]  # others may still end
    assert [line.rpartition(" - ")[0] for line in own] == [f"- POST {TEXT}"]
    transport = Mock(**{"get_extra_info.return_value": None})
    protocol = guard.connections.guarded(asyncio.Protocol)()
    protocol.connection_made(transport)
    protocol.connection_lost(None)


def test_templates_that_take_long_end_and_those_of_clients_that_left_do_not_begin(door, monkeypatch):
    begun = []
    noting(monkeypatch, Renderer, "__call__", lambda *_, **given: begun.append(1) if "burn" in given else None)
    body = {"messages": [MESSAGE], "documents": ["the"], "chat_template_kwargs": {"burn": 90_000}, "max_tokens": 2}
    content = json.dumps(body).encode()
    for _ in range(LIMITS.requests):
        opened = door.begin(len(content), path=CHAT)
        opened.sendall(content)
        wait_for(lambda: begun, "a render")
        opened.close()
    bert = {"authorization": f"Bearer {TENANTS[1].api_key}"}
    assert door.http.post(CHAT, json={**body, "chat_template_kwargs": {}}, headers=bert).status_code == 200
    wait_for(lambda: not door.limited.running.total(), "the end of all requests")
    assert door.chat(documents=["the"]).status_code == 200
    assert len(begun) == 1
