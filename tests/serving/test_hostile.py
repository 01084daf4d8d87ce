# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Hostile requests, each kind once, and 200: none gets 5xx but 503, nothing raises, memory stays within 300 MB."""

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import httpx
import psutil
import pytest

from tests.chat_templates import user

pytest.importorskip("hf_blend.serving.app", reason="pip install hf-blend[serve]")

MOST_BYTES = 300e6
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
MESSAGE = user("Where?")
LETTERS = "x" * 1_000_000
DEEP = "[" * 200_000


def chat(*messages, **fields):
    return CHAT, {"messages": [*messages, MESSAGE], "max_tokens": 1, **fields}


def text(**fields):
    return TEXT, {"prompt": "the", "max_tokens": 1, **fields}


BODIES = {
    "many unknown fields": text(**{f"k{number}": 0 for number in range(80_000)}),
    "deep": (TEXT, f'{{"prompt": {DEEP}'),
    "a document of one letter in many": text(prompt="ab " * 10_000, documents=["a", "b", " "]),
    "large prompt": text(prompt=LETTERS),
    "image": chat({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}),
    "stop texts": text(stop=["a" * 256] * 4, max_tokens=200),
    "a long number": (TEXT, '{"prompt": "a", "seed": ' + "9" * 100_000 + "}"),
    "too large": text(prompt="a" * 3_000_000),
}


def post(url, name):
    path, body = BODIES[name]
    if not isinstance(body, str):
        body = json.dumps(body)
    headers = {"content-type": "application/json"}
    answer = httpx.post(url + path, content=body.encode(), headers=headers, timeout=120)
    return answer.status_code


def broken_off(url, sent, wait):
    """Send a part of a request, and reset the connection."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as opened:
        opened.sendall(sent)
        if wait:
            with suppress(TimeoutError):
                opened.recv(100)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def connections():
    body = json.dumps({"prompt": "the", "max_tokens": 500, "stream": True}).encode()
    head = f"POST {TEXT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    whole = head.encode() + body
    return {
        "reset in its body": (whole[:-5], False),
        "reset in its answer": (whole, True),
        "no HTTP": (b"\x16\x03\x01" * 50, True),
    }


def send(url, number):
    """Send one of the hostile requests; its status, None where a connection was broken off."""
    broken = connections()
    names = [*BODIES, *broken]
    name = names[number % len(names)]
    if name in broken:
        broken_off(url, *broken[name])
        return name, None
    return name, post(url, name)


@pytest.fixture
def process(small_hub, tmp_path):
    """A server in a process of its own: the process, its URL, and its log."""
    (folder,) = small_hub.glob("models--*/snapshots/abc")
    log = tmp_path / "log"
    words = ["serve", "--model", str(folder), "--store", str(tmp_path / "store"), "--port", "0", "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with log.open("wb") as written:
        command = [sys.executable, "-P", "-m", "hf_blend", *words]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=written, env=environment)
    try:
        said = b""
        while b"}" not in said:
            line = server.stdout.readline()
            assert line, log.read_text()
            said += line
        url = json.loads(said)["url"]
        assert httpx.get(f"{url}/health", timeout=60).status_code == 200
        yield server, url, log
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)
        server.stdout.close()


@pytest.mark.parametrize("count", [len(BODIES) + len(connections()), pytest.param(200, marks=pytest.mark.slow)])
def test_hostile_requests_break_nothing(process, count):
    server, url, log = process
    asked = {"messages": [MESSAGE], "max_tokens": 4, "temperature": 0, "documents": ["The light is at Tarn Hut."]}
    expected = httpx.post(url + CHAT, json=asked, timeout=60).json()["choices"]
    memory = psutil.Process(server.pid).memory_info
    before = memory().rss
    highest = [0]
    is_over = threading.Event()

    def watch():
        while not is_over.wait(0.02):
            highest.append(memory().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with ThreadPoolExecutor(8) as pool:
            statuses = list(pool.map(lambda number: send(url, number), range(count)))
    finally:
        is_over.set()
        watcher.join()
    for name, status in statuses:
        assert status is None or status < 500 or status == 503, name
    assert {400, 200, 413} <= {status for _, status in statuses}
    assert "Traceback" not in log.read_text()
    assert max(highest) - before < MOST_BYTES
    assert httpx.post(url + CHAT, json=asked, timeout=60).json()["choices"] == expected
