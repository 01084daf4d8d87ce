# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Both doors on 127.0.0.1, the server's and the proxy's, an application that stands for vLLM, and raw requests."""

import asyncio
import base64
import contextlib
import io
import json
import socket
import struct
import threading

import uvicorn
from PIL import Image
from starlette.applications import Starlette
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from hf_blend.config import BlendConfig
from hf_blend.integrations.vllm.proxy import Proxy, make_proxy
from hf_blend.serving.run import listen

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
LONG = 700  # tokens of an answer that takes its time
# the template of the tests' models; what it counts to is the client's
TEMPLATE = """{% for message in messages %}\
{% for _ in range(burn or 0) %}{% for _ in range(burn) %}{% endfor %}{% endfor %}\
{{ message.role }}: {{ message.content }}{{ message.name }}\
{% for call in message.tool_calls or [] %}{{ call | tojson }}{% endfor %}
{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}assistant: {% endif %}"""


def fake_vllm(received):
    """An application that notes what it receives; a long answer takes as long as the client stays."""

    async def answer(request):
        body = json.loads(await request.body() or b"null")
        received.append(body)
        if body and (body.get("max_tokens") or 0) >= LONG and not body.get("stream"):
            await asyncio.sleep(30)
        if body and body.get("stream"):
            return StreamingResponse(events(body.get("max_tokens") or 1), media_type="text/event-stream")
        return JSONResponse({"choices": [{"text": "the"}], "object": "fake"})

    async def events(count):
        for _ in range(count):
            yield b'data: {"choices": [{"text": "the"}]}\n\n'
            await asyncio.sleep(0.01)
        yield b"data: [DONE]\n\n"

    return Starlette(routes=[Route("/{path:path}", answer, methods=["GET", "POST"])])


@contextlib.contextmanager
def vllm():
    """That application in a thread: (URL, what it receives)."""
    received = []
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(fake_vllm(received), log_level="critical", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}", received
        finally:
            server.should_exit = True
            thread.join(30)


@contextlib.contextmanager
def proxying(upstream, tokenizer, tenants, limits, tokens):
    """A proxy in a thread: (URL, the `Proxy`)."""
    proxy = Proxy(tokenizer, BlendConfig(), tenants, limits, tokens)
    up, started = threading.Event(), []

    def on_start(*given):
        started.extend(given)
        up.set()

    given = (make_proxy(upstream, proxy), "127.0.0.1", 0, 2, on_start)
    thread = threading.Thread(target=listen, args=given)
    thread.start()
    assert up.wait(30)
    try:
        yield started[0], proxy
    finally:
        started[1]()
        thread.join(30)
        assert not thread.is_alive()


def picture(size, **more):
    """A part of a message."""
    held = io.BytesIO()
    Image.new("RGB", size).save(held, "PNG", **more)
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded(held.getvalue())}"}}


def encoded(content):
    return base64.b64encode(content).decode()


def tool(**function):
    return {"type": "function", "function": {"name": "find", **function}}


def connect(url):
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=30)


def begin(url, key, length, path=TEXT, kind="application/json"):
    """A connection whose request has a head, and a body of so many bytes, or one in chunks, that is to come."""
    opened = connect(url)
    size = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
    kind = f"content-type: {kind}\r\n" if kind else ""
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n{kind}{size}\r\n\r\n"
    opened.sendall(head.encode())
    return opened


def reset(opened):
    """End a connection as who pulls the plug."""
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    opened.close()


def status_of(opened, seconds=30.0):
    """The status of the answer that comes; 0 where the connection is cut without any."""
    opened.settimeout(seconds)
    with opened:
        try:
            head = opened.recv(1000)
        except OSError:
            return 0
    return int(head.split(b" ", 2)[1]) if head.startswith(b"HTTP/") else 0
