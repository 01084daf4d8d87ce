# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Importance of stored tokens is compared in a prompt, weighed by shared ids, and orders the tokens of blocks."""

from dataclasses import replace

import pytest
import torch

from hf_blend import BlendCache, ChunkStore
from hf_blend.prefill.plan import Plan
from tests.asking import memory

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
        texts_with = [sum(token in other for other in shared) for token in found]
        rarity.append(0.5 + sum(1 / count for count in texts_with if count <= len(texts) / 2))
    known = []
    for of_chunk in numbers:
        known += of_chunk or []
    weights = []
    for text, total, of_chunk in zip(texts, rarity, numbers, strict=True):
        by_words = total * len(texts) / sum(rarity)
        shares = [1.0] * len(text)
        if of_chunk is not None:
            mean = sum(known) / len(known)
            shares = [number / mean for number in of_chunk]
        weights.append([by_words * share for share in shares])
    return weights


@pytest.fixture
def forward(models):
    """The last prefill of a request, and what of its store's chunks is changed before."""

    def run(change=lambda number, chunk: chunk, **settings):
        model, tokenizer = models["bytes"]
        store = memory()
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

    token_weights = Plan.token_weights
    monkeypatch.setattr(Plan, "token_weights", recorded)
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
        got = token_weights(plan, **options)[0].numpy()
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
    store = memory()
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


def test_tokens_of_blocks_are_ordered_by_importance_and_as_they_are_where_it_is_unknown(models, tmp_path):
    model, tokenizer = models["bytes"]
    with ChunkStore.open(tmp_path, partial={"share": 0.5, "block_tokens": 8}, memory_bytes=0) as store:
        (key,) = store.add(model, tokenizer, TEXTS[:1])
        (bare,) = store.add(model, None, [tokenizer.encode(TEXTS[1])])
        chunk = store.stream(key, None)
        numbers = chunk.importance[chunk.layers.reader.order]
        assert torch.equal(numbers, chunk.importance.sort(descending=True).values)
        assert store.stream(bare, None).layers.reader.order.tolist() == [*range(len(bare.token_ids))]
