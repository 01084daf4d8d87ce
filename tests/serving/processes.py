# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Servers in processes of their own, and in threads of the tests'."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import httpx
from worlds import REFERENCE

COMMAND = [sys.executable, "-P", "-m", "hf_blend", "serve"]


def wait_for(happened, what, seconds=60.0):
    until = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < until, f"{what} did not happen"
        time.sleep(0.01)


@contextmanager
def server_process(folder, *words):
    """A server of its own process: (process, URL)."""
    folder.mkdir(parents=True, exist_ok=True)
    log = (folder / "log").open("wb")
    command = [*COMMAND, "--store", str(folder / "store"), "--port", "0", "--json", "--cache-tokens", "8192", *words]
    command += [] if "--model" in words else ["--model", REFERENCE]
    command += [] if "--heal" in words else ["--no-heal"]  # answers and steps do not depend on when requests come
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=environment)
    try:
        lines = b""
        while b"}" not in lines:
            line = process.stdout.readline()
            assert line, (folder / "log").read_text()
            lines += line
        yield process, json.loads(lines)["url"]
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        finally:
            process.kill()
            process.stdout.close()
            log.close()


@contextmanager
def running(reference, folder, patience_s=20, eyes=None, **settings):
    """A server in a thread, and its service."""
    from hf_blend.config import BlendConfig
    from hf_blend.serving.run import ServerPlan, make_service, serve

    model, tokenizer = reference
    given = {"cache_tokens": 8192, "page_tokens": 16, "heal": False, "blend": BlendConfig(selector="kv-deviation")}
    service = make_service(model, tokenizer, ServerPlan(location=str(folder), **given | settings), eyes)
    up, ends = threading.Event(), []

    def started(url, stop):
        service.url = url
        ends.append(stop)
        up.set()

    thread = threading.Thread(target=serve, args=(service, "127.0.0.1", 0, patience_s, started))
    thread.start()
    assert up.wait(30)
    try:
        yield service
    finally:
        ends[0]()
        thread.join(30)
        assert not thread.is_alive()


def metrics(url):
    lines = httpx.get(f"{url}/metrics", timeout=20).text.splitlines()
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if not line.startswith("#")}
