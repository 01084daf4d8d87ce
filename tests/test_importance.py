# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Importance is the attention of the running request: gathered by stock attention's rule, kept, and used."""

import pytest
import torch
from tiny_models import tiny_model as zoo_model

from hf_blend import ChunkStore
from hf_blend.prefill import importance
from hf_blend.sparse.partial.importance import TokenImportance
from hf_blend.sparse.partial.reader import FIRST_REQUESTS
from tests import asking
from tests.test_partial import CHUNKS, PIECES

GREEDY = {"max_new_tokens": 2, "do_sample": False, "eos_token_id": None}
LAYERS = 6


@pytest.fixture(scope="module")
def model():
    return zoo_model("llama", num_hidden_layers=LAYERS)


def listened(monkeypatch, store):
    """What a store gets, by digest; it takes it in as before."""
    told = {}
    record = store.record_attention

    def hear(key, scores, ratio):
        told.setdefault(key.token_ids, []).append((scores, ratio))
        record(key, scores, ratio)

    monkeypatch.setattr(store, "record_attention", hear)
    return told


def asked(model, store, pieces=PIECES, selector="kv-deviation", **settings):
    return asking.asked(model, pieces, store=store, ways=GREEDY, selector=selector, **settings)


@torch.no_grad()
def stock_scores(model, ids, rows, layers, first=None):
    """`[chunk tokens]`: attention of the last rows in some layers, shared out among the chunks' columns."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        attentions = model(torch.tensor([ids]), output_attentions=True).attentions
    finally:
        model.set_attn_implementation(before)
    first = len(PIECES["prefix"]) if first is None else first
    last = first + sum(map(len, CHUNKS))
    scores = torch.zeros(last - first)
    for layer in layers:
        part = attentions[layer][0, :, -rows:, first:last]
        part = part / part.sum(-1, keepdim=True)
        scores += part.sum((0, 1))
    return scores


@pytest.mark.parametrize("rows", [16, 2])
def test_note_gets_attention_of_question(model, monkeypatch, untouched, rows):
    monkeypatch.setattr(importance, "LAYERS", 100)
    monkeypatch.setattr(importance, "ROWS", rows)
    store = ChunkStore.open("memory://", eviction="importance")
    asked(model, store, recompute_ratio=1.0)
    told = listened(monkeypatch, store)
    with untouched(model):
        asked(model, store, recompute_ratio=1.0)
    ids = [*PIECES["prefix"], *sum(CHUNKS, []), *PIECES["question"]]
    expected = stock_scores(model, ids, min(rows, 4), range(2, LAYERS - 1))
    expected = expected / expected.mean()
    quarter = expected.topk(round(len(expected) / 4)).indices
    important = torch.zeros(len(expected))
    important[quarter] = 1.0
    start = 0
    for chunk in CHUNKS:
        scores, share = told[tuple(chunk)][0]
        stop = start + len(chunk)
        torch.testing.assert_close(scores, expected[start:stop], rtol=2e-3, atol=2e-3)
        assert share == pytest.approx(float(important[start:stop].mean()), abs=1.01 / len(chunk))
        start = stop


@pytest.mark.parametrize("ratio", [0.0, 0.3])
def test_record_attention_changes_no_token_and_asks_for_no_recompute(model, monkeypatch, ratio):
    settings = {"recompute_ratio": ratio, **({} if ratio else {"selector": "none"})}
    plain = ChunkStore.open("memory://")
    store = ChunkStore.open("memory://", eviction="importance")
    for one in (plain, store):
        asked(model, one, **settings)
    told = listened(monkeypatch, store)
    cache, ids = asked(model, plain, **settings)
    other, same = asked(model, store, **settings)
    assert torch.equal(ids, same)
    for layer, twin in zip(cache.layers, other.layers, strict=True):
        torch.testing.assert_close(layer.keys, twin.keys, rtol=0, atol=2e-5)
    assert set(told) == set(map(tuple, CHUNKS)), "with nothing recomputed too"
    assert not plain.reads_importance


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
