# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Importance is the attention of the running request: averaged, kept, and used."""

import pytest
import torch
from tiny_models import tiny_model as zoo_model

from hf_blend import ChunkStore
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
