# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The server and the proxy in front of vLLM have one door: every limit of the page is tried at both."""

import contextlib
import copy
import re
import time
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from hf_blend.evaluation.pictures import Eyes
from hf_blend.serving.service import Tenant
from hf_blend.serving.wire import Limits
from tests.serving.doors import CHAT, LONG, TEMPLATE, TEXT, begin, connect, picture, proxying, status_of, tool, vllm
from tests.serving.processes import running, wait_for

PAGE = Path(__file__).parents[2] / "docs" / "serving.md"
KEY = "key-of-anna-0123456789"
TENANTS = [Tenant("anna", KEY, b"a" * 32), Tenant("bert", "key-of-bert-0123456789", b"b" * 32)]
LIMITS = Limits(
    requests=2, connections=4, header_s=1.0, body_bytes=200_000, body_s=1.0, bodies=3, arriving_bytes=300_000,
    documents=8, messages=20, parts=30, render_s=0.3, images=3, pixels=5000, aspect_ratio=20.0, image_bytes=1 << 20,
    choices=2, tools=4, schema_chars=2000, stops=2, stop_chars=32, new_tokens=5,
)  # fmt: skip
TOKENS = 2048


class Door:
    """One of both, as a client meets it."""

    def __init__(self, url, limited, received=None):
        self.url, self.limited, self.received = url, limited, received
        headers = {"authorization": f"Bearer {KEY}"}
        self.http = httpx.Client(base_url=url, headers=headers, timeout=60)

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
    found = status_of(opened[0])
    for one in opened[1:]:
        one.close()
    return found


def slow_body(door):
    opened = door.begin(500)
    opened.sendall(b'{"prompt"')
    return status_of(opened)


def endless_body(door):
    opened = door.begin(None)
    with contextlib.suppress(OSError):
        for _ in range(40):
            opened.sendall(b"2000\r\n" + b" " * 0x2000 + b"\r\n")
    return status_of(opened)


def slow_answer(door):
    with limited_to(door, request_s=0.3):
        return door.text(max_tokens=LONG, ignore_eos=True).status_code


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
    """What the page says of each limit: its default, what is beyond it, and what the proxy does there."""
    cells = re.findall(
        r"^\| `(\w+)` \| ([\d.,]+) \|[^|]*\| ([^|]+) \| ([^|]+) \|", PAGE.read_text("utf-8"), re.MULTILINE
    )
    return {name: (float(value.replace(",", "")), beyond, proxy) for name, value, beyond, proxy in cells}


def said(text):
    """As a status, 0 for a connection that is cut, or the words."""
    found = re.search(r"\b[2-5]\d\d\b", text)
    return int(found[0]) if found else 0 if "is cut" in text else text.strip("` ")


def test_limits_of_the_page_are_those_there_are():
    assert {name: value for name, (value, *_) in rows().items()} == vars(Limits())
    assert set(TRIED) == {one.name for one in fields(Limits)}


@pytest.mark.parametrize("limit", TRIED)
def test_a_limit_holds_as_the_page_says(limit, door):
    _, beyond, proxy = rows()[limit]
    expected = said(proxy if door.received is not None and proxy != "the same" else beyond)
    assert TRIED[limit](door) == expected
    assert door.text().status_code == 200
