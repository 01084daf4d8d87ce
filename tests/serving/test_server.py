# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The server as clients see it: OpenAI's own client, tenants, and clients that misbehave."""

import asyncio
import contextlib
import copy
import gc
import json
import random
import shutil
import socket
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import httpx
import openai
import psutil
import pytest
import torch
from starlette.requests import Request
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from worlds import reference_questions

from hf_blend import BlendCache, BlendConfig, ChunkStore
from hf_blend.config import BLIND_RATIO, BLIND_SELECTOR
from hf_blend.errors import ConfigError, PromptError
from hf_blend.model.fingerprint import fingerprint
from hf_blend.prompt.detokenizer import Detokenizer
from hf_blend.recipes import Recipe
from hf_blend.serving import app, service
from hf_blend.serving.guard import Connections, Guard, Refused
from hf_blend.serving.prompts import chat_prompt, text_prompt
from hf_blend.serving.run import ServerPlan, check_port, make_service, serve
from hf_blend.serving.tenants import Tenant, read_tenants
from hf_blend.serving.wire import Limits
from tests.asking import noting
from tests.chat_templates import CHATML, DOCUMENTS, small_tokenizer
from tests.serving.processes import metrics, running, wait_for

MODEL = "smollm2"
KEYS = {"anna": "key-of-anna-0123456789", "bert": "key-of-bert-0123456789"}
TENANTS = [
    Tenant("anna", KEYS["anna"], bytes(range(32))),
    Tenant("bert", KEYS["bert"], bytes(range(32, 64)), max_requests=1),
]
LIMITS = Limits(requests=3, body_bytes=40_000, body_s=0.6, request_s=60.0, new_tokens=12, documents=30)
QUESTION = reference_questions()[0]


@pytest.fixture(scope="module")
def server(reference, tmp_path_factory):
    with running(reference, tmp_path_factory.mktemp("store"), tenants=TENANTS, limits=LIMITS) as service:
        yield service


@pytest.fixture
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEYS["anna"], max_retries=0, timeout=60)


@pytest.fixture
def http(server):
    headers = {"authorization": f"Bearer {KEYS['anna']}"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=60) as opened:
        yield opened


def messages(question=None):
    return [{"role": "user", "content": question or QUESTION["question"]}]


def endless(**more):
    """The body of a request whose answer is as long as the server allows."""
    return {"model": MODEL, "prompt": "the the the", "max_tokens": 700, "ignore_eos": True, **more}


@pytest.fixture
def no_end(server, monkeypatch):
    """From now on the steps of the engine take their time."""
    noting(monkeypatch, server.engine, "_generation_step", lambda: time.sleep(0.005))


def check_idle(server):
    """Nothing is under way, no block is held, and no handler waits."""
    engine = server.engine
    wait_for(lambda: not server.running.total(), "the end of all requests")
    wait_for(lambda: not engine.batch_processor.has_pending_requests(), "the end of the engine's requests")
    wait_for(lambda: engine.paged.blocks_in_use == 0, "the return of all blocks")
    assert not engine.output_router.result_handlers


def test_the_openai_client_gets_the_answer_of_a_lone_request_and_what_it_cost(client, server, reference):
    given = {"model": server.name, "messages": messages(), "temperature": 0, "max_tokens": 8}
    first = client.chat.completions.create(**given, extra_body={"documents": QUESTION["chunks"]})
    assert first.choices[0].message.content == QUESTION["answer"]
    assert first.choices[0].finish_reason == "stop"
    again = client.chat.completions.create(**given, extra_body={"documents": QUESTION["chunks"][::-1]})
    costs = again.usage.hf_blend
    assert first.usage.hf_blend["computed_chunks"] == len(QUESTION["chunks"])
    assert (costs["prefill"], costs["computed_chunks"]) == ("blended", 0)
    assert costs["reused_tokens"] > costs["recomputed_tokens"] > 0
    assert again.usage.prompt_tokens_details.cached_tokens == costs["reused_tokens"]

    model, tokenizer = reference
    store = ChunkStore.open("memory://")
    prompt = chat_prompt(tokenizer, messages(), QUESTION["chunks"][::-1])
    store.add(model, None, [span.token_ids for span in prompt.spans()])
    cache = BlendCache(model, store, selector="kv-deviation")
    output = model.generate(torch.tensor([prompt.ids]), past_key_values=cache, max_new_tokens=8, do_sample=False)
    text = tokenizer.decode(output[0, len(prompt.ids) :], skip_special_tokens=True)
    assert again.choices[0].message.content == text


def test_the_openai_client_completes_text_with_documents_or_chunk_markers(client):
    documents, question = QUESTION["chunks"], QUESTION["question"]
    given = {"model": MODEL, "temperature": 0, "max_tokens": 8}
    by_field = client.completions.create(prompt=question, extra_body={"documents": documents}, **given)
    marked = "|".join(["", *documents, question])
    by_marker = client.completions.create(prompt=marked, extra_body={"chunk_separator": "|"}, **given)
    streamed = client.completions.create(prompt=question, stream=True, extra_body={"documents": documents}, **given)
    assert by_field.choices[0].text == by_marker.choices[0].text == "".join(p.choices[0].text for p in streamed)
    assert by_field.choices[0].text == QUESTION["answer"]
    assert by_marker.usage.hf_blend["prefill"] in ("blended", "shared")


def test_stop_texts_and_lengths_end_an_answer(client, no_end):
    given = {"model": MODEL, "prompt": "the the the", "temperature": 0}
    long = client.completions.create(max_tokens=10, **given)
    assert long.choices[0].finish_reason == "length"
    assert long.usage.completion_tokens == 10
    words = long.choices[0].text.split()
    stop = next(word for word in words[1:] if word != words[0])
    cut = client.completions.create(max_tokens=10, stop=[stop], **given)
    assert cut.choices[0].finish_reason == "stop"
    assert cut.choices[0].text == long.choices[0].text.split(stop)[0]


class Letters:
    """A tokenizer of bytes, which counts what it decodes."""

    decoded = 0

    @classmethod
    def decode(cls, tokens, skip_special_tokens=True):
        cls.decoded += len(tokens)
        return bytes(tokens).decode(errors="replace")


def pieces_of(given, tokens):
    counts = range(1, len(tokens) + 1)
    return [given.feed(tokens[:count], count == len(tokens)) for count in counts if not given.is_stopped]


@pytest.mark.parametrize("kind", ["bytes", "bundled", "spaces"])
def test_the_pieces_of_an_answer_are_the_whole_of_it_whatever_the_tokens(kind, reference):
    tokenizer = {"bytes": Letters, "bundled": reference[1], "spaces": small_tokenizer("spaces")}[kind]
    drawn, size = random.Random(0), 256 if kind == "bytes" else len(tokenizer)
    texts = ["naïve 日本語 🙂🙃 don't  \n\tx — ¾", "🙂" * 9, "the road was long"]
    rows = [list(text.encode()) if kind == "bytes" else tokenizer.encode(text) for text in texts]
    if kind != "bytes":  # of other bytes than those of text, a decoder may write the ones before otherwise
        rows += [[drawn.randrange(size) for _ in range(40)] for _ in range(40)]
    given = [pieces_of(Detokenizer(tokenizer, []), row) for row in rows]
    assert ["".join(pieces) for pieces in given] == [tokenizer.decode(row, skip_special_tokens=True) for row in rows]
    assert max(sum(map(bool, pieces)) for pieces in given) > 5, "some of it came before the end"


def test_bytes_that_never_become_a_character_do_not_hold_the_rest_back():
    pieces = pieces_of(Detokenizer(Letters, []), [*b"ab", *[0xFF] * 100, *b"cd"])
    text = "".join(pieces)
    assert text.startswith("ab\ufffd")
    assert text.endswith("cd")
    assert sum(map(bool, pieces)) > 5


@pytest.mark.parametrize("stops", [[], ["no such text"], ["b" * 250, "a" * 250 + "c"]])
def test_an_answer_of_twice_the_length_is_twice_the_work(stops, monkeypatch):
    costs = []
    for count in (1000, 2000):
        monkeypatch.setattr(Letters, "decoded", 0)
        assert "".join(pieces_of(Detokenizer(Letters, stops), list(b"a" * count))) == "a" * count
        costs.append(Letters.decoded)
    assert costs[1] <= 2 * costs[0] + 10
    assert costs[0] < 5 * 1000


def calls_of(do):
    """How many calls and steps of generators something takes."""
    count = [0]
    sys.setprofile(lambda frame, event, given: count.__setitem__(0, count[0] + (event in ("call", "c_call"))))
    try:
        do()
    finally:
        sys.setprofile(None)
    return count[0]


def test_finding_documents_twice_as_often_is_twice_the_work(reference):
    def find(count):
        with pytest.raises(PromptError, match=f"{count} places.*at most 256"):
            text_prompt(reference[1], "ab" * count, ["a"], most=256)

    find(500)
    costs = [calls_of(lambda count=count: find(count)) for count in (1000, 2000)]
    assert costs[1] < 2.5 * costs[0]


def test_a_request_is_counted_and_admitted_before_its_prompt_is_made(server, http, monkeypatch):
    made = []
    monkeypatch.setattr("hf_blend.serving.app.text_prompt", lambda *given: made.append(given))
    many = http.post("/v1/completions", json={"prompt": "the", "documents": ["x"] * 31})
    assert many.status_code == 400
    assert many.json()["error"]["message"].startswith("31 documents came, at most 30")
    cut = http.post("/v1/completions", json={"prompt": "a|" * 40, "chunk_separator": "|"})
    assert cut.status_code == 400
    monkeypatch.setattr(server, "limits", Limits(requests=0))
    assert http.post("/v1/completions", json={"prompt": "the"}).status_code == 429
    assert not made


def test_text_that_may_still_change_or_begin_a_stop_is_held_back():
    pieces = pieces_of(Detokenizer(Letters, ["STOP"]), list("naïve ¾ STo STOP more".encode()))
    assert "".join(pieces) == "naïve ¾ STo "
    assert "\ufffd" not in "".join(pieces)


BAD = {
    "no key": ({}, {"authorization": ""}, 401, "invalid_api_key"),
    "wrong key": ({}, {"authorization": "Bearer wrong"}, 401, "invalid_api_key"),
    "no body": (b"", {}, 400, None),
    "no prompt": ({"model": MODEL}, {}, 400, None),
    "empty document": ({"prompt": "a", "documents": [""]}, {}, 400, None),
    "too long": ({"prompt": "a " * 5000}, {}, 400, "bad_request"),
    "a token that does not exist": ({"prompt": [5, 10**6]}, {}, 400, "bad_request"),
    "a negative token": ({"prompt": [5, -1]}, {}, 400, "bad_request"),
    "too large": (b"x" * 50_000, {}, 413, "request_too_large"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_request_gets_a_clear_4xx(what, http, server):
    body, headers, status, code = BAD[what]
    content = body if isinstance(body, bytes) else json.dumps({"model": MODEL, **body}).encode()
    response = http.post("/v1/completions", content=content, headers={"content-type": "application/json", **headers})
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error["message"]
    assert len(error["message"]) < 400
    assert code is None or error["code"] == code
    assert "Traceback" not in response.text


@pytest.mark.parametrize("shown", ["\u0301", "\u2603", "\n \t"], ids=["marks", "unknown characters", "white space"])
def test_a_text_that_no_prompt_can_hold_is_refused_before_all_of_it_is_tokenized(shown, monkeypatch):
    made, tokens = [], 100
    small = Tokenizer(models.WordLevel({"<unk>": 0, "the": 1, "a": 2}, unk_token="<unk>"))
    small.normalizer = normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])
    small.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=small, unk_token="<unk>")
    noting(monkeypatch, type(tokenizer), "encode", lambda _, text, **given: made.append(len(text)))
    padded, long, asked = f"the {shown * 100_000} the", "a the " * 100_000, {"tokens": tokens, "documents": []}
    assert len(text_prompt(tokenizer, padded, **asked).ids) <= 3
    assert len(chat_prompt(tokenizer, messages(padded), **asked).ids) <= 3
    assert len(text_prompt(tokenizer, [1], tokens=tokens, documents=[padded]).ids) <= 4
    made.clear()
    for build in (
        lambda: chat_prompt(tokenizer, messages(long), **asked),
        lambda: chat_prompt(tokenizer, messages("a"), tokens=tokens, documents=[long]),
        lambda: text_prompt(tokenizer, long, **asked),
        lambda: text_prompt(tokenizer, [1], tokens=tokens, documents=[long]),
    ):
        with pytest.raises(PromptError, match=f"of 6000.. characters of the prompt have more than {tokens} tokens"):
            build()
    assert max(made) < 20_000
    assert len(text_prompt(tokenizer, "a " * 30_000, []).ids) == 30_000, "where positions are not bounded"


@pytest.mark.parametrize(("length", "refused"), [("\xb2", False), ("9" * 5000, True), ("4", False), ("x", False)])
def test_a_length_that_is_no_number_of_bytes_breaks_nothing(length, refused):
    async def receive():
        return {"type": "http.request", "body": b"text"}

    guard = Guard(None, None, Limits(), lambda status: None)
    found = contextlib.nullcontext() if not refused else pytest.raises(Refused, match="larger than 4194304 bytes")
    with found:
        headers = [(b"content-length", length.encode("latin1"))]
        assert asyncio.run(guard._body(Request({"type": "http", "headers": headers}, receive))) == b"text"


def test_guard_tells_who_comes_when_too_many_are_here_when_to_ask_again():
    sent, scope = [], {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}

    async def send(message):
        sent.append(message)

    asyncio.run(Guard(None, None, Limits(requests=-16), lambda status: None)(scope, None, send))
    assert (sent[0]["status"], dict(sent[0]["headers"])[b"retry-after"]) == (503, b"1")


@pytest.mark.parametrize(("path", "status"), [("/v1/nothing", 404), ("/v1/completions", 405)])
def test_an_unknown_path_or_method_is_an_error_in_the_same_form(path, status, http):
    response = http.get(path)
    assert response.status_code == status
    assert response.json()["error"]["message"]


def connect(server):
    host, port = server.url.removeprefix("http://").split(":")
    opened = socket.create_connection((host, int(port)), timeout=20)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEYS['anna']}\r\n"
        "content-type: application/json\r\n"
    )
    return opened, head


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_cancels_its_request(stream, server, no_end):
    opened, head = connect(server)
    body = json.dumps(endless(stream=stream)).encode()
    with opened:
        opened.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        if stream:
            assert b"data:" in opened.recv(4000) + opened.recv(4000)
        wait_for(lambda: server.engine.batch_processor.scheduler.active_requests, "the first step")
    check_idle(server)


def test_a_tenant_has_its_own_limit_and_its_own_store(server, client, no_end):
    bert = openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEYS["bert"], max_retries=0)
    given = {"model": MODEL, "prompt": QUESTION["question"], "temperature": 0, "max_tokens": 3}
    documents = {"documents": ["Rolf bought a lantern too.", "The miller was born in May anyway."]}
    first = client.completions.create(**given, extra_body=documents)
    other = bert.completions.create(**given, extra_body=documents)
    again = bert.completions.create(**given, extra_body=documents)
    computed = [answer.usage.hf_blend["computed_chunks"] for answer in (first, other, again)]
    assert computed == [2, 2, 0]
    assert other.usage.hf_blend["prefill"] == "blended", "no block of the other tenant is shared"
    assert {name for name, _ in server.tenants.stores.items()} == set(KEYS)
    with bert.completions.create(model=MODEL, prompt="the", max_tokens=700, stream=True) as answer:
        next(iter(answer))
        with pytest.raises(openai.RateLimitError, match="1 requests are under way"):
            bert.completions.create(**given)
        assert client.completions.create(**given).choices
    check_idle(server)


def test_health_and_metrics_say_what_happens(server, client):
    client.completions.create(model=MODEL, prompt="Rolf", temperature=0, max_tokens=3)
    with httpx.Client(base_url=server.url) as anybody:
        assert anybody.get("/health").json() == {"ready": True}
        text = anybody.get("/metrics").text
    values = metrics(server.url)
    assert values["hf_blend_blocks_used"] == 0
    assert values['hf_blend_requests_total{status="200"}'] >= 1
    assert values['hf_blend_prefills_total{how="plain"}'] >= 1
    assert values["hf_blend_first_token_seconds_count"] >= 1
    odd = [name for name in (*KEYS, "tenant", "tier") if name in text]
    assert not odd, "who stores what is nobody else's business"
    assert not [key for key in KEYS.values() if key in text]


@pytest.mark.skipif(service.TRIM is None, reason="an allocator that is not glibc's gives pages back by itself")
def test_memory_that_is_free_goes_back_to_the_system_when_an_answer_ends_but_not_at_each(client, monkeypatch):
    called, trim = [], service.TRIM
    monkeypatch.setattr(service, "TRIM", lambda pad: (called.append(pad), trim(pad)))
    monkeypatch.setattr(service, "TRIM_S", float("inf"))
    parts = [torch.ones(1 << 13) for _ in range(4096)]  # 32 KiB each, on the heap
    kept, held = parts[::64], psutil.Process().memory_info().rss
    parts.clear()
    client.completions.create(model=MODEL, prompt="Rolf", max_tokens=1)
    assert not called
    monkeypatch.setattr(service, "TRIM_S", 0.0)
    client.completions.create(model=MODEL, prompt="Rolf", max_tokens=1)
    wait_for(lambda: held - psutil.Process().memory_info().rss > 64 << 20, f"less than {held} beside {len(kept)}")
    assert called == [0]


def counts(server, *names):
    found = metrics(server.url)
    return [found.get(f"hf_blend_{name}", 0.0) for name in names]


def test_a_step_that_fails_is_an_error_that_is_counted_also_within_a_stream_and_the_server_serves_on(
    server, http, monkeypatch
):
    def fail_later():
        if any(len(one.state.generated_tokens) > 2 for one in server.engine.batch_processor.scheduler.in_step):
            raise AssertionError("somewhere in /usr/lib")

    names = [f'requests_total{{status="{status}"}}' for status in (500, 200)]
    given = {"prompt": "the the the", "max_tokens": 9, "temperature": 0}
    with monkeypatch.context() as patch:
        noting(patch, server.engine, "_generation_step", fail_later)
        for stream, status in ((False, 500), (True, 200)):  # which was said before
            failed, fine = counts(server, *names)
            answer = http.post("/v1/completions", json={**given, "stream": stream})
            assert answer.status_code == status
            assert '"server_error"' in answer.text
            assert "failed in the engine" in answer.text
            assert "/usr/lib" not in answer.text
            wait_for(lambda before=(failed, fine): counts(server, *names) != [*before], "a count")
            assert counts(server, *names) == [failed + 1, fine]
    assert http.post("/v1/completions", json=given).status_code == 200
    check_idle(server)


def test_a_connection_that_sends_no_request_is_cut(server, monkeypatch):
    doors = Connections(Limits(connections=2, header_s=0.2))
    transports = [Mock(**{"get_extra_info.return_value": ("127.0.0.1", port, 0, 0)}) for port in range(4)]
    are_cut = lambda: [one.abort.called for one in transports]  # noqa: E731

    async def connect():
        protocol = doors.guarded(asyncio.Protocol)
        for transport in transports[:2]:
            protocol().connection_made(transport)
        doors.busy(("127.0.0.1", 0))
        for transport in transports[2:]:
            protocol().connection_made(transport)
        assert are_cut() == [False, True, False, False], "the oldest that sends none"
        doors.idle(("127.0.0.1", 0))
        assert are_cut() == [False, True, True, False]
        await asyncio.sleep(0.4)
        assert all(are_cut()), "after a time"

    asyncio.run(connect())


def test_each_of_several_tenants_has_a_share_of_the_disk_or_its_quota(reference, tmp_path, monkeypatch):
    quotas = {}
    note = lambda *_, quota_bytes=None, namespace="", **__: quotas.update({namespace: quota_bytes})  # noqa: E731
    noting(monkeypatch, ChunkStore, "open", note)
    tenants = [*TENANTS, Tenant("carl", "key-of-carl-0123456789", quota_bytes=5000)]
    service = make_service(*reference, ServerPlan(location=str(tmp_path), tenants=tenants, cache_tokens=256))
    service.close(0.0)
    assert quotas["carl"] == 5000
    assert 0 < quotas["anna"] == quotas["bert"] <= shutil.disk_usage(tmp_path).free // 6 + (1 << 30)


@pytest.mark.parametrize("settings", [{"selector": "boundary"}, {"selector": "query-attention"}])
def test_a_server_takes_the_recipe_of_its_model_where_that_asks_no_question(reference, tmp_path, settings):
    model, tokenizer = reference
    with ChunkStore.open(tmp_path) as store:
        store.recipes.put(fingerprint(model), Recipe({**settings, "recompute_ratio": 0.3}, "tuned"))
    plan = {"location": str(tmp_path), "tenants": TENANTS, "cache_tokens": 256}
    found = []
    for blend in ({}, {"recompute_ratio": 0.4}, BlendConfig(0.2)):
        service = make_service(model, tokenizer, ServerPlan(**plan, blend=blend))
        found.append((service.engine.blend_config.selector, service.engine.blend_config.recompute_ratio))
        service.close(0.0)
    rule, ratio = ("boundary", 0.3) if settings["selector"] == "boundary" else (BLIND_SELECTOR, BLIND_RATIO)
    assert found == [(rule, ratio), (rule, 0.4), (BlendConfig.selector, 0.2)]


@pytest.mark.usefixtures("collection")
def test_a_server_that_is_told_to_stop_answers_what_is_under_way(reference, tmp_path):
    found, garbage = [], contextlib.ExitStack()
    garbage.own, is_there = garbage, weakref.ref(garbage)
    gc.collect()  # into the generation that is seldom looked at
    frozen = gc.get_freeze_count()
    del garbage
    with running(reference, tmp_path, limits=LIMITS) as service:
        wait_for(lambda: gc.get_freeze_count() > frozen, "that what is there from the start is in no collection")
        assert is_there() is None, "what nobody has is not kept"
        asked = openai.OpenAI(base_url=f"{service.url}/v1", api_key="none is needed", max_retries=0)
        stream = asked.completions.create(model=MODEL, prompt="the the", max_tokens=12, temperature=2, stream=True)
        found.append(next(iter(stream)))
        reader = threading.Thread(target=lambda: found.extend(stream))
        reader.start()
    reader.join(30)
    assert found[-1].choices[0].finish_reason
    assert not service.engine.is_running()
    assert service.engine.prefills.turns._thread is None


@pytest.mark.parametrize("stream", [True, False])
def test_who_takes_too_long_for_a_server_that_stops_is_told_so(stream, reference, tmp_path, capfd, caplog):
    with running(reference, tmp_path, patience_s=0, limits=Limits(new_tokens=12)) as service:
        step = service.engine._generation_step
        service.engine._generation_step = lambda: (time.sleep(0.05), step())
        found, body = [], {**endless(), "stream": stream}
        asking = threading.Thread(
            target=lambda: found.append(httpx.post(f"{service.url}/v1/completions", json=body, timeout=60))
        )
        asking.start()
        active = service.engine.batch_processor.scheduler.active_requests
        wait_for(lambda: any(len(state.generated_tokens) > 3 for state in list(active.values())), "some tokens")
    asking.join(30)
    (answer,) = found
    assert answer.status_code == (200 if stream else 503)
    assert "the server ends, and this request took too long for it" in answer.text
    assert "[DONE]" not in answer.text
    assert "Traceback" not in capfd.readouterr().err + caplog.text


def test_histograms_count_who_was_given_up_too(server, http, no_end, monkeypatch):
    names = [f"{name}_seconds_count" for name in ("waiting", "prefill", "first_token")]
    names += [f'given_up_total{{during="{name}"}}' for name in ("waiting", "decoding")]
    before = counts(server, *names)
    more = lambda: [new - old for new, old in zip(counts(server, *names), before, strict=True)]  # noqa: E731
    with http.stream("POST", "/v1/completions", json=endless(stream=True)) as answer:
        next(answer.iter_lines())
    check_idle(server)
    assert more() == [1, 1, 1, 0, 1]
    monkeypatch.setattr(server, "limits", Limits(request_s=0.2))
    monkeypatch.setattr(server.engine, "add_request", lambda *given, **settings: None)
    assert http.post("/v1/completions", json=endless()).status_code == 504
    assert more() == [2, 1, 2, 1, 1]


def test_documents_are_chunks_wherever_they_are_in_a_prompt(reference):
    tokenizer = reference[1]
    one, two = "Rolf bought a satchel too.\n", "He lives in Kestrel.\n"
    before = chat_prompt(tokenizer, messages("Where?"), [one, two])
    inside = chat_prompt(tokenizer, messages(f"{one}{two}Where?"), [two, one])
    text = text_prompt(tokenizer, f"{one}{two}Where?", [one, two])
    ids = text_prompt(tokenizer, tokenizer.encode("Where?", add_special_tokens=False), [one, two])
    ended = chat_prompt(tokenizer, messages("Where?"), [one.strip(), two.strip()])
    begun = text_prompt(tokenizer, tokenizer("Where?")["input_ids"], [one, two])
    assert before == inside == text == ids == ended == begun, "one BOS, in front"
    assert before.ids == tuple(tokenizer(f"{one}{two}Where?")["input_ids"])
    assert [span.token_ids for span in before.spans()] == [
        tuple(tokenizer.encode(document, add_special_tokens=False)) for document in (one, two)
    ]


def test_documents_within_a_template_have_the_ids_of_the_whole_text_and_keep_their_inside():
    tokenizer = copy.deepcopy(small_tokenizer("spaces"))  # which other tests share
    tokenizer.chat_template = CHATML
    prompt = chat_prompt(tokenizer, messages("Where?"), DOCUMENTS)
    asked = messages("\n\n".join([*DOCUMENTS, "Where?"]))
    whole = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=True)
    assert list(prompt.ids) == whole["input_ids"]
    for span, document in zip(prompt.spans(), DOCUMENTS, strict=True):
        assert span.tokens >= len(tokenizer.encode(document, add_special_tokens=False)) - 8


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "cannot be read"),
        ("[]", "names no tenant"),
        ('{"tenants": [{"name": "a"}]}', "no api_key of 16"),
        ('{"tenants": [{"name": "a", "api_key": "short"}]}', "no api_key of 16"),
        ('{"tenants": [{"api_key": "0123456789abcdef"}]}', "no name"),
        ('{"tenants": [{"name": "a", "api_key": "0123456789abcdef", "secret": "00"}]}', "64 or more hex digits"),
        ('{"tenants": [{"name": "a", "api_key": "0123456789abcdef", "quota": 1}]}', "expected fields among"),
        ('{"tenants": [{"name": "a", "api_key": "0123456789abcdef", "quota_bytes": 0}]}', "quota_bytes=0"),
        ('{"tenants": [{"name": "a", "api_key": "0123456789abcdef"}, {"name": "a", "api_key": "x123456789abcdef"}]}',
         "same name"),
    ],
)  # fmt: skip
def test_a_file_of_tenants_that_makes_no_sense_is_refused(content, words, tmp_path):
    path = tmp_path / "tenants.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=words) as refused:
        read_tenants(path)
    assert "0123456789abcdef" not in str(refused.value)


def test_a_port_that_is_taken_is_refused(reference, tmp_path, server):
    model, tokenizer = reference
    service = make_service(model, tokenizer, ServerPlan(location=str(tmp_path), blend=BlendConfig(), cache_tokens=256))
    taken = "127.0.0.1", int(server.url.rsplit(":", 1)[1])
    for attempt in (check_port, lambda host, port: serve(service, host, port)):
        with pytest.raises(ConfigError, match="cannot be listened at"):
            attempt(*taken)
    assert not service.engine.is_running()


def test_prompts_of_one_tenant_that_take_long_to_make_hold_no_other_up(reference, tmp_path, monkeypatch):
    ends, begun = threading.Event(), []
    note = lambda _, prompt, *__: begun.append(ends.wait(30)) if prompt == "slow" else None  # noqa: E731
    noting(monkeypatch, app, "text_prompt", note)
    tenants = [Tenant(name, f"{name} has this key".replace(" ", "-"), b"x" * 32) for name in ("one", "two")]
    with running(reference, tmp_path, tenants=tenants) as service:

        def ask(tenant, prompt):
            headers = {"authorization": f"Bearer {tenant.api_key}"}
            body = {"prompt": prompt, "max_tokens": 2}
            return httpx.post(f"{service.url}/v1/completions", json=body, headers=headers, timeout=60).status_code

        with ThreadPoolExecutor(4) as threads:
            try:
                waiting = [threads.submit(ask, tenants[0], "slow") for _ in range(4)]
                wait_for(lambda: service.running["one"] == 4, "the requests of one")
                assert ask(tenants[1], "Where?") == 200
                assert not begun
            finally:
                ends.set()
            assert [one.result() for one in waiting] == [200] * 4
