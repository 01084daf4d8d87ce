# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""An idle engine heals the conversations that it has blended: their next turns are those of stock generate."""

from types import SimpleNamespace

import httpx
import pytest
import torch
from transformers import DynamicCache
from worlds import reference_questions

from hf_blend.errors import ConfigError
from hf_blend.serving.healing import HEALING, MOST_CONVERSATIONS, MOST_TOKENS, Conversation, Healing, Step
from tests.asking import raising
from tests.serving.processes import metrics, running, wait_for

PAGE = 16
NEW = 24


@pytest.fixture
def model(shared_model):
    return shared_model("llama")


@pytest.fixture
def first(model, bench, store):
    """The first turn of a conversation: two chunks that are stored, and a question."""
    store.add(model, None, bench.workload.library[2:4])
    return [1, *bench.draw(19, 7), *bench.workload.library[2], *bench.workload.library[3], *bench.draw(20, 203)]


def healer(bench, model, store, pages=None, **settings):
    """An engine that reuses all of its chunks' K and V: its blends are far from exact."""
    given = {"heal": True, "recompute_ratio": 0.0, **settings}
    return bench.engine(model, store, pages, generation_config=bench.generation(max_new_tokens=NEW), **given)


def steps_of(engine, monkeypatch):
    """The names of the requests in each step that runs from now on."""
    steps, run = [], engine._generation_step

    def step():
        steps.append([request.state.request_id for request in engine.batch_processor.scheduler.in_step])
        run()

    monkeypatch.setattr(engine, "_generation_step", step)
    return steps


def wait_until_healed(engine):
    """Wait until there is nothing to heal."""

    def is_healed():
        rows = engine.healing._conversations
        is_idle = not engine.batch_processor.scheduler.has_pending_requests()
        return is_idle and all(row.is_healed for row in rows)

    wait_for(is_healed, "the end of healing")


def stock_answer(model, bench, ids):
    """The answer of stock generate."""
    output = model.generate(torch.tensor([ids]), generation_config=bench.generation(max_new_tokens=NEW))
    return output[0, len(ids) :].tolist()


def test_the_next_turn_of_a_healed_conversation_is_that_of_stock_generate(model, bench, store, first):
    answers, outcomes = [], []
    for heal in (False, True):
        with healer(bench, model, store, heal=heal) as engine:
            answer, outcome = bench.answer(engine, first)
            assert outcome.how == "blended"
            conversation = [*first, *answer]
            second = [*conversation, *bench.draw(7, 4)]
            if heal:
                wait_until_healed(engine)
                whole = len(conversation) // PAGE * PAGE
                assert engine.healing.tokens == whole - 16, "the page before the first chunk was exact"
                assert not engine.paged.blocks_in_use
                check_blocks_are_exact(engine, model, conversation[:whole])
            found, outcome = bench.answer(engine, second)
            answers.append(found)
            outcomes.append((outcome.how, outcome.prefix_tokens))
    assert outcomes == [("shared", 0), ("plain", whole)]
    assert answers[1] == stock_answer(model, bench, second)
    assert answers[0] != answers[1], "blended blocks give another answer, or this test would see nothing"


def check_blocks_are_exact(engine, model, ids):
    """The K and V that a prompt finds in blocks are those of a full prefill by stock transformers."""
    page, allocator = engine.paged.page, engine.paged.allocator
    blocks = allocator.match_prefix_blocks([*ids, 0])
    assert len(blocks) * page == len(ids)
    allocator.block_table["check"] = blocks
    rows = engine.paged.rows_of("check", len(ids))
    del allocator.block_table["check"]
    exact = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.tensor([ids]), past_key_values=exact)
    for index, layer in enumerate(exact.layers):
        keys, values = (blocks[rows].transpose(0, 1) for blocks in engine.paged.rows(index))
        torch.testing.assert_close(keys, layer.keys[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(values, layer.values[0], atol=1e-5, rtol=1e-5)


def test_blended_blocks_make_room_when_their_conversation_is_healed(model, bench, store, first):
    with healer(bench, model, store) as engine:
        bench.answer(engine, first)
        wait_until_healed(engine)
        ledger = engine.paged.allocator.ledger
        healed = engine.paged.allocator.match_prefix_blocks([*engine.healing._conversations[0].ids, 0])
        assert set(ledger.cached_blocks) == set(ledger.block_to_hash) == set(healed)


@pytest.mark.parametrize("is_blended", [False, True])
def test_a_request_that_comes_during_healing_waits_for_one_step(is_blended, model, bench, store, first, monkeypatch):
    other = [1, *bench.draw(9, 5), *(bench.workload.library[3] if is_blended else []), *bench.draw(9, 6)]
    names, begin = [], Healing.begin

    def begin_and_ask(self, step):
        state = begin(self, step)
        if step.stop > 64 and not names:  # the step is chosen, and runs next
            names.append(engine.add_request(other, streaming=False))
        return state

    monkeypatch.setattr(Healing, "begin", begin_and_ask)
    with healer(bench, model, store, {"max_batch_tokens": 32}) as engine:
        steps = steps_of(engine, monkeypatch)
        conversation = [*first, *bench.answer(engine, first)[0]]
        wait_for(lambda: names, "a step of healing")
        bench.collected(engine, names)
        wait_until_healed(engine)
        start = next(index for index, step in enumerate(steps) if names[0] in step)
        end = max(index for index, step in enumerate(steps) if names[0] in step)
        before = [step for step in steps[:start] if HEALING in step]
        assert HEALING in steps[start - 1]
        assert len(before) == 2, "one up to token 48, and the one that was chosen"
        assert not any(HEALING in step for step in steps[start : end + 1])
        assert any(HEALING in step for step in steps[end:]), "it goes on when the engine is idle"
        assert all(step == [HEALING] for step in steps if HEALING in step), "nobody shares a step with it"
        check_blocks_are_exact(engine, model, conversation[: len(conversation) // PAGE * PAGE])
        assert engine.outcome(names[0]).how == ("blended" if is_blended else "plain")


def test_the_oldest_conversation_is_healed_first(model, bench, store, first, monkeypatch):
    later = [*first[:-1], 9]
    with healer(bench, model, store) as engine:
        order, begin = [], engine.healing.begin
        monkeypatch.setattr(engine.healing, "begin", lambda step: (order.append(step.conversation), begin(step))[1])
        bench.collected(engine, [engine.add_request(ids) for ids in (first, later)])
        wait_until_healed(engine)
    assert list(dict.fromkeys(row.ids[: len(first)] for row in order)) == [tuple(first), tuple(later)]


def test_a_healed_prefix_is_found_behind_its_own_salt_and_by_plain_requests_too(model, bench, store, first):
    plain = [*first, 9, 9]
    with healer(bench, model, store) as engine:
        bench.answer(engine, first, salt=(5, 6))
        wait_until_healed(engine)
        salts = ((), (5, 7), (5, 6))
        matched = [bench.answer(engine, plain, salt=salt, blend=False)[1].prefix_tokens for salt in salts]
    assert matched == [0, 0, len(plain) // PAGE * PAGE]


def test_a_turn_of_another_tenant_with_the_same_ids_counts_as_no_next_turn(model, bench, store, other, first):
    other.add(model, None, bench.workload.library[2:4])
    with healer(bench, model, store) as engine:
        second = [*first, *bench.answer(engine, first, salt=(5, 6))[0], *bench.draw(7, 4)]
        wait_until_healed(engine)
        assert bench.answer(engine, second, salt=(5, 7), store=other)[1].how == "blended"
        assert engine.healing.next_turns == 0
        wait_until_healed(engine)
        bench.answer(engine, second, salt=(5, 6))
        assert (engine.healing.next_turns, engine.healing.healed_turns) == (1, 1)


def test_a_next_turn_that_comes_before_its_conversation_is_healed_counts_as_blended(model, bench, store, first):
    with healer(bench, model, store) as engine:
        engine.healing.next_step = lambda: None
        second = [*first, *bench.answer(engine, first)[0], *bench.draw(7, 4)]
        bench.answer(engine, second)
        assert (engine.healing.next_turns, engine.healing.healed_turns) == (1, 0)


def test_no_step_begins_while_a_pause_is_asked_for(model, bench, store, first):
    with healer(bench, model, store) as engine:
        engine.healing.next_step = lambda: None
        bench.answer(engine, first)
        with engine.pause():
            del engine.healing.next_step
            engine._begin_healing(engine.batch_processor.scheduler)
            assert not engine.healing.is_running
        wait_until_healed(engine)
        assert engine.healing.tokens


def test_no_step_begins_that_was_chosen_for_another_model(tiny_model, bench, store, first, monkeypatch):
    model = tiny_model("llama")
    store.add(model, None, bench.workload.library[2:4])
    with healer(bench, model, store) as engine:
        steps, chosen, next_step = steps_of(engine, monkeypatch), [], engine.healing.next_step

        def change_model():
            if (step := next_step()) is not None:
                chosen.append(step)
                with torch.no_grad():
                    model.get_input_embeddings().weight.mul_(1.5)
            return step

        engine.healing.next_step = change_model
        bench.answer(engine, first)
        wait_for(lambda: chosen, "a step")
        bench.answer(engine, [1, 5, 6], blend=False)
        assert not any(HEALING in step for step in steps)
        assert len(chosen) == 1


def test_nothing_is_healed_without_the_option(model, bench, store, first, monkeypatch):
    with healer(bench, model, store, heal=False) as engine:
        steps = steps_of(engine, monkeypatch)
        bench.answer(engine, first)
        bench.answer(engine, [1, 5, 6], blend=False)
        assert engine.healing is None
    assert not any(HEALING in step for step in steps)


def test_healing_evicts_nothing_and_holds_nothing(model, bench, store, first, monkeypatch):
    with healer(bench, model, store, {"num_blocks": 24, "safety_margin": 0.25}) as engine:
        evicted = []
        bench.answer(engine, [1, *bench.draw(129, 11)], blend=False)  # 9 blocks of 24 are cached
        bench.answer(engine, first)  # and 7 more: there is no room for a step of 4 blocks
        monkeypatch.setattr(engine.paged, "evict_cached_blocks", lambda: evicted.append(1))
        steps = steps_of(engine, monkeypatch)
        wait_for(lambda: not engine.batch_processor.scheduler.has_pending_requests(), "the end")
        before = list(engine.paged.allocator.ledger.cached_blocks)
        assert len(before) == 16
        for _ in range(3):
            assert engine.healing.next_step() is None
        assert list(engine.paged.allocator.ledger.cached_blocks) == before
        assert not evicted
        assert not steps
        monkeypatch.undo()
        long = [1, *bench.draw(300, 12)]  # needs nearly all blocks
        assert bench.answer(engine, long, blend=False)[0] == stock_answer(model, bench, long)


def test_a_conversation_whose_step_fails_is_forgotten_and_the_engine_goes_on(
    model, bench, store, first, monkeypatch, caplog
):
    with healer(bench, model, store) as engine:
        begin = engine.healing.begin

        def fail_next(step):
            monkeypatch.setattr(engine.batch_processor, "_generation_step", raising(RuntimeError("no more")))
            monkeypatch.setattr(engine.healing, "end", lambda error=None: (monkeypatch.undo(), ended(error)))
            return begin(step)

        ended = engine.healing.end
        monkeypatch.setattr(engine.healing, "begin", fail_next)
        bench.answer(engine, first)
        wait_for(lambda: not engine.healing._conversations, "the failure")
        assert engine.healing.tokens == 0
        assert engine.get_result(timeout=0.2) is None, "nobody receives what the engine asks itself"
        assert bench.answer(engine, [1, 5, 6], blend=False)[0] == stock_answer(model, bench, [1, 5, 6])
    assert "a conversation is not healed: RuntimeError: no more" in caplog.text


def test_no_conversation_is_healed_by_another_model(model, tiny_model, bench, store, first):
    model = tiny_model("llama")
    store.add(model, None, bench.workload.library[2:4])
    with healer(bench, model, store) as engine:
        engine.healing._step_tokens = 0  # nothing yet
        engine.healing.next_step = lambda: None
        bench.answer(engine, first)
        with engine.pause(), torch.no_grad():
            model.get_input_embeddings().weight.mul_(1.5)
        del engine.healing.next_step
        assert engine.healing.author != engine.healing._conversations[0].author
        assert engine.healing.next_step() is None


def test_a_few_conversations_of_each_tenant_are_remembered():
    paged = SimpleNamespace(page=PAGE, max_batch_tokens=64, blended_hashes=lambda request_id: [])
    healing = Healing(paged, None, 0.1)
    healing.author = "author"

    def note(tenant, ids, how="blended", images=None):
        store = SimpleNamespace(namespace=tenant)
        reuse = SimpleNamespace(store=store, salt=(), images=images)
        state = SimpleNamespace(request_id="r", initial_tokens=ids, generated_tokens=[5])
        outcome = SimpleNamespace(how=how, prefix_tokens=0)
        healing.note(SimpleNamespace(state=state, reuse=reuse, outcome=outcome, chunks_end=1))

    note("b", [7])
    for number in range(MOST_CONVERSATIONS + 3):
        note("a", [1, number])
    of = [row.ids for row in healing._conversations]
    assert of == [(7, 5), *((1, number, 5) for number in range(3, MOST_CONVERSATIONS + 3))]
    note("a", [3] * (MOST_TOKENS // 2))
    note("a", [4] * (MOST_TOKENS // 2))
    assert [row.ids[0] for row in healing._conversations] == [7, 4]
    for how, images in (("plain", None), ("waiting", None), ("blended", {"pixel_values": 1})):
        note("c", [8, 9], how, images)
    assert len(healing._conversations) == 2
    note("b", [7, 5, 8])
    assert [row.ids for row in healing._conversations if row.ids[0] == 7] == [(7, 5, 8, 5)], "the turn before is in it"


@pytest.mark.parametrize(("seconds", "pages"), [(0.01, 4), (0.15, 2), (9.0, 1)])
def test_a_step_that_took_long_makes_the_next_one_smaller(seconds, pages, monkeypatch):
    paged = SimpleNamespace(page=PAGE, max_batch_tokens=256)
    healing = Healing(paged, SimpleNamespace(expect=lambda *args: None), 0.1)
    conversation = Conversation(tuple(range(99)), 50, 40, None, "author", ())
    clock = iter([5.0, 5.0 + seconds])
    monkeypatch.setattr("hf_blend.serving.healing.time.monotonic", lambda: next(clock))
    healing.begin(Step(conversation, 64, 64))
    healing.end()
    assert healing._step_tokens == pages * PAGE
    assert healing.tokens == 64


def test_steps_that_hold_no_page_are_refused(model, bench, store):
    engine = healer(bench, model, store, {"max_batch_tokens": 8})
    with pytest.raises(ConfigError, match="steps of 8 tokens, but a step of at least one page, 16 tokens"):
        engine.start()


def test_metrics_tell_how_much_was_healed_and_how_many_turns_found_it(reference, tmp_path):
    question = reference_questions()[0]
    text = "".join([*question["chunks"], question["question"]])  # later turns begin with it, documents included
    messages = [{"role": "user", "content": text}]

    def ask():
        body = {"messages": messages, "documents": question["chunks"], "max_tokens": 12, "temperature": 0}
        answer = httpx.post(f"{service.url}/v1/chat/completions", json=body, timeout=60).json()
        messages.append(answer["choices"][0]["message"])
        messages.append({"role": "user", "content": "Why?"})
        return answer["usage"]["hf_blend"]["prefill"]

    with running(reference, tmp_path, heal=True) as service:
        is_first_blended = ask() == "blended"
        wait_until_healed(service.engine)
        is_second_plain = ask() == "plain"
        figures = metrics(service.url)
    assert is_first_blended
    assert is_second_plain
    assert figures["hf_blend_healed_tokens_total"] == service.engine.healing.tokens > 50
    assert figures['hf_blend_next_turns_total{found="healed"}'] == 1
    assert figures['hf_blend_next_turns_total{found="blended"}'] == 0
    with running(reference, tmp_path / "off") as service:
        assert not any("healed" in name or "next_turns" in name for name in metrics(service.url))
