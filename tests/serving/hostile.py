# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What a hostile tenant sends: each kind is a function of (URL, key, number), and gives a status or None."""

import contextlib
import json
import time

import httpx

from tests.serving.doors import CHAT, LONG, TEXT, begin, connect, picture, reset, status_of, tool

MEGABYTES = 3_900_000
MESSAGE = {"role": "user", "content": "Where?"}
ANSWER = {"role": "assistant", "content": "x"}


def post(path, body, **headers):
    """A request as any client sends it."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()

    def send(url, key, number):
        given = {"authorization": f"Bearer {key}", "content-type": "application/json", **headers}
        with contextlib.suppress(httpx.TimeoutException):  # a tenant's own prompts are made one by one
            return httpx.post(url + path, content=content, headers=given, timeout=60).status_code

    return send


def chat(*messages, **more):
    return post(CHAT, {"messages": [*messages, MESSAGE], "max_tokens": 1, **more})


def text(**more):
    return post(TEXT, {"prompt": "the", "max_tokens": 1, **more})


def called(**function):
    call = {"id": "a", "type": "function", "function": {"name": "find", "arguments": {}, **function}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def stalled(url, key, number):
    """A body of which nearly all comes, and then nothing."""
    opened = begin(url, key, MEGABYTES)
    with contextlib.suppress(OSError):
        opened.sendall(b" " * (MEGABYTES - 100 if number % 4 == 0 else 10))
    return status_of(opened, 40.0)


def endless(url, key, number):
    """A body in chunks without an end, up to 600 MB."""
    opened = begin(url, key, None)
    with contextlib.suppress(OSError):
        for _ in range(600):
            opened.sendall(b"100000\r\n" + b"x" * (1 << 20) + b"\r\n")
    return status_of(opened)


def dripping(url, key, number):
    """A body byte by byte, for a while."""
    opened = begin(url, key, 1000)
    with contextlib.suppress(OSError):
        for _ in range(100):
            opened.sendall(b" ")
            time.sleep(0.01)
    reset(opened)


def reset_at(part):
    """A connection that is reset behind a part of its request."""

    def send(url, key, number):
        for _ in range(5):
            opened = connect(url)
            body = json.dumps({"prompt": "the", "max_tokens": LONG, "stream": True}).encode()
            head = f"POST {TEXT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n"
            head += f"content-length: {len(body)}\r\n\r\n"
            given = {"nothing": b"", "half a head": head[:40].encode(), "head": head.encode()}
            opened.sendall(given.get(part, head.encode() + body))
            with contextlib.suppress(TimeoutError):
                opened.recv(20 if part == "answer" else 0)
            reset(opened)

    return send


def gone(path, body):
    """A client that leaves while its answer is made."""

    def send(url, key, number):
        content = json.dumps(body).encode()
        opened = begin(url, key, len(content), path=path)
        opened.sendall(content)
        time.sleep(0.1)
        opened.close()

    return send


def unread(url, key, number):
    """A stream that nobody reads."""
    body = json.dumps({"prompt": "the", "max_tokens": 200, "stream": True, "ignore_eos": True}).encode()
    opened = begin(url, key, len(body))
    opened.sendall(body)
    time.sleep(1.0)
    reset(opened)


def odd_path(url, key, number):
    """Paths and methods that there are not."""
    headers = {"authorization": f"Bearer {key}"}
    with httpx.Client(base_url=url, headers=headers, timeout=60) as http:
        found = [http.get("/v1/nothing"), http.request("DELETE", TEXT), http.get("/v1/models/a%0ab"), http.put(CHAT)]
    return max(one.status_code for one in found)


LETTERS = "x" * MEGABYTES
DEEP = b"[" * 200_000
BURN = {"chat_template_kwargs": {"burn": 90_000}, "documents": ["the"]}
KINDS = {
    "template as an argument": chat(chat_template_kwargs={"chat_template": "{{ 7 * 191 }}"}),
    "template as a field": chat(chat_template="{{ 7 * 191 }}"),
    "argument of the renderer": chat(chat_template_kwargs={"tokenizer": 1}),
    "argument of apply_chat_template": chat(chat_template_kwargs={"tokenize": True, "return_dict": True}),
    "documents as an argument": chat(chat_template_kwargs={"documents": [{"text": LETTERS}]}),
    "large argument": chat(chat_template_kwargs={"a": LETTERS}),
    "slow template": chat(**BURN),
    "slow template, client gone": gone(CHAT, {"messages": [MESSAGE], **BURN}),
    "unknown field": text(tempreature=1),
    "many unknown fields": text(**{f"k{number}": 0 for number in range(300_000)}),
    "fields of vLLM's": chat(mm_processor_kwargs={"max_pixels": 10**9}, priority=-9, request_id="a"),
    "deep": post(TEXT, b'{"prompt":' + DEEP),
    "deep argument": post(
        CHAT, b'{"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"a":' + b"[" * 900
    ),
    "deep tool": chat(tools=[tool(parameters=json.loads('{"a":' * 300 + "1" + "}" * 300))]),
    "messages are a text": post(CHAT, {"messages": "hi"}),
    "messages are an object": post(CHAT, {"messages": {"role": "user"}}),
    "messages are numbers": post(CHAT, {"messages": [1] * 1_900_000}),
    "messages of lists": post(CHAT, {"messages": [[MESSAGE]]}),
    "documents are numbers": text(documents=[1] * 1_900_000),
    "prompts are lists": text(prompt=[[]] * 1_000_000),
    "lists that change nothing": text(metadata=[[]] * 1_200_000),
    "biases": text(logit_bias={str(-number): "x" for number in range(300_000)}),
    "large document": text(documents=[LETTERS]),
    "small documents": text(documents=["a"] * 20_000),
    "a document everywhere": text(prompt="a" * 200_000, documents=["a"]),
    "large description of a tool": chat(tools=[tool(description=LETTERS)]),
    "large names in a tool": chat(tools=[tool(parameters={LETTERS: 1})]),
    "large arguments of a call": chat(called(arguments={"a": LETTERS})),
    "large name of a call": chat(called(name=LETTERS)),
    "large name of a message": chat({**MESSAGE, "name": LETTERS}),
    "large id of a call": chat({"role": "tool", "content": "a", "tool_call_id": LETTERS}),
    "many tools": chat(tools=[tool()] * 60_000),
    "many messages": chat(*[MESSAGE, ANSWER] * 40_000),
    "many parts": chat({"role": "user", "content": [{"type": "text", "text": ""}] * 100_000}),
    "many calls": chat({**called(), "tool_calls": called()["tool_calls"] * 40_000}),
    "many answers": text(n=1000),
    "a strip of an image": chat({"role": "user", "content": [picture((1, 20_000))]}),
    "a large image": chat({"role": "user", "content": [picture((4000, 3000))]}),
    "an image elsewhere": chat(
        {"role": "user", "content": [{"type": "image_url", "image_url": "http://127.0.0.1:1/"}]}
    ),
    "a film": chat({"role": "user", "content": [{"type": "video_url", "video_url": {"url": "file:///etc/passwd"}}]}),
    "no JSON": post(TEXT, b"\xff\xfe{"),
    "NaN": post(TEXT, b'{"prompt": "a", "metadata": NaN, "temperature": NaN}'),
    "half a character": post(TEXT, b'{"prompt": "\\ud800"}'),
    "a long number": post(TEXT, b'{"prompt": "a", "seed": ' + b"9" * 100_000 + b"}"),
    "text": post(TEXT, b'{"prompt": "a"}', **{"content-type": "text/plain"}),
    "a wrong key": post(TEXT, b"{}", authorization="Bearer wrong"),
    "a body that is said to be large": lambda url, key, number: status_of(begin(url, key, 600 << 20)),
    "a body without an end": endless,
    "a stalled body": stalled,
    "a dripping body": dripping,
    "reset": reset_at("nothing"),
    "reset in its head": reset_at("half a head"),
    "reset behind its head": reset_at("head"),
    "reset behind its body": reset_at("body"),
    "reset in its answer": reset_at("answer"),
    "unread": unread,
    "paths": odd_path,
}
FEW = (
    "template as an argument", "template as a field", "argument of the renderer", "slow template, client gone",
    "unknown field", "deep", "messages are a text", "messages of lists", "biases", "small documents",
    "large description of a tool", "large arguments of a call", "large name of a message", "many parts",
    "a strip of an image", "text", "a body that is said to be large", "reset", "reset behind its body", "paths",
)  # fmt: skip
