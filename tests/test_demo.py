# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What the page does, without a browser: it streams three answers, keeps its limits, and escapes what it is given."""

import itertools
import re
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from worlds import REFERENCE, reference_questions

from hf_blend import ChunkStore
from hf_blend.errors import PromptError
from hf_blend.evaluation.asking import Pipeline
from hf_blend.evaluation.demo import drawing, page
from hf_blend.evaluation.demo.compare import DemoState, Panel, Passage, compare, streamed
from hf_blend.evaluation.demo.loaded import load_exact
from hf_blend.evaluation.demo.request import (
    OPENING,
    DemoRequest,
    documents_of,
    handbook,
    page_questions,
    prepare,
    selectors,
)
from hf_blend.evaluation.demo.visitors import PUBLIC, Limits, Visitors

HOSTILE = "<script>window.broken = 1</script><img src=x onerror='window.broken = 1'> \" & </textarea>"


@pytest.fixture(scope="module")
def bundled():
    return load_exact(REFERENCE)


@pytest.fixture(scope="module")
def tiny(model_folder):
    return load_exact(str(model_folder))


@pytest.fixture(scope="module")
def query():
    first = reference_questions()[0]
    return DemoRequest("".join(first["chunks"]).rstrip(), first["question"], 0.15, "kv-deviation")


def visitor(address="1.2.3.4", session="a", **headers):
    return SimpleNamespace(headers=headers, client=SimpleNamespace(host=address), session_hash=session)


def test_compare_streams_three_answers_and_stores_pieces_once(bundled, store, query):
    states = list(compare(bundled, store, query, Limits()))
    pieces = len(documents_of(query.documents))
    said = [state.status for state in states]
    drawn = set()
    for state in states:
        drawn.update(panel.state for panel in state.panels)
    assert drawn == {"waiting", "writing", "done"}
    for number in range(pieces):
        assert f"{number} of {pieces} chunks stored …" in said
    last = states[-1]
    full, reuse, blend = last.panels
    assert f"{pieces} chunks were computed, 0 loaded." in last.status
    assert [panel.state for panel in last.panels] == ["done"] * 3
    assert full.text == blend.text == reference_questions()[0]["answer"] != reuse.text
    assert reuse.charged == 0.0 < blend.charged < 0.5
    chosen = sum(is_chosen for _, is_chosen in last.tokens)
    assert 0 < chosen < len(last.tokens)

    question = prepare(bundled, query, Limits())
    pipeline = Pipeline(bundled.model, bundled.tokenizer, store)
    answer = pipeline.answer(question.request, query.config(), 1)
    assert answer.report.computed_chunks == 0
    *_, second = compare(bundled, store, query, Limits())
    assert f"0 chunks were computed, {pieces} loaded." in second.status
    assert [panel.text for panel in second.panels] == [panel.text for panel in last.panels]


def test_selectors_that_are_offered_all_answer(bundled, store, query):
    assert "explicit" not in selectors()
    for name in selectors():
        request = replace(query, selector=name, recompute_ratio=0.1)
        *_, state = compare(bundled, store, request, Limits())
        assert state.panels[2].state == "done", name


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"documents": " \n "}, "there is no document"),
        ({"question": ""}, "there is no question"),
        ({"question": "x" * 501}, "501 letters"),
        ({"documents": "the captain\n" * 1600}, "tokens for this model"),
    ],
)
def test_prepare_refuses_what_is_missing_or_too_much(bundled, query, changes, words):
    with pytest.raises(PromptError, match=re.escape(words)):
        prepare(bundled, replace(query, **changes), Limits())


def test_prepare_allows_no_more_than_visitors_store_holds(tiny, query):
    limits = Limits(store_bytes=400 * tiny.token_bytes, new_tokens=2)
    line = "the harbour has a crane and a light"
    with pytest.raises(PromptError, match=r"and 378 fit: their KV takes .* kB a token"):
        prepare(tiny, replace(query, documents="\n".join([line] * 50)), limits)
    lines = [f"{line} {number}" for number in range(7)]
    fitting = DemoRequest("\n".join(lines), "Which harbour?")
    with ChunkStore.open("memory://", memory_bytes=limits.store_bytes) as store:
        list(compare(tiny, store, fitting, limits))
        pipeline = Pipeline(tiny.model, tiny.tokenizer, store)
        question = prepare(tiny, fitting, limits)
        answer = pipeline.answer(question.request, fitting.config(), 1)
    assert answer.report.computed_chunks == 0
    assert answer.report.notice == ""


def test_drawing_escapes_whatever_visitor_writes(tiny, store):
    request = DemoRequest(f"{HOSTILE}\n{HOSTILE}", HOSTILE)
    *_, state = compare(tiny, store, request, replace(Limits(), new_tokens=4))
    named = DemoState(state.panels, "", ((HOSTILE, True),), (Passage(HOSTILE, 0, 1),))
    parts = [*drawing.panels(state), drawing.marked(state), drawing.marked(named), drawing.status(HOSTILE)]
    for part in [*parts, drawing.panel(Panel(HOSTILE, "done", HOSTILE))]:
        assert not re.search("<script|<img|</textarea", part)
    assert drawing.marked(named).count("&lt;script&gt;") == 2


def test_visitors_admit_so_many_answers_minute():
    clock = iter([0.0, 1.0, 2.0, 59.0, 60.5])
    visitors = Visitors(Limits(answers_per_minute=2), now=clock.__next__)
    visitors.admit("a")
    visitors.admit("a")
    visitors.admit("b")
    with pytest.raises(PromptError, match=r"2 answers in the last minute.*in 1 seconds"):
        visitors.admit("a")
    visitors.admit("a")


def test_visitors_find_nothing_of_each_other(bundled, query):
    visitors = Visitors(Limits(visitors=2))
    list(compare(bundled, visitors.store("a"), query, visitors.limits))
    assert list(visitors.store("a").entries())
    assert not list(visitors.store("b").entries())
    assert visitors.store("a") is visitors.store("a")
    visitors.store("c")
    assert not list(visitors.store("b").entries())


@pytest.mark.usefixtures("small_smollm2")
def test_demo_opens_with_handbook_answered_and_its_store_shared():
    demo = page.Demo(load_exact())
    state = demo.opening()
    assert [panel.state for panel in state.panels] == ["done"] * 3
    assert [passage.name for passage in state.passages][:3] == ["Welcome to Tarn Hut", "Getting here", "The warden"]
    assert len(documents_of(handbook())) == len(state.passages) == 12
    entries = len(list(demo.visitors.store(PUBLIC).entries()))
    *_, second = demo.ask(visitor(), DemoRequest(handbook(), "Where do boots stay?"))
    assert "0 chunks were computed, 12 loaded." in second.status
    assert len(list(demo.visitors.store(PUBLIC).entries())) == entries
    assert not list(demo.visitors.store("a").entries())
    assert OPENING in page_questions()


def test_demo_turns_refusal_into_sentence(bundled, query):
    demo = page.Demo(bundled, Visitors(Limits(answers_per_minute=1)))
    *_, state = demo.ask(visitor(), replace(query, question=""))
    assert state.failed
    assert state.status.startswith("Sorry: there is no question")
    *_, state = demo.ask(visitor(), query)
    assert "last minute" in state.status
    *_, state = demo.ask(visitor("5.6.7.8"), query)
    assert state.panels[2].state == "done"


def test_visitor_of_believes_proxy_on_space_only(monkeypatch):
    request = visitor(**{"x-forwarded-for": "9.9.9.9, 10.0.0.1"})
    assert page.visitor_of(request) == "1.2.3.4"
    monkeypatch.setenv("SPACE_ID", "somebody/hf-blend")
    assert page.visitor_of(request) == "9.9.9.9"


def test_streamed_stops_answer_when_page_is_closed():
    numbers = itertools.count()
    ended = threading.Event()

    def run(tell):
        try:
            while True:
                tell(str(next(numbers)))
                time.sleep(0.001)
        finally:
            ended.set()

    stream = streamed(run)
    assert next(stream) == "0"
    stream.close()
    assert ended.wait(5)
