# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Importance is the attention of the running request: averaged, kept, and used."""

from dataclasses import replace

import pytest
import torch
from tiny_models import tiny_model as zoo_model

from hf_blend import BlendCache, ChunkStore
from hf_blend.prefill import blend
from hf_blend.prefill.importance import token_weights
from hf_blend.sparse.partial.importance import TokenImportance
from hf_blend.sparse.partial.reader import FIRST_REQUESTS
from tests import asking
from tests.test_partial import CHUNKS, PIECES

GREEDY = {"max_new_tokens": 2, "do_sample": False, "eos_token_id": None}
LAYERS = 6


@pytest.fixture(scope="module")
def model():
    return zoo_model("llama", num_hidden_layers=LAYERS)


def asked(model, store, pieces=PIECES, selector="kv-deviation", **settings):
    return asking.asked(model, pieces, store=store, ways=GREEDY, selector=selector, **settings)


def test_token_importance_averages_requests_and_forgets_oldest_beyond_cap():
    known = TokenImportance(cap_tokens=100)
    for number in range(5):
        record = known.record(f"{number:064x}", torch.full((40,), float(number)))
        assert record.requests == 1
    assert known.get(f"{2:064x}") is None
    assert known.get(f"{3:064x}") is not None
    again = known.record(f"{4:064x}", torch.zeros(40))
    assert again.requests == 2
    assert again.scores.tolist() == pytest.approx([3.2] * 40, rel=1e-3)
    wrong = known.record(f"{3:064x}", torch.full((40,), float("nan")))
    assert wrong.scores.isfinite().all()


def test_chunk_reported_often_is_written_by_importance_of_its_tokens(model, tmp_path):
    with ChunkStore.open(tmp_path, partial={"share": 0.5, "block_tokens": 8}, memory_bytes=0) as store:
        for _ in range(1 + FIRST_REQUESTS):  # the first one computes the chunks
            asked(model, store, recompute_ratio=0.0, selector="none")
        orders = [store.stream(key, None).layers.reader.order for key in store.add(model, None, CHUNKS)]
        scores = [store.layer_reader.importance.get(key.digest).scores for key in store.add(model, None, CHUNKS)]
    for order, of_tokens in zip(orders, scores, strict=True):
        assert order.tolist() != sorted(order.tolist())
        assert torch.equal(of_tokens[order], of_tokens.sort(descending=True).values)


TEXTS = [
    "The clock of the old house is nine minutes slow, and nobody repairs it.",
    "Ines keeps bees in the garden of the harbour office since the year 2009.",
    "A crane of 12 tonnes, a slate roof, and a clock of brass from Lund.",
]
ASKED = "How slow is the clock of the old house?"


def weights_by_hand(texts, question, numbers):
    """For each chunk the weights of its tokens, of ids, and of the importance of each chunk or None."""
    shared = [{token for token in question if token in text} for text in texts]
    rarity = []
    for found in shared:
        rarity.append(0.5 + sum(1 / sum(token in other for other in shared) for token in found))
    known = [number for of_chunk in numbers if of_chunk is not None for number in of_chunk]
    weights = []
    for text, total, of_chunk in zip(texts, rarity, numbers, strict=True):
        by_words = total * len(texts) / sum(rarity)
        shares = [1.0] * len(text) if of_chunk is None else [n * len(known) / sum(known) for n in of_chunk]
        weights.append([by_words * share for share in shares])
    return weights


@pytest.fixture
def forward(models):
    """The last prefill of a request, and what of its store's chunks is changed before."""

    def run(change=lambda number, chunk: chunk, **settings):
        model, tokenizer = models["bytes"]
        store = ChunkStore.open("memory://")
        for number, key in enumerate(store.add(model, tokenizer, TEXTS)):
            stored = store.get(key)
            store.remove([key.digest])
            store.put(change(number, stored))
        cache = BlendCache(model, store, **{"selector": "stored-importance", "recompute_ratio": 0.2, **settings})
        inputs = cache.inputs(tokenizer, prefix="Read this. ", chunks=TEXTS, question=ASKED)
        with torch.no_grad():
            model(**inputs, **cache.keyword, logits_to_keep=1)
        question = inputs["input_ids"][0].tolist()
        return cache, [store.get(key) for key in store.keys(model, tokenizer, TEXTS)], question

    return run


def without_number(number, chunk):
    return replace(chunk, importance=None, question="") if number == 1 else chunk


def of_other_question(number, chunk):
    return replace(chunk, question="another") if number == 1 else chunk


def unknown(_, chunk):
    return replace(chunk, importance=None, question="")


@pytest.mark.parametrize("change", [lambda _, chunk: chunk, without_number, of_other_question])
def test_token_weights_are_importance_over_its_mean_times_shared_rare_ids(forward, monkeypatch, change):
    plans = []

    def recorded(plan, **which):
        plans.append(plan)
        return token_weights(plan, **which)

    monkeypatch.setattr(blend, "token_weights", recorded)
    _, stored, ids = forward(change)
    (plan,) = plans
    chunks = [placed for placed in plan.chunks if not placed.exact]
    assert [placed.chunk.key for placed in chunks] == [chunk.key for chunk in stored]
    question = set(ids[chunks[-1].columns.stop :])
    numbers = []
    for number, chunk in enumerate(stored):
        is_other = number == 1 and change in (without_number, of_other_question)
        numbers.append(None if is_other else chunk.importance.tolist())
    texts = [chunk.key.token_ids for chunk in stored]
    expected = weights_by_hand(texts, question, numbers)
    equal = weights_by_hand(texts, question, [None] * 3)
    plain = weights_by_hand(texts, set(), numbers)
    for options, by_hand in (({}, expected), ({"importance": False}, equal), ({"words": False}, plain)):
        got = token_weights(plan, **options)[0]
        for placed, of_chunk in zip(chunks, by_hand, strict=True):
            assert got[placed.columns] == pytest.approx(of_chunk, rel=1e-4)
        assert (got[: chunks[0].start] == 1).all()
        assert (got[chunks[-1].columns.stop :] == 1).all()


def test_stored_importance_is_ramp_where_nothing_is_stored_and_words_do_not_count(forward):
    ramp = forward(selector="ramp")[0].report.chosen_columns
    options = {"words": False}
    assert forward(selector_options=options)[0].report.chosen_columns != ramp
    cache, _, _ = forward(unknown, selector_options=options)
    assert cache.report.chosen_columns == ramp
    assert cache.report.fallback_reason == ""


def test_stored_importance_chooses_in_batch_as_alone(models):
    model, tokenizer = models["bytes"]
    store = ChunkStore.open("memory://")
    questions = [ASKED, "Who keeps bees?"]
    chunks = [TEXTS, TEXTS[:0:-1]]
    settings = {"selector": "stored-importance", "recompute_ratio": 0.3}
    chosen = []
    for asked_of, question in ((chunks, questions), (chunks[0], ASKED), (chunks[1], questions[1])):
        cache = BlendCache(model, store, **settings)
        inputs = cache.inputs(tokenizer, prefix="Read this. ", chunks=asked_of, question=question)
        with torch.no_grad():
            model(**inputs, **cache.keyword, logits_to_keep=1)
        width = inputs["input_ids"].shape[1]
        chosen += [[width - column for column in columns] for columns in cache.report.chosen_columns]
    assert chosen[:2] == chosen[2:]
