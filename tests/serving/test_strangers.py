# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What one tenant sends never keeps another from its answers: a server process, and two clients of it."""

import contextlib
import json
import shutil
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from worlds import REFERENCE

from tests.serving.processes import metrics, server_process, wait_for

KEYS = {"alice": "key-of-alice-0123456789", "bob": "key-of-bob-0123456789ab"}
MODEL = "endless"
SELECTOR = '''"""Recomputes the first tokens, and cannot bear long chunks."""

from hf_blend.selectors.base import Selector


class Touchy(Selector):
    """Raises what no list of classes foresees."""

    needs_kv = False

    def score(self, view):
        """By place."""
        assert int(view.chunk_tokens.max()) < 80, "a long chunk"
        return -view.offset.float()
'''
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
LENGTH = 600
SAFE_TOKENS = 450  # of an answer, while others may still be disturbed
LEAKS = ("Traceback", "site-packages", ".py", 'File "', "/tmp")
DEEP = "[" * 900 + "]" * 900
WORDS = "The miller was born in May. "
LONG = WORDS * 16


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """(URL, its log); the model's answers do not end before they are as long as was asked for."""
    folder = tmp_path_factory.mktemp("strangers")
    model = folder / MODEL
    shutil.copytree(REFERENCE, model)
    for name in ("config.json", "generation_config.json"):
        settings = json.loads((model / name).read_text())
        (model / name).write_text(json.dumps({**settings, "eos_token_id": 2}))  # which it does not write
    (folder / "touchy.py").write_text(SELECTOR)
    rows = [{"name": name, "api_key": key} for name, key in KEYS.items()]
    (folder / "tenants.json").write_text(json.dumps({"tenants": rows}))
    words = ["--model", str(model), "--tenants", str(folder / "tenants.json"), "--max-requests", "16"]
    words += ["--selector", str(folder / "touchy.py"), "--allow-unverified"]
    with server_process(folder, *words) as (_, url):
        yield url, folder / "log"


def test_a_request_is_found_again_in_the_log_by_its_name_behind_the_plan_of_memory(server, bob):
    body = {"model": MODEL, "prompt": "the", "max_tokens": 2}
    answer = bob.post(TEXT, json=body, headers={"x-request-id": "named-by-bob"})
    assert answer.headers["x-request-id"] == "named-by-bob"
    assert answer.json()["id"] == "cmpl-named-by-bob"
    forged = bob.post(TEXT + "%0aforged", json=body, headers={"x-request-id": "two words"})
    assert forged.headers["x-request-id"] not in ("two words", "")
    lines = server[1].read_text().splitlines()
    (plan,) = [line for line in lines if line.startswith(f"Serving {MODEL} in float32 on cpu")]
    assert "for 8192 tokens of requests" in plan
    (line,) = [line for line in lines if "request=named-by-bob" in line]
    assert "POST /v1/completions 200" in line
    assert "tenant=bob" in line
    assert not [line for line in lines if line.startswith("forged")]
    assert not [line for line in lines if KEYS["bob"] in line]


def client(url, name):
    return httpx.Client(base_url=url, headers={"authorization": f"Bearer {KEYS[name]}"}, timeout=60)


@pytest.fixture
def bob(server):
    with client(server[0], "bob") as opened:
        yield opened


def message(text="the the the"):
    return [{"role": "user", "content": text}]


class Stream(threading.Thread):
    """Alice's, of whom nobody may take a token."""

    def __init__(self, url, tokens=LENGTH):
        super().__init__()
        self.url, self.tokens = url, tokens
        self.pieces, self.usage, self.error = [], None, None
        self.start()

    def run(self):
        body = {"model": MODEL, "prompt": "the the the", "temperature": 0, "max_tokens": self.tokens, "stream": True}
        body["stream_options"] = {"include_usage": True}
        with client(self.url, "alice") as own, own.stream("POST", TEXT, json=body) as response:
            for line in response.iter_lines():
                event = json.loads(line[6:]) if line.startswith("data: {") else {}
                self.error = event.get("error", self.error)
                self.usage = event.get("usage") or self.usage
                self.pieces += [choice["text"] for choice in event.get("choices", ())]


@pytest.fixture(scope="module")
def undisturbed(server):
    stream = Stream(server[0])
    stream.join()
    assert stream.usage["completion_tokens"] == LENGTH
    return "".join(stream.pieces)


def disturb(server, undisturbed, bodies):
    """Let bob send requests while alice streams: her text is the same, and has a step for each token.

    An answer of his has one more, in which its first token comes alone; what is refused has none.
    """
    url, found, left = server[0], [], list(bodies)
    with client(url, "bob") as bob:
        while left:
            before, known = metrics(url)["hf_blend_steps_total"], len(found)
            stream = Stream(url)
            wait_for(lambda stream=stream: stream.pieces or stream.error, "her first token")
            while left and len(stream.pieces) < SAFE_TOKENS and stream.is_alive():
                path, body = left.pop(0)
                content = body if isinstance(body, bytes) else json.dumps(body).encode()
                response = bob.post(path, content=content, headers={"content-type": "application/json"})
                found.append((response.status_code, response.text, content[:60]))
            stream.join()
            assert stream.error is None
            assert "".join(stream.pieces) == undisturbed
            steps = metrics(url)["hf_blend_steps_total"] - before
            answered = [status for status, *_ in found[known:]].count(200)
            assert steps - stream.usage["completion_tokens"] <= 1 + answered
    return found


def crafted():
    """A hundred bodies and more: (path, body)."""
    chat = {"model": MODEL, "messages": message(), "max_tokens": 2}
    text = {"model": MODEL, "prompt": "the", "max_tokens": 2}
    numbers = [-1, 0, 1e-300, 1e300, float("nan"), float("inf"), 10**40, "1", "x", True, [], {}, [1]]
    for field in ("temperature", "top_p", "max_tokens", "max_completion_tokens"):
        yield from ((TEXT, {**text, field: value}) for value in numbers)
    fields = ["n", "top_k", "min_p", "repetition_penalty", "presence_penalty", "seed", "logprobs", "ignore_eos"]
    for field in fields:
        yield from ((TEXT, {**text, field: value}) for value in [*numbers, 1000, None])
    biases = [{"a": 1}, {"-1": 1}, {"5": float("nan")}, {str(10**40): 1}, {str(one): 1 for one in range(10**5)}, [1]]
    yield from ((TEXT, {**text, "logit_bias": value}) for value in biases)
    tool = {"type": "function", "function": {"name": "a", "parameters": {"enum": ["x" * 10**5]}}}
    yield from ((CHAT, {**chat, "tools": value}) for value in ([tool], [tool] * 10**4, [{}], "a", [5]))
    choices = ["required", "all", {"type": "function", "function": {"name": "\ud800"}}]
    yield from ((CHAT, {**chat, "tool_choice": value}) for value in choices)
    forms = [{"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": {"enum": ["x"] * 10**5}}}, 5]
    yield from ((CHAT, {**chat, "response_format": value}) for value in forms)
    keys = [{"chat_template": "{% for a in range(10**9) %}{% endfor %}"}, {"tokenize": True}, {"a": "x" * 10**6}]
    yield from ((CHAT, {**chat, "chat_template_kwargs": value}) for value in keys)
    texts = ["", "\ud800", "\0", "\ufffd" * 100, "🙂" * 500, "x" * 200_000, 5, True, [], {"a": 1}]
    yield from ((TEXT, {**text, "prompt": value}) for value in texts)
    yield from ((TEXT, {**text, "stop": value}) for value in [*texts, ["a"] * 99, ["a" * 10**6] * 3, [""], [5]])
    yield from ((TEXT, {**text, "model": value}) for value in texts)
    yield from ((TEXT, {**text, "documents": [value]}) for value in texts)
    yield from ((CHAT, {**chat, "messages": message(value)}) for value in texts)
    yield from ((CHAT, {**chat, "messages": value}) for value in ([], [{}], [5], "hi", {"role": "user"}, None))
    yield from ((TEXT, {**text, value: 1}) for value in ("\ud800", "x" * 100_000, "\0", "n\n"))
    yield from ((TEXT, {**text, "prompt": value}) for value in ([10**30], [-1], [297] * 5000, [1.5], [None], [[1]]))
    yield TEXT, {**text, "documents": ["a"] * 100_000}
    yield TEXT, {**text, "documents": ["a"], "prompt": "a" * 50_000}
    yield TEXT, {**text, "prompt": "a|" * 100_000, "chunk_separator": "|"}
    yield TEXT, {**text, "prompt": WORDS * 400}
    yield CHAT, {**chat, "messages": message("x") * 50_000}
    yield CHAT, {**chat, "documents": [f"{LONG}{number}" for number in range(3)]}
    for field in ("n", "tools", "logit_bias", "response_format", "chat_template_kwargs", "unknown", "user"):
        yield TEXT, json.dumps({**text, field: 0}).replace(": 0}", f": {DEEP}}}").encode()
    yield TEXT, b"[" * 500_000
    yield TEXT, b'{"prompt":' * 100_000
    yield TEXT, b'{"prompt": ' + b"9" * 100_000 + b"}"
    yield TEXT, b'{"prompt": "\xff\xfe"}'
    yield from ((TEXT, body) for body in (b"", b"null", b"0", b'"a"', b"{}", b"\0", b"{" * 10, b"\xef\xbb\xbf{}"))


def test_no_field_of_drawing_or_form_gets_a_5xx(bob):
    """Each once; those of `test_no_body_gets_a_5xx_a_traceback_or_a_step_of_others` are more."""
    for path, body in list(crafted())[52:200:9]:
        answer = bob.post(path, content=json.dumps(body).encode(), headers={"content-type": "application/json"})
        assert answer.status_code in (200, 400), (answer.text, str(body)[:100])


@pytest.mark.slow
def test_no_body_gets_a_5xx_a_traceback_or_a_step_of_others(server, undisturbed):
    bodies = list(crafted())
    assert len(bodies) > 100
    found = disturb(server, undisturbed, bodies)
    assert len(found) == len(bodies)
    odd = [one for one in found if one[0] >= 500 or any(leak in one[1] for leak in LEAKS) or len(one[1]) > 3000]
    assert not odd
    refused = [json.loads(text)["error"]["message"] for status, text, _ in found if status >= 400]
    assert all(0 < len(one) <= 400 for one in refused)
    assert len(refused) > 80
    assert metrics(server[0])["hf_blend_prefill_failures_total"] >= 1, "the selector raised AssertionError"


WORST = {
    "no token left": {"temperature": 1, "top_p": 1e-300},
    "a long stop": {"stop": ["a" * 10**6] * 3},
    "many documents": {"documents": ["x"] * 100_000},
    "a document that is everywhere": {"documents": ["a"], "prompt": "a" * 100_000},
    "a prefill that asserts": {"documents": [LONG]},
}
QUICK = ("no token left", "a prefill that asserts")


@pytest.mark.parametrize("what", [one if one in QUICK else pytest.param(one, marks=pytest.mark.slow) for one in WORST])
def test_the_worst_of_one_tenant_leaves_the_other_its_answers(what, server):
    url, ends, found = server[0], threading.Event(), []
    body = {"model": MODEL, "prompt": "Where?", "max_tokens": 2, **WORST[what]}

    def attack():
        with client(url, "bob") as bob:
            while not ends.is_set() or len(found) < 5:
                found.append(bob.post(TEXT, json=body).status_code)

    given = {"model": MODEL, "messages": message(), "temperature": 0, "max_tokens": 4}
    with ThreadPoolExecutor(2) as threads, client(url, "alice") as alice:
        attacks = [threads.submit(attack) for _ in range(2)]
        try:
            for number in range(4):
                answer = alice.post(CHAT, json={**given, "documents": [f"{WORDS}{number}"]})
                assert answer.status_code == 200, answer.text
                assert answer.json()["usage"]["completion_tokens"] == 4
                assert alice.get("/health").status_code == 200
        finally:
            ends.set()
    assert not any(one.exception() for one in attacks)
    assert set(found) <= {200, 400}


def test_half_sent_headers_hold_nobody_up(server):
    url = server[0]
    host, port = url.removeprefix("http://").split(":")
    with contextlib.ExitStack() as stack:
        for _ in range(400):
            held = stack.enter_context(socket.create_connection((host, int(port)), timeout=20))
            held.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthoriz")
        with client(url, "alice") as alice:
            assert alice.get("/health").status_code == 200
            answer = alice.post(TEXT, json={"model": MODEL, "prompt": "the", "max_tokens": 2})
            assert answer.status_code == 200


def test_a_model_that_is_not_served_is_404_with_the_one_that_is(bob):
    for answer in (bob.post(TEXT, json={"model": "gpt-9", "prompt": "the"}), bob.get("/v1/models/a/b")):
        assert answer.status_code == 404
        assert f"'{MODEL}' is" in answer.json()["error"]["message"]
    assert bob.get("/v1/models").json()["data"] == [bob.get(f"/v1/models/{MODEL}").json()]
    assert abs(bob.get(f"/v1/models/{MODEL}").json()["created"] - time.time()) < 3600, "when the server began"


def test_a_browser_without_a_key_is_told_what_this_address_is_for(server):
    for path in ("/", "/docs"):
        page = httpx.get(f"{server[0]}{path}")
        assert page.status_code == 200
        assert page.headers["content-type"].startswith("text/html")
        assert "POST /v1/chat/completions\nPOST /v1/completions\nGET /v1/models\n" in page.text
        assert '{"messages": [{' in page.text
        assert MODEL not in page.text
