# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A server answers as the model does, in turns, for those with a key, within its limits."""

import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
import torch

from hf_blend import BlendConfig, observer
from hf_blend.model.anatomy import cache_among
from hf_blend.tenants import Tenant
from tests.chat_templates import DOCUMENTS, QUESTION, assistant, user
from tests.conftest import build_tiny_model, shared_zoo_model
from tests.servers import wait_for

wire = pytest.importorskip("hf_blend.serving.wire", reason="pip install hf-blend[serve]")
worker_module = pytest.importorskip("hf_blend.serving.worker")

COMPUTED = len(DOCUMENTS) + 1  # and what is before them, with which other chats begin
EVERYTHING = BlendConfig(recompute_ratio=1.0)
KEYS = {"anna": "a" * 16, "ben": "b" * 16}
TENANTS = tuple(Tenant(name, key) for name, key in KEYS.items())
OTHER = "And of which year is the crane of the harbour?"


def stock_answer(model, tokenizer, messages, documents=()):
    """What plain `generate` answers; documents are before the first question."""
    messages = [dict(message) for message in messages]
    messages[0]["content"] = "\n\n".join([*documents, messages[0]["content"]])
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=False)
    return continued(model, tokenizer, ids)


def continued(model, tokenizer, ids):
    """The text that plain `generate` writes behind ids."""
    mask = torch.ones_like(ids)
    output = model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
    answer = output[0, ids.shape[1] :]
    return tokenizer.decode(answer, skip_special_tokens=True)


def asked(text=QUESTION):
    return [user(text)]


def text_of(response):
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]["content"]


def report_of(response):
    return response.json()["usage"]["hf_blend"]


def check_refused(response, status, code):
    assert response.status_code == status
    assert response.json()["error"]["code"] == code


def client_of(server, key="none"):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


def streamed(chunks):
    """The text of a stream, its reasons to end, and its usage."""
    text = ""
    reasons = []
    usage = None
    for chunk in chunks:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            part = choice.delta.content if hasattr(choice, "delta") else choice.text
            text += part or ""
            if choice.finish_reason:
                reasons.append(choice.finish_reason)
    return text, reasons, usage


def job(tell, tokens):
    """A request for so many tokens."""
    message = wire.Message(role="user", content="Where?")
    request = wire.ChatRequest(messages=[message], max_tokens=tokens)
    return worker_module.Job("", request, tell, time.monotonic() + 60)


def block(server):
    """Let the worker write an answer that goes on when the returned event is set."""
    gate = threading.Event()
    parts = []

    def tell(part):
        parts.append(part)
        gate.wait(60)

    server.worker.submit(job(tell, 2))
    wait_for(lambda: parts, "the first token")
    return gate


def test_chat_is_that_of_stock_generate(serve, chatting):
    with serve(config=EVERYTHING) as server:
        answer = server.chat(QUESTION, documents=DOCUMENTS)
        assert text_of(answer) == stock_answer(*chatting, asked(), documents=DOCUMENTS)
        usage = answer.json()["usage"]
        assert usage["completion_tokens"] == 8
        assert usage["hf_blend"]["computed_chunks"] == COMPUTED
        assert text_of(server.chat(QUESTION)) == stock_answer(*chatting, asked())


def test_completion_is_that_of_stock_generate(serve, chatting):
    model, tokenizer = chatting
    with serve(config=EVERYTHING) as server:
        body = {"prompt": OTHER, "documents": DOCUMENTS[:1], "temperature": 0, "max_tokens": 8}
        answer = server.post("/v1/completions", body).json()["choices"][0]
    ids = tokenizer(f"{DOCUMENTS[0]}\n\n{OTHER}", return_tensors="pt")["input_ids"]
    assert answer["text"] == continued(model, tokenizer, ids)


def test_stored_documents_are_reused_in_any_order(serve):
    with serve(heal=False) as server:
        server.chat(QUESTION, documents=DOCUMENTS)
        usage = server.chat(OTHER, documents=DOCUMENTS[::-1]).json()["usage"]
    report = usage["hf_blend"]
    assert report["computed_chunks"] == 0
    assert report["reused_tokens"] > 50
    assert usage["prompt_tokens_details"]["cached_tokens"] == report["reused_tokens"]
    assert 0 < report["charged_budget"] < 1


def test_documents_in_message_stay_there(serve):
    inside = asked(f"{DOCUMENTS[0]}\n\n{QUESTION}")
    with serve(heal=False) as server:
        named = server.chat(inside, documents=DOCUMENTS[:1]).json()
        unnamed = server.chat(inside).json()
    assert named["usage"]["prompt_tokens"] == unnamed["usage"]["prompt_tokens"]
    assert named["usage"]["hf_blend"]["computed_chunks"] == 2


def model_of_kind(kind, vocabulary):
    """A small model: "mistral" with windows, "lfm2" a hybrid with states."""
    shape = {"vocab_size": vocabulary, "max_position_embeddings": 2048}
    if kind == "lfm2":
        return shared_zoo_model("lfm2", **shape)
    if kind == "mistral":
        shape["sliding_window"] = 24
    return build_tiny_model(kind, num_hidden_layers=2, **shape)


@pytest.mark.parametrize("kind", ["llama", "mistral", "lfm2"])
def test_continued_and_healed_conversation_is_that_of_stock_generate(serve, chatting, kind):
    _, tokenizer = chatting
    model = model_of_kind(kind, len(tokenizer))
    with serve(model=model) as server:
        first = text_of(server.chat(QUESTION, documents=DOCUMENTS))
        (conversation,) = server.worker._conversations
        wait_for(lambda: conversation.is_healed, "healing")
        messages = [*asked(), assistant(first), *asked(OTHER)]
        second = server.chat(messages, documents=DOCUMENTS)
        assert text_of(second) == stock_answer(model, tokenizer, messages, documents=DOCUMENTS)
        assert server.worker.healed_tokens > 0
        if kind == "llama":
            assert report_of(second)["continued_tokens"] > 100


def test_conversations_are_kept_by_tenant_and_only_latest(serve):
    with serve({"conversations": 2}, TENANTS, heal=False) as server:
        for text in ("One?", "Two?", "Three?"):
            server.chat(text, KEYS["anna"])
        kept = [conversation.input.messages for conversation in server.worker._conversations]
        assert kept == [asked("Two?"), asked("Three?")]
        turn = [*asked("Three?"), assistant("No."), *asked("Why?")]
        of_ben = server.chat(turn, KEYS["ben"])
        assert report_of(of_ben)["continued_tokens"] == 0
        of_anna = server.chat(turn, KEYS["anna"])
        assert report_of(of_anna)["continued_tokens"] > 0


def test_edited_conversation_is_moved_where_asked_for(serve, chatting):
    long = " ".join(DOCUMENTS)
    first = [*asked(f"Hm. {long}"), assistant("Yes."), *asked(long)]
    edited = [*asked("Well."), *first[1:], assistant("No."), *asked("Why?")]
    for edits in ("compute", "blend"):
        with serve(edits=edits, heal=False, recompute_ratio=1.0) as server:
            server.chat(first)
            answer = server.chat(edited)
            assert text_of(answer) == stock_answer(*chatting, edited)
            assert (report_of(answer)["moved_tokens"] > 33) == (edits == "blend")
            other = server.chat("Another chat.")
            assert report_of(other)["continued_tokens"] == 0


def test_seed_temperature_and_stop(serve, chatting):
    with serve(heal=False) as server:
        sampled = {"temperature": 1.5, "top_p": 0.9, "max_tokens": 12}
        texts = []
        for seed in (1, 1, 2, None, None):
            answer = server.chat(QUESTION, seed=seed, **sampled)
            texts.append(text_of(answer))
        assert texts[0] == texts[1]
        assert len({*texts}) == 4, "without a seed no answer continues the numbers of another"
        whole = text_of(server.chat(QUESTION, max_tokens=30))
        stop = whole[5:8]
        answer = server.chat(QUESTION, max_tokens=30, stop=[stop, "no such text"])
        before, _, _ = whole.partition(stop)
        assert text_of(answer) == before
        assert answer.json()["choices"][0]["finish_reason"] == "stop"
        begun = server.chat(QUESTION, max_tokens=30, stop=f"{whole[-3:]} and no more")
        assert text_of(begun) == whole, "what may have begun a stop text is not lost"
        assert begun.json()["choices"][0]["finish_reason"] == "length"


def test_assistant_message_is_continued(serve, chatting):
    model, tokenizer = chatting
    messages = [*asked(), assistant("It is nine")]
    with serve(config=EVERYTHING) as server:
        text = text_of(server.chat(messages))
    ids = tokenizer.apply_chat_template(messages, continue_final_message=True, return_tensors="pt", return_dict=False)
    assert text == continued(model, tokenizer, ids)


def test_four_clients_at_once_streamed_and_not(serve):
    def ask(server, number, is_streamed):
        question = f"{QUESTION} {number}"
        fields = {"model": "tiny", "messages": asked(question), "temperature": 0, "max_tokens": 12}
        extra = {"documents": [DOCUMENTS[number % 3], DOCUMENTS[(number + 1) % 3]]}
        chat = client_of(server).chat.completions
        if not is_streamed:
            answer = chat.create(**fields, extra_body=extra)
            (choice,) = answer.choices
            return choice.message.content, [choice.finish_reason], answer.usage.total_tokens
        options = {"stream": True, "stream_options": {"include_usage": True}}
        text, reasons, usage = streamed(chat.create(**fields, **options, extra_body=extra))
        return text, reasons, usage.total_tokens

    with serve(config=EVERYTHING, heal=False) as server:
        alone = [ask(server, number, False) for number in range(4)]
        with ThreadPoolExecutor(4) as pool:
            whole = list(pool.map(ask, [server] * 4, range(4), [False] * 4))
            parts = list(pool.map(ask, [server] * 4, range(4), [True] * 4))
        completions = client_of(server).completions
        _, reasons, usage = streamed(completions.create(model="tiny", prompt="A", max_tokens=3, stream=True))
    assert alone == whole == parts
    assert reasons in (["length"], ["stop"])
    assert usage is None, "usage is sent where it is asked for"


def test_client_that_leaves_is_cancelled(serve, chatting):
    model, _ = chatting
    calls = []
    handle = model.register_forward_hook(observer(lambda *_: calls.append(1)))
    try:
        with serve(heal=False) as server:
            stream = client_of(server).chat.completions.create(
                model="tiny", messages=asked(), max_tokens=1900, temperature=0, stream=True
            )
            next(iter(stream))
            stream.close()
            body = {"messages": asked(), "max_tokens": 1900, "temperature": 0}
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=0.3)
            server.chat(QUESTION)
    finally:
        handle.remove()
    assert len(calls) < 1900, "neither of both was written to its end"


def test_keys_are_needed_and_open_namespaces(serve):
    with serve(tenants=TENANTS, heal=False) as server:
        for key in ("none", "wrong", "a" * 15, "ä" * 8):
            headers = {"authorization": f"Bearer {key}".encode()}
            answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a"}, headers=headers)
            check_refused(answer, 401, "bad_key")
        with pytest.raises(openai.AuthenticationError):
            client_of(server, "wrong").models.list()
        (model,) = client_of(server, KEYS["anna"]).models.list()
        assert model.id == "tiny"
        for name in KEYS:
            for computed in (COMPUTED, 0):
                answer = server.chat(QUESTION, KEYS[name], documents=DOCUMENTS)
                assert report_of(answer)["computed_chunks"] == computed
        assert "anna" not in httpx.get(f"{server.url}/metrics").text


STATUSES = {
    401: (("/v1/completions", {"prompt": "a"}), {"key": "wrong"}),
    405: (("/v1/models", {}), {}),
    413: (("/v1/completions", {"prompt": "a" * 5000}), {}),
    415: (("/v1/completions", {"prompt": "a"}), {"content-type": "text/plain"}),
}


@pytest.mark.parametrize("status", STATUSES)
def test_status_and_error_body(serve, status):
    arguments, settings = STATUSES[status]
    with serve({"body_bytes": 4000}, (Tenant(api_key="k" * 16),)) as server:
        answer = server.post(*arguments, **{"key": "k" * 16} | settings)
    assert answer.status_code == status
    assert answer.json()["error"]["message"]


REFUSED = {  # by code and field
    "more tokens than positions": ({"messages": asked("a " * 3000)}, "context_length_exceeded", "messages"),
    "document without text": ({"documents": [{"words": "a"}]}, "bad_request", "documents"),
    "empty stop text": ({"stop": [""]}, "bad_request", "stop"),
    "too many stop texts": ({"stop": ["a"] * 5}, "bad_request", "stop"),
    "no messages": ({"messages": []}, "bad_request", "messages"),
    "bad schema": ({"response_format": {"type": "json_schema", "json_schema": 5}}, "not_served", "response_format"),
}


def test_refusal_has_code_and_names_its_field(serve):
    with serve() as server:
        for name, (fields, code, param) in REFUSED.items():
            answer = server.post("/v1/chat/completions", {"messages": asked(), **fields})
            check_refused(answer, 400, code)
            assert answer.json()["error"]["param"] == param, name


def test_first_delta_has_role_and_content_and_last_is_empty(serve):
    fields = {"model": "tiny", "messages": asked(), "max_tokens": 2, "stream": True}
    with serve() as server:
        deltas = [
            chunk.choices[0].delta.model_dump(exclude_unset=True)
            for chunk in client_of(server).chat.completions.create(**fields)
        ]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert deltas[-1] == {}


def test_length_is_bounded(serve):
    with serve({"tokens": 120}) as server:
        for fields in ({"max_tokens": 100}, {"documents": DOCUMENTS}, {"documents": ["a " * 3000]}):
            answer = server.chat(QUESTION, **fields)
            check_refused(answer, 400, "context_length_exceeded")
            assert "expected at most" in answer.text
        answer = server.chat(QUESTION, max_tokens=None)
        assert answer.json()["usage"]["total_tokens"] <= 120


def test_queue_and_seconds_are_bounded(serve):
    with serve({"queue": 1, "request_s": 1.0}, heal=False) as server, ThreadPoolExecutor(1) as pool:
        gate = block(server)
        waiting = pool.submit(server.chat, QUESTION)
        wait_for(lambda: server.worker.waiting, "a request that waits")
        refused = server.chat(OTHER)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        time.sleep(1.2)
        gate.set()
        late = waiting.result()
        check_refused(late, 503, "timeout")
        assert server.chat(QUESTION).status_code == 200


def test_slow_body_is_cut(serve):
    with serve({"body_s": 0.2}) as server:

        def drip():
            yield b"{"
            time.sleep(1.0)
            yield b"}"

        headers = {"content-type": "application/json"}
        answer = httpx.post(f"{server.url}/v1/completions", content=drip(), headers=headers)
    assert answer.status_code == 408


def test_close_tells_those_who_wait(chatting, store):
    worker = worker_module.ModelWorker(*chatting, {"": store}, wire.RequestLimits(), heal=False)
    worker.start()
    told = [queue.SimpleQueue() for _ in range(3)]
    for one in told:
        worker.submit(job(one.put, 1500))
    told[0].get()
    worker.close()
    for one in told:
        last = None
        while not one.empty():
            last = one.get()
        assert isinstance(last, wire.Refused)
        assert (last.status, last.code) == (503, "stopping")
    with pytest.raises(wire.Refused, match="about to stop"):
        worker.submit(job(print, 1500))


def test_failure_is_answered_and_logged_once(serve, chatting, monkeypatch, caplog):
    generate = chatting[0].generate
    caches = []

    def fail(**given):
        caches.append(cache_among(given))
        generate(**given)
        raise ZeroDivisionError

    with serve() as server:
        with monkeypatch.context() as patch:
            patch.setattr(chatting[0], "generate", fail)
            answer = server.chat(QUESTION)
        assert [cache.get_seq_length() for cache in caches] == [0], "its K and V are freed"
        assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")
        assert "ZeroDivisionError" not in answer.text
        assert [record.message for record in caplog.records if record.exc_info] == ["a request failed"]
        assert server.chat(QUESTION).status_code == 200


def test_full_memory_forgets_conversations(serve, chatting, monkeypatch):
    def fail(**_):
        raise torch.OutOfMemoryError("full")

    with serve() as server:
        server.chat(QUESTION)
        assert server.worker._conversations
        with monkeypatch.context() as patch:
            patch.setattr(chatting[0], "generate", fail)
            answer = server.chat(OTHER)
        check_refused(answer, 503, "memory")
        assert not server.worker._conversations


def test_error_behind_first_token_ends_stream(serve):
    with serve({"request_s": 1.0}) as server:
        body = {"messages": asked(), "max_tokens": 1900, "temperature": 0, "stream": True}
        lines = server.post("/v1/chat/completions", body).text.strip().split("\n\n")
    assert '"code": "timeout"' in lines[-2]
    assert lines[-1] == "data: [DONE]"


def test_health_and_metrics(serve):
    with serve() as server:
        assert httpx.get(f"{server.url}/health").json() == {"ready": True}
        server.chat(QUESTION, documents=DOCUMENTS)
        server.chat(5)
        text = httpx.get(f"{server.url}/metrics").text
    for line in (
        'hf_blend_requests_total{status="200"} 1.0',
        'hf_blend_requests_total{status="400"} 1.0',
        'hf_blend_tokens_total{kind="answer"} 8.0',
        "hf_blend_first_token_seconds_count 1.0",
        "hf_blend_requests_waiting 0.0",
    ):
        assert line in text
