# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A tenant that is hostile, and one that is not: at the server's door, and at the proxy's in front of vLLM."""

import contextlib
import copy
import itertools
import json
import logging
import shutil
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest
from worlds import REFERENCE

from hf_blend.serving.tenants import Tenant
from hf_blend.serving.wire import Limits
from tests.serving.doors import CHAT, TEMPLATE, proxying, vllm
from tests.serving.hostile import FEW, KINDS
from tests.serving.processes import running, server_process, wait_for

KEYS = {"anna": "key-of-anna-0123456789", "mallory": "key-of-mallory-0123456"}
THREADS = 8
LIMITS = Limits(render_s=0.2)
MORE_BYTES = 300 << 20


class Anna(threading.Thread):
    """Asks again and again about a document; how long each answer took."""

    def __init__(self, url):
        super().__init__()
        self.url, self.seconds, self.statuses, self.is_over = url, [], [], threading.Event()

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *exception):
        self.is_over.set()
        self.join()

    def ask(self, http, number):
        messages = [{"role": "user", "content": f"Where is {number}?"}]
        body = {"messages": messages, "documents": ["The miller was born in May. "], "max_tokens": 2}
        began = time.perf_counter()
        self.statuses.append(http.post(CHAT, json=body).status_code)
        self.seconds.append(time.perf_counter() - began)

    def run(self):
        headers = {"authorization": f"Bearer {KEYS['anna']}"}
        with httpx.Client(base_url=self.url, headers=headers, timeout=60) as http:
            for number in itertools.count():
                self.ask(http, number)
                if self.is_over.wait(0.05):
                    return


def attack(url, kinds):
    """Send all of them, some at once; the status of each, or None where none was waited for."""

    def send(numbered):
        number, kind = numbered
        return kind, KINDS[kind](url, KEYS["mallory"], number)

    with ThreadPoolExecutor(THREADS) as threads:
        return list(threads.map(send, enumerate(kinds)))


def check_statuses(found, anna):
    assert set(anna.statuses) == {200}
    assert not [(kind, status) for kind, status in found if status is not None and status >= 500]
    assert len([status for _, status in found if status is not None]) > len(found) // 2


class Records(logging.Handler):
    """What is logged as an error, or with a traceback."""

    def __init__(self):
        super().__init__()
        self.rows = []

    def emit(self, record):
        if record.levelno >= logging.ERROR or record.exc_info:
            self.rows.append(record)


@contextlib.contextmanager
def threads_of(door, reference, folder):
    """A door in threads of the tests': its URL."""
    model, tokenizer = reference[0], copy.deepcopy(reference[1])
    tokenizer.chat_template = TEMPLATE
    tenants = [Tenant(name, key, key.encode() * 2) for name, key in KEYS.items()]
    given = {"tenants": tenants, "limits": LIMITS}
    with contextlib.ExitStack() as stack:
        if door == "server":
            yield stack.enter_context(running((model, tokenizer), folder, **given)).url
        else:
            upstream, _ = stack.enter_context(vllm())
            yield stack.enter_context(proxying(upstream, tokenizer, tenants, LIMITS, 8192))[0]


@pytest.mark.parametrize("door", ["server", "proxy"])
def test_few_hostile_requests_bring_no_5xx_and_no_traceback_and_hold_nobody_up(door, reference, tmp_path):
    loggers, records = [logging.getLogger(name) for name in ("", "uvicorn")], Records()
    with threads_of(door, reference, tmp_path) as url:
        for one in loggers:
            one.addHandler(records)
        try:
            with Anna(url) as anna:
                found = attack(url, FEW)
        finally:
            for one in loggers:
                one.removeHandler(records)
    assert not [record.getMessage() for record in records.rows]
    check_statuses(found, anna)


@contextlib.contextmanager
def process_of(door, folder):
    """A door in a process of its own: (process, URL, log)."""
    model = folder / "talking"
    shutil.copytree(REFERENCE, model)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    rows = [{"name": name, "api_key": key} for name, key in KEYS.items()]
    (folder / "tenants.json").write_text(json.dumps({"tenants": rows}))
    words = ["--model", str(model), "--tenants", str(folder / "tenants.json")]
    with contextlib.ExitStack() as stack:
        if door == "proxy":
            words += ["--upstream", stack.enter_context(vllm())[0]]
        process, url = stack.enter_context(server_process(folder, *words))
        yield psutil.Process(process.pid), url, folder / "log"


@contextlib.contextmanager
def watched(process):
    """The most memory that a process holds meanwhile."""
    held, is_over = [process.memory_info().rss], threading.Event()

    def watch():
        while not is_over.wait(0.02):
            held.append(process.memory_info().rss)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield held
    finally:
        is_over.set()
        thread.join()


@pytest.mark.slow
@pytest.mark.parametrize("door", ["server", "proxy"])
def test_hostile_requests_bring_no_5xx_no_traceback_little_memory_and_hold_nobody_up(door, tmp_path, capsys):
    kinds = list(itertools.islice(itertools.cycle(KINDS), 200))
    with process_of(door, tmp_path) as (process, url, log):
        with Anna(url) as quiet:
            wait_for(lambda: len(quiet.seconds) >= 40, "quiet answers")
        with watched(process) as held, Anna(url) as anna:
            found = attack(url, kinds)
        check_statuses(found, anna)
        text = log.read_text()
        assert "Traceback" not in text, text[text.index("Traceback") :][:3000]
        assert httpx.get(f"{url}/health", timeout=20).status_code == 200
        more = max(held) - held[0]
        assert more < MORE_BYTES
    p95 = [statistics.quantiles(seconds, n=20)[-1] for seconds in (quiet.seconds[10:], anna.seconds)]
    with capsys.disabled():
        print(
            f"\n{door}: p95 {p95[0]:.3f} s quiet, {p95[1]:.3f} s of {len(anna.seconds)} answers, {more >> 20} MiB more"
        )
