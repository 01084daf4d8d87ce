# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Served with others, a request gets the answer that it gets alone; the engine survives what befalls its requests."""

import importlib
import json
import random
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import asdict, replace

import psutil
import pytest
import torch
from transformers import GenerationConfig

from hf_blend import ChunkStore, observer
from hf_blend.config import BLIND_RATIO, BLIND_SELECTOR, BlendConfig
from hf_blend.errors import ConfigError, HfBlendError, StoreError, UnsupportedModelError
from hf_blend.model.fingerprint import fingerprint
from hf_blend.recipes import Recipe
from hf_blend.serving import prefills, refusals
from hf_blend.serving.paged import BlendedPagedCache
from tests.asking import noting, raising
from tests.conftest import slow_but
from tests.serving.processes import wait_for

RATIO = 0.3
FAMILIES = ("llama", "qwen3", "mistral")


@pytest.fixture
def model(shared_model):
    return shared_model("llama")


@pytest.fixture
def stored(model, bench, store):
    """A store that holds the library of requests."""
    store.add(model, None, bench.workload.library)
    return store


def check_all_returned(engine):
    """No block is held, no request is known but by figures, and the thread of the prefills does nothing."""
    wait_for(lambda: not engine.batch_processor.scheduler.active_requests, "the end of the last step")
    assert engine.paged.blocks_in_use == 0
    assert len(engine.prefills) == 0
    assert not engine.paged.blended
    assert not engine.prefills._reuse, "prompts and stores of requests that are over"
    json.dumps([asdict(one) for one in engine.prefills.outcomes.values()])  # no tensor in them


def serve_at_random(bench, model, store, asks, seed, pages=None, **settings):
    """Add requests with random pauses between them; the answers in order, and what became of each prefill."""
    pause = random.Random(seed)
    with bench.engine(model, store, pages, **settings) as engine:
        names = []
        for ask in asks:
            names.append(engine.add_request(ask.prompt))
            time.sleep(pause.choice([0, 0, 0.002, 0.02]))
        found = bench.collected(engine, names)
        check_all_returned(engine)
        return found, [engine.outcome(name) for name in names]


@pytest.mark.parametrize(
    ("family", "count"), slow_but(("qwen3", 10), among=[(name, count) for name in FAMILIES for count in (10, 200)])
)
def test_each_answer_is_that_of_a_lone_request_with_the_same_plan(family, count, shared_model, bench, store):
    model = shared_model(family, **bench.FAMILIES[family])
    store.add(model, None, bench.workload.library)
    asks = bench.workload.asks(count)
    answers, outcomes = serve_at_random(bench, model, store, asks, count, recompute_ratio=RATIO, stall_s=0.0)
    assert {outcome.how for outcome in outcomes} >= {"blended", "plain"}
    assert answers == bench.alone(model, store, asks, recompute_ratio=RATIO), "what was new is stored by now"


def test_answers_of_tenants_whose_requests_take_turns_are_those_of_lone_requests(model, bench):
    draw, names = random.Random(1), []
    with ExitStack() as stack:
        stores = [stack.enter_context(ChunkStore.open("memory://", namespace=name)) for name in "abc"]
        for one in stores:
            one.add(model, None, bench.workload.library)
        engine = stack.enter_context(bench.engine(model, stores[0], recompute_ratio=RATIO))
        rows = [(ask, draw.choice(stores)) for ask in bench.workload.asks(12)]
        for ask, of in rows:
            names.append(engine.add_request(ask.prompt, store=of))
        found = bench.collected(engine, names)
        check_all_returned(engine)
        assert found == [bench.lone_answer(model, of, ask.ids, recompute_ratio=RATIO) for ask, of in rows]


def test_the_model_is_left_as_it_was(model, bench, stored, untouched):
    with untouched(model), bench.engine(model, stored) as engine:
        bench.answers(engine, bench.workload.asks(3))


def test_a_block_that_holds_blended_kv_is_never_an_exact_prefix(model, bench, store):
    chunks = [*bench.workload.library[:2], bench.draw(9, 5)]
    store.add(model, None, chunks)
    long = generation = bench.generation(max_new_tokens=24, eos_token_id=None)
    ask = bench.Ask([1, *bench.draw(4, 7), *chunks[0], *chunks[1], *bench.draw(9, 3)])
    short = bench.Ask([1, 5, *chunks[2], 9, 9])  # ends within its first page, so that decoding fills it
    later = bench.Ask([1, *bench.draw(17, 11), *chunks[2], 9, 9])  # within its second, behind one that is exact
    with bench.engine(model, store, recompute_ratio=0.0, generation_config=long) as engine:
        blended = bench.answers(engine, [ask, short, later])
        follows = [ask, *(bench.Ask([*one.ids, *blended[n]]) for n, one in ((1, short), (2, later)))]  # begin with it
        plain = bench.answers(engine, follows, blend=False)
        found, outcome = bench.answer(engine, ask.ids)
        assert found == plain[0]
        assert outcome.reason.startswith("all chunks lie in an exact prefix")
    exact = model.generate_batch([one.ids for one in follows], generation, bench.batching(), warmup=False)
    assert plain == [output.generated_tokens for output in exact.values()]
    assert blended[0] != plain[0], "the blend at ratio 0 differs, or this test would see nothing"


def test_exact_prefixes_are_still_shared_between_plain_and_blended_requests(model, bench, stored):
    prefix = [1, *bench.draw(39, 7)]  # two pages and a half
    plain = bench.Ask([*prefix, *bench.draw(9, 3)])
    blended = bench.Ask([*prefix, *bench.workload.library[2], *bench.draw(8, 4)])
    with bench.engine(model, stored, recompute_ratio=RATIO) as engine:
        for first, second in ((plain, blended), (blended, plain)):
            engine.paged.evict_cached_blocks()
            bench.answers(engine, [first])
            before = set(engine.paged.allocator.ledger.block_to_hash)
            _, outcome = bench.answer(engine, second.ids)
            wait_for(lambda: not engine.batch_processor.scheduler.active_requests, "the end")
            assert before <= set(engine.paged.allocator.ledger.block_to_hash), "the first pages are the same blocks"
            assert outcome.prefix_tokens == (32 if second is plain else 0)


def test_the_next_turn_of_a_conversation_finds_the_blended_blocks_of_the_last(model, bench, stored):
    start = [1, *bench.draw(4, 7), *bench.workload.library[0], *bench.workload.library[3]]
    first = [*start, *bench.draw(20, 203)]  # not the beginning of a chunk in the library
    with bench.engine(model, stored, recompute_ratio=RATIO) as engine:
        second = [*first, *bench.answer(engine, first)[0], *bench.draw(7, 4)]
        found, outcome = bench.answer(engine, second)
        assert outcome.how == "shared"
        assert outcome.tokens >= (len(first) // 16) * 16
        check_all_returned(engine)
    assert found == bench.lone_answer(model, stored, second, recompute_ratio=RATIO)


@pytest.mark.parametrize("changed", ["ratio", "chunk", "salt", "namespace"])
def test_blended_blocks_are_shared_by_requests_with_the_same_chunks_settings_and_tenant_alone(
    changed, model, bench, stored, other
):
    library = bench.workload.library
    start = [1, *bench.draw(4, 7), *library[0]]
    ids = [*start, *library[3], *bench.draw(20, 3)]
    later = [*start, *library[4], *bench.draw(20, 3)] if changed == "chunk" else ids
    given = {"salt": {"salt": (5, 6, 7)}, "namespace": {"store": other}}.get(changed, {})
    other.add(model, None, library)
    with bench.engine(model, stored, recompute_ratio=RATIO) as engine:
        bench.answer(engine, ids)
        if changed == "ratio":
            blender = engine.prefills._blender
            blender._config = blender._config.from_dict({"recompute_ratio": 0.5})
        outcomes = [bench.answer(engine, later, **given)[1].how for _ in range(2)]
    assert outcomes == ["blended", "shared"]


@pytest.mark.parametrize("blend", [True, False])
def test_salted_requests_do_not_share_exact_prefixes_with_others(blend, model, bench, store):
    ids = [1, *bench.draw(60, 3)]
    with bench.engine(model, store) as engine:
        salts = ((), (5, 6), (5, 6), (5, 7))
        matched = [bench.answer(engine, ids, salt=salt, blend=blend)[1].prefix_tokens for salt in salts]
    assert matched == [0, 0, 48, 0]


def test_the_exact_prefix_of_a_salted_blend_is_found_behind_its_own_salt_alone(model, bench, stored):
    start = [1, *bench.draw(40, 7)]
    blended, plain = [*start, *bench.workload.library[0], *bench.draw(9, 3)], [*start, *bench.draw(9, 4)]
    with bench.engine(model, stored, recompute_ratio=RATIO) as engine:
        assert bench.answer(engine, blended, salt=(5, 6))[1].how == "blended"
        salts = ((), (5, 7), (5, 6))
        matched = [bench.answer(engine, plain, salt=salt, blend=False)[1].prefix_tokens for salt in salts]
    assert matched == [0, 0, 32], "the blocks before the one in which the chunk begins"


def test_an_engine_takes_the_recipe_of_its_model_where_that_asks_no_question(model, bench, store):
    asking = Recipe({"selector": "query-attention", "recompute_ratio": 0.4}, "tuned")
    store.recipes.put(fingerprint(model), asking)
    assert bench.engine(model, store).blend_config == BlendConfig(BLIND_RATIO, BLIND_SELECTOR)
    store.recipes.put(fingerprint(model), replace(asking, blind_settings={"selector": "none"}))
    assert bench.engine(model, store).blend_config == BlendConfig(BLIND_RATIO, "none")


def test_a_prefill_is_cut_into_turns_and_those_that_decode_go_on_between_them(tiny_model, bench, store):
    model = tiny_model("llama", num_hidden_layers=8)
    store.add(model, None, bench.workload.library)
    long = bench.Ask([1, *(token for chunk in bench.workload.library for token in chunk), *bench.draw(5, 3)])
    slow = bench.generation(max_new_tokens=60)
    with bench.engine(model, store, stall_s=0.0, recompute_ratio=RATIO, generation_config=slow) as engine:
        reader = engine.add_request([1, *bench.draw(9, 3)], streaming=True, blend=False)
        assert engine.get_result(timeout=30).request_id == reader
        name, between = engine.add_request(long.ids), 0
        while engine.outcome(name) is None or engine.outcome(name).how == "waiting":
            between += engine.get_result(timeout=30).request_id == reader
        bench.collect(engine, [name])
    assert between >= 8 + 8, "one token behind each layer, and behind each copy of its K and V"


def test_chunks_that_several_waiting_requests_bring_are_computed_once(model, bench, store):
    asks, chunks = [], [bench.draw(20, 1), bench.draw(30, 2)]
    for number in range(6):
        first, second = ordered = chunks[:: 1 - number % 2 * 2]
        asks.append(bench.Ask([1, 7, 8, *first, *second, *bench.draw(6, number)], ordered))
    with bench.engine(model, store, recompute_ratio=RATIO) as engine:
        names = [engine.add_request(ask.prompt) for ask in asks]
        answers = bench.collected(engine, names)
        computed = [engine.outcome(name).computed_chunks for name in names]
    assert computed == [3, 0, 0, 0, 0, 0], "two chunks and what is before them"
    assert answers == bench.alone(model, store, asks, recompute_ratio=RATIO)


def read_later(store, monkeypatch, happened):
    """Have no chunk read before something has happened: blends wait for it, without the model."""
    ready = []
    noting(monkeypatch, store, "get", lambda *_: ready or ready.append(wait_for(happened, "what blends wait for")))


def test_a_request_with_nothing_to_blend_is_answered_before_blends_that_came_earlier(
    model, bench, stored, monkeypatch
):
    long = [1, *bench.workload.library[0], *bench.workload.library[1]]
    with bench.engine(model, stored, recompute_ratio=RATIO) as engine:
        read_later(stored, monkeypatch, lambda: engine.outcome("short") and engine.outcome("short").how == "plain")
        names = [engine.add_request([*long, *bench.draw(5, n)]) for n in range(3)]
        bench.answer(engine, [1, *bench.draw(9, 3)], "short")
        bench.collected(engine, names)
        assert engine.prefills.failures == 0


def test_tenants_are_blended_in_turn(model, bench, store, other, monkeypatch):
    names = ["a1", "a2", "a3", "b1", "b2"]
    with bench.engine(model, store, recompute_ratio=RATIO) as engine:
        read_later(store, monkeypatch, lambda: len(engine.prefills.outcomes) == len(names))
        for number, name in enumerate(names):
            chunks = [bench.draw(20, 50 + number)]
            ask = bench.Ask([1, 7, *chunks[0], 9, 9], chunks)
            engine.add_request(ask.prompt, name, store=store if name[0] == "a" else other)
        bench.collect(engine, names)
        begun = sorted(names, key=lambda name: engine.outcome(name).begun)
    assert begun == ["a1", "b1", "a2", "b2", "a3"]


def test_long_prompts_of_tenants_take_turns_in_the_steps_and_those_that_decode_are_in_each(model, bench, store, other):
    are_all_here, firsts, seen = threading.Event(), [], []
    names, slow = ["a0", "a1", "a2", "a3", "b"], bench.generation(max_new_tokens=60, eos_token_id=-1)
    with bench.engine(model, store, {"max_batch_tokens": 32}, generation_config=slow) as engine:
        engine.add_request([1, *bench.draw(9, 3)], "reader", streaming=True, blend=False)
        assert engine.get_result(timeout=30).request_id == "reader"
        wait = observer(lambda *_: are_all_here.wait(30) and None)
        handle = model.model.layers[0].register_forward_pre_hook(wait)
        for number, name in enumerate(names):
            of = {"store": other if name == "b" else store, "streaming": True, "max_new_tokens": 1}
            engine.add_request([1, *bench.draw(49, number)], name, blend=False, **of)
        are_all_here.set()
        while len(firsts) < len(names):
            seen.append(engine.get_result(timeout=30).request_id)
            firsts += [seen[-1]] if seen[-1] in names else []
        handle.remove()
        engine.cancel_request("reader")
    assert firsts.index("b") <= 1
    assert [name for name in firsts if name != "b"] == names[:4]
    assert seen[: seen.index("a1")].count("reader") >= 4, "a prompt of 50 tokens takes two steps of it"


@pytest.mark.parametrize("new", [1, 4])
def test_the_first_token_of_a_blended_request_comes_from_its_blend_and_takes_no_step(new, model, bench, stored):
    ids = [1, *bench.workload.library[0], *bench.workload.library[3], *bench.draw(6, 70)]
    with bench.engine(model, stored, recompute_ratio=RATIO) as engine:
        found, outcome = bench.answer(engine, ids, "one", new)
        check_all_returned(engine)
        wait_for(lambda: engine.current_batch == new - 1, "the count of steps")
    assert (outcome.how, outcome.tokens) == ("blended", len(ids))
    assert found == bench.lone_answer(model, stored, ids, new=new, recompute_ratio=RATIO)


@pytest.mark.parametrize(("selector", "is_shared"), [("boundary", True), ("query-attention", False)])
def test_requests_with_the_same_chunks_are_blended_once_while_the_first_is_there_unless_the_question_selects(
    selector, is_shared, model, bench, stored, monkeypatch
):
    start = [1, *bench.draw(4, 7), *bench.workload.library[0], *bench.workload.library[3]]
    assert len(start) % 16, "the last chunk ends within a page"
    asks = [bench.Ask([*start, *bench.draw(5 + n, 70 + n)]) for n in range(4)]
    long = bench.generation(max_new_tokens=60)
    settings = {"recompute_ratio": RATIO, "selector": selector}
    with bench.engine(model, stored, generation_config=long, **settings) as engine:
        if is_shared:
            read_later(stored, monkeypatch, lambda: len(engine.prefills) == len(asks))
        found = bench.answers(engine, asks)
        outcomes = [*engine.prefills.outcomes.values()]
        check_all_returned(engine)
        assert not engine.paged.tails
    assert [outcome.how for outcome in outcomes] == ["blended", *(["shared" if is_shared else "blended"] * 3)]
    if is_shared:
        assert [outcome.tokens for outcome in outcomes[1:]] == [len(start)] * 3
    assert found == bench.alone(model, stored, asks, new=60, **settings)


def test_a_blend_computes_between_two_steps_alone(model, bench, store):
    """During a step the model's config says is_causal=False: masks would be others."""
    seen, chunks = [], [bench.draw(20, 1), bench.draw(30, 2)]
    slow = bench.generation(max_new_tokens=60, eos_token_id=-1)
    hook = lambda *_: seen.append((threading.current_thread().name, vars(model.config).get("is_causal")))  # noqa: E731
    with bench.engine(model, store, recompute_ratio=RATIO, generation_config=slow, stall_s=0.0) as engine:
        for layer in model.model.layers:
            layer.register_forward_pre_hook(observer(hook))
        reader = engine.add_request([1, *bench.draw(9, 3)], streaming=True, blend=False)
        assert engine.get_result(timeout=30).request_id == reader
        asked = bench.Ask([1, 7, 8, *chunks[0], *chunks[1], 9, 9], chunks)
        bench.collect(engine, [reader, engine.add_request(asked.prompt)])
    of_blends = [causal for name, causal in seen if name == "hf_blend-prefill"]
    assert len(of_blends) >= 4 * len(model.model.layers), "two chunks and what is before them, the prompt"
    assert {*of_blends} == {None}
    assert {causal for name, causal in seen if name != "hf_blend-prefill"} == {False}


def test_a_name_is_refused_while_a_request_has_it_and_free_when_that_is_over(model, bench, store):
    asks = [[1, *chunk, 5, 6] for chunk in bench.workload.library[:2]]
    store.add(model, None, bench.workload.library[:2])
    long = bench.generation(max_new_tokens=60, eos_token_id=-1)
    with bench.engine(model, store, recompute_ratio=RATIO, generation_config=long) as engine:
        for blend in (True, False):
            engine.add_request(asks[0], "mine", blend=blend)
            for settings in ({}, {"blend": False}):
                with pytest.raises(ConfigError, match="there is a request 'mine' already"):
                    engine.add_request(asks[1], "mine", **settings)
            (answer,) = bench.collected(engine, ["mine"])
            kept = store if blend else ChunkStore.open("memory://")
            alone = bench.lone_answer(model, kept, asks[0], new=60, recompute_ratio=RATIO)  # ends at an end token
            assert answer[: len(alone)] == alone
        check_all_returned(engine)


def test_a_transformers_without_cache_allocators_is_refused_by_name(monkeypatch):
    missing = "transformers.generation.continuous_batching.cache_allocators"
    for name in (missing, f"{missing}.cache_allocator"):
        monkeypatch.setitem(sys.modules, name, None)
    for name in [name for name in sys.modules if name.startswith("hf_blend.serving.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(UnsupportedModelError, match=r"transformers .* lacks .*cache_allocators"):
        importlib.import_module("hf_blend.serving.engine")


@pytest.mark.parametrize("when", ["waiting", "planning", "in a layer", "decoding"])
def test_a_cancelled_request_leaves_nothing_behind_and_others_go_on(when, model, bench, stored, monkeypatch):
    asks = [bench.Ask([1, *bench.workload.library[n], *bench.draw(6, n)]) for n in range(3)]
    cancelled = threading.Event()

    def cancel_now(engine, is_meant=True):
        if is_meant:
            engine.cancel_request("victim")
            cancelled.set()

    with bench.engine(model, stored, stall_s=0.0, recompute_ratio=RATIO) as engine:
        if when == "planning":
            of_ids = lambda identity, sink, ids: cancel_now(engine, ids[-6:] == asks[0].ids[-6:])  # noqa: E731
            noting(monkeypatch, stored, "find", of_ids)
        if when == "in a layer":
            of_name = lambda request, _: cancel_now(engine, request.state.request_id == "victim")  # noqa: E731
            noting(monkeypatch, engine.prefills._blender, "_blend", of_name)
        names = [engine.add_request(ask.ids, f"other {n}") for n, ask in enumerate(asks[1:])]
        settings = {"max_new_tokens": 200} if when == "decoding" else {}
        engine.add_request(asks[0].ids, "victim", streaming=True, **settings)
        if when == "waiting":
            cancel_now(engine)
        if when == "decoding":
            while engine.get_result(timeout=30).request_id != "victim":
                pass
            cancel_now(engine)
            names = [engine.add_request(ask.ids, f"later {n}") for n, ask in enumerate(asks[1:])]
        found = bench.collected(engine, names)
        assert cancelled.wait(30)
        wait_for(lambda: not engine.prefills.turns.is_busy, "the end of the prefill")
        wait_for(lambda: not engine.batch_processor.has_pending_requests(), "the end of all")
        check_all_returned(engine)
        assert "victim" not in engine.prefills._reuse
    assert found == bench.alone(model, stored, asks[1:], recompute_ratio=RATIO)


def test_blocks_of_a_prompt_whose_chunk_is_evicted_meanwhile_serve_no_other(model, bench, store, monkeypatch):
    chunks = bench.workload.library[1:3]
    ids = [1, *bench.draw(4, 7), *chunks[0], *chunks[1], *bench.draw(20, 3)]
    keys = store.add(model, None, chunks)
    alone = bench.lone_answer(model, store, ids, recompute_ratio=0.0)
    with bench.engine(model, store, {"page_size": 4}, recompute_ratio=0.0) as engine:
        with monkeypatch.context() as patch:
            noting(patch, engine.prefills._blender, "_blend", lambda *_: store.delete(keys[1]))
            bench.answers(engine, [bench.Ask(ids)])
        store.add(model, None, chunks)
        found, outcome = bench.answer(engine, ids)
        assert found == alone
        assert outcome.how == "blended", "not shared with what was blended of one chunk"


def test_blocks_of_a_blend_whose_first_token_cannot_be_drawn_serve_no_other(model, bench, stored, monkeypatch):
    ids = [1, *bench.draw(4, 7), *bench.workload.library[0], *bench.workload.library[3], *bench.draw(9, 3)]
    with bench.engine(model, stored, recompute_ratio=RATIO) as engine:
        draw, failures = engine._draw, [RuntimeError("no token")]
        monkeypatch.setattr(engine, "_draw", lambda *given: raising(failures.pop())() if failures else draw(*given))
        answers = [bench.answer(engine, ids) for _ in range(2)]
    assert [outcome.how for _, outcome in answers] == ["plain", "blended"]
    assert answers[1][0] == bench.lone_answer(model, stored, ids, recompute_ratio=RATIO)


def test_an_engine_whose_requests_were_all_cancelled_for_want_of_blocks_lets_new_ones_in(model, bench, stored):
    with bench.engine(model, stored) as engine:
        engine.batch_processor.scheduler.block_new_requests = True  # as `offload_requests` leaves it
        assert bench.answers(engine, bench.workload.asks(1))[0]
        check_all_returned(engine)


def test_an_engine_survives_any_number_of_requests_that_each_break_their_step(model, bench, stored, monkeypatch):
    asks = [bench.Ask([1, *bench.workload.library[n], *bench.draw(6, n)]) for n in range(3)]
    with bench.engine(model, stored, recompute_ratio=RATIO) as engine:
        scheduler, added, together = engine.batch_processor.scheduler, threading.Event(), []

        def fail_with_poison():
            added.wait(30)
            together.append(len(scheduler.in_step))
            if any(one.state.request_id.startswith("poison") for one in scheduler.in_step):
                raise AssertionError("not mine")

        noting(monkeypatch, engine, "_generation_step", fail_with_poison)
        bad = [engine.add_request([1, 5, 6, 7, n], f"poison {n}", blend=False) for n in range(3)]
        good = [engine.add_request(ask.ids) for ask in asks]
        bad += [engine.add_request([1, 5, 6, 7, n], f"poison {n}", blend=False) for n in range(3, 9)]
        added.set()
        found = bench.collect(engine, [*bad, *good])
        assert max(together) > 4, "they shared a step, or this test would see nothing"
        assert {found[name].error for name in bad} == {"not mine"}
        alone = bench.alone(model, stored, asks, recompute_ratio=RATIO)
        assert [found[name].generated_tokens for name in good] == alone
        wait_for(lambda: not engine.output_router.result_handlers, "the engine's own request")
        check_all_returned(engine)
        assert not scheduler.suspects


@pytest.mark.parametrize("step", [64, 8])
def test_a_request_whose_logits_are_no_numbers_fails_alone(step, tiny_model, bench, store):
    model = tiny_model("llama")
    ids = [[1, *(token % 120 for token in bench.draw(19, n))] for n in range(3)]
    stock = model.generate_batch(ids, bench.generation(), bench.batching(), warmup=False)
    assert not any(127 in one.generated_tokens for one in stock.values())
    model.get_input_embeddings().weight.data[127] = torch.nan  # a token that nobody else has
    with bench.engine(model, store, {"max_batch_tokens": step}, allow_unverified=True) as engine:
        good = [engine.add_request(ids[0]), engine.add_request(ids[1])]
        bad = engine.add_request([1, 127, *bench.draw(30, 8)])
        good.append(engine.add_request(ids[2]))
        found = bench.collect(engine, [*good, bad])
        assert found[bad].error == "the model's logits are not finite"
        assert [found[name].generated_tokens for name in good] == [one.generated_tokens for one in stock.values()]
        check_all_returned(engine)


class Odd(Exception):
    """Of some library."""


FAULTS = {"find": SystemExit, "_spans": ImportError, "fingerprint": AssertionError, "_blend": StoreError}


@pytest.mark.parametrize(("where", "kind"), [*FAULTS.items(), ("_blend", Odd)])
# in the store, the thread of look-ups, the engine's thread, a blend
def test_a_prefill_may_fail_anywhere_with_whatever_it_likes_and_is_computed_in_full(
    where, kind, model, bench, stored, monkeypatch, caplog
):
    asks, broken = [[1, *bench.workload.library[n], *bench.draw(6, n)] for n in range(2)], []
    stock = model.generate_batch(asks[:1], bench.generation(), bench.batching(), warmup=False)
    with bench.engine(model, stored, recompute_ratio=RATIO) as engine:

        def fail(*_):
            if not broken:
                broken.append(True)
                raise kind("what no list foresees")

        owner = {"find": stored, "fingerprint": prefills}.get(where, engine.prefills._blender)
        noting(monkeypatch, owner, where, fail)
        names = [engine.add_request(asks[0])]
        wait_for(lambda: broken, "the failure")
        names.append(engine.add_request(asks[1]))
        found = bench.collected(engine, names)
        outcomes = [engine.outcome(name) for name in names]
        check_all_returned(engine)
        assert engine.prefills.failures == 1
    assert [outcome.how for outcome in outcomes] == ["plain", "blended"]
    assert outcomes[0].reason == f"{kind.__name__}: what no list foresees"
    assert f"is computed in full: {kind.__name__}" in caplog.text
    assert found[0] == next(iter(stock.values())).generated_tokens
    monkeypatch.undo()
    assert found[1] == bench.lone_answer(model, stored, asks[1], recompute_ratio=RATIO)


def test_a_prefill_that_hangs_is_seen(model, bench, store, monkeypatch):
    goes_on = threading.Event()
    noting(monkeypatch, store, "find", lambda *_: goes_on.wait(30))
    with bench.engine(model, store) as engine:
        bench.answers(engine, [bench.Ask([1, 5, 6])], blend=False)
        assert engine.stuck_s == 0.0
        name = engine.add_request([1, 5, 6, 7])
        wait_for(lambda: engine.stuck_s > 0.3, "a hanging prefill")
        goes_on.set()
        bench.collect(engine, [name])
        assert engine.stuck_s == 0.0


def test_the_blocks_of_an_engine_take_no_memory_before_they_are_used(model, bench, store):
    own = psutil.Process()
    with bench.engine(model, store, {"num_blocks": 40_000}) as engine:
        planned, before = engine.paged.cache_tensor.nbytes, own.memory_info().rss
        bench.answers(engine, [bench.Ask([1, 5, 6, 7])])
        taken = own.memory_info().rss - before
        mapped = [row for row in own.memory_maps(grouped=False) if row.size >= planned]
        assert min(row.rss for row in mapped) < planned / 10
    assert planned > 300e6
    assert taken < planned / 10


def test_each_name_of_transformers_that_is_gone_is_refused_before_anything_runs(model, bench, store, monkeypatch):
    removed, names = 0, [(name, part) for name, parts in refusals.NAMES.items() for part in parts.split() or [""]]
    for name, part in names:
        module, _, owner = name.rpartition(".")
        home = importlib.import_module(f"{refusals.PACKAGE}.{module}")
        where = home if not part else next((one for one in getattr(home, owner).__mro__ if part in vars(one)), None)
        if where is None or not callable(getattr(where, part or owner)):
            continue  # an attribute of instances
        with monkeypatch.context() as patch:
            patch.delattr(where, part or owner)
            with pytest.raises(UnsupportedModelError, match=f"lacks .*{part or owner}"):
                bench.engine(model, store) if part == "_process_candidates" else refusals.check_names()
        removed += 1
    assert removed > 30


def test_an_engine_whose_every_step_fails_ends(model, bench, store, monkeypatch):
    engine = bench.engine(model, store)
    monkeypatch.setattr(engine, "_generation_step", raising(RuntimeError("broken for good")))
    with engine:
        with pytest.raises(ConfigError, match="not running"):  # noqa: PT012
            while True:
                engine.add_request([1, 5, 6, 7])
                wait_for(lambda: engine.get_result(timeout=0.05) or not engine.is_running(), "an error")
        assert not engine.is_running()


def test_requests_that_the_engine_puts_back_for_want_of_blocks_are_blended_again(model, bench, stored, monkeypatch):
    asks = [
        bench.Ask([1, *bench.workload.library[n], *bench.workload.library[n + 1], *bench.draw(5, n)]) for n in range(4)
    ]
    long = bench.generation(max_new_tokens=40)
    put_back, few = [], {"num_blocks": 14, "safety_margin": 0.0}
    with bench.engine(model, stored, few, recompute_ratio=RATIO, generation_config=long) as engine:
        of_engine = type(engine.batch_processor.scheduler)
        noting(monkeypatch, of_engine, "add_waiting_request", lambda _, state: put_back.append(state.request_id))
        found = bench.answers(engine, asks)
        check_all_returned(engine)
    assert len(put_back) > len(asks), "blocks were scarce, or this test would see nothing"
    assert found == bench.alone(model, stored, asks, new=40, recompute_ratio=RATIO)


EAGER = {"attn_implementation": "eager"}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
REFUSED = {
    "eager": (EAGER, {}, {}, UnsupportedModelError, "attends by 'eager'.*attn_implementation='sdpa'"),
    "window": ({"sliding_window": 8}, {}, {}, UnsupportedModelError, "a window of 8"),
    "dynamic": ({"rope_parameters": DYNAMIC}, {}, {}, UnsupportedModelError, "rope_type='dynamic'"),
    "kv_bits": ({}, {"kv_bits": 8}, {}, ConfigError, "kv_bits=8"),
    "kv_device_map": ({}, {"kv_device_map": {0: "cpu"}}, {}, ConfigError, "kv_device_map="),
    "scheduler": ({}, {}, {"scheduler_type": "prefill_first"}, ConfigError, "scheduler_type='prefill_first'"),
    "sharing": ({}, {}, {"allow_block_sharing": False}, ConfigError, "allow_block_sharing=False"),
    "async": ({}, {}, {"use_async_batching": True}, ConfigError, "use_async_batching=True"),
    "graph": ({}, {}, {"use_cuda_graph": True}, ConfigError, "use_cuda_graph=True"),
    "swap": ({}, {}, {"cpu_offload_space": 1.0}, ConfigError, "cpu_offload_space=1.0"),
    "fast path": ({}, {}, {"max_blocks_per_request": 8}, ConfigError, "max_blocks_per_request=8.*decode fast path"),
    "blocks": ({}, {}, {"num_blocks": 0}, ConfigError, "num_blocks=0.*a number from 1 on"),
    "part of a block": ({}, {}, {"num_blocks": 2.5}, ConfigError, "num_blocks=2.5"),
    "end": ({}, {"generation_config": GenerationConfig(eos_token_id=[2, 2.5])}, {}, ConfigError, "eos_token_id=.*2.5"),
    "stall": ({}, {"stall_s": -1.0}, {}, ConfigError, "stall_s=-1.0"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_served_is_refused_by_name(what, tiny_model, bench, store, untouched):
    of_model, settings, pages, kind, words = REFUSED[what]
    model = tiny_model("mistral" if "sliding_window" in of_model else "llama", **of_model)
    with untouched(model), pytest.raises(kind, match=words):
        bench.engine(model, store, pages, **settings)


def test_an_engine_for_which_no_number_of_blocks_fits_says_that_none_was_given(model, bench, store, monkeypatch):
    fail = raising(ValueError("Invalid values: num_sectors = -3"))
    monkeypatch.setattr(BlendedPagedCache, "__init__", fail)
    with pytest.raises(ConfigError, match=r"num_blocks=None came.*num_sectors = -3 Pass num_blocks"):
        bench.engine(model, store, {"num_blocks": None}).start()
    with pytest.raises(ValueError, match="Invalid values"):
        bench.engine(model, store).start()


def test_a_request_that_makes_no_sense_is_refused_before_it_reaches_the_engine_and_leaves_nothing(model, bench, store):
    long, short = bench.draw(500, 0), [1, 5, 6, 7]
    rows = [([], {"max_new_tokens": 4}, "0 tokens"), (long, {"max_new_tokens": 40}, "512 positions")]
    rows += [(long[:300], {"max_new_tokens": 20}, "256 tokens of cache"), (short, {"temprature": 1}, "temprature")]
    rows += [(short, {"max_new_tokens": new}, "expected a whole number from 1 on") for new in (0, -3, 2.5)]
    with bench.engine(model, store, {"num_blocks": 16}) as engine:
        for tokens, settings, words in [*rows, (short, {"eos_token_id": "x"}, "eos_token_id='x'")]:
            with pytest.raises(HfBlendError, match=words):
                engine.add_request(tokens, "mine", **settings)
        assert bench.answers(engine, [bench.Ask(short)], request_id="mine")
        check_all_returned(engine)
