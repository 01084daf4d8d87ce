# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Behind the prefill: conversations, prompts that come in parts, compiled steps, outputs that were asked for."""

import pytest
import torch

from hf_blend.model.identity import fingerprint
from hf_blend.store.chunk import ChunkKey
from tests.asking import THREE, check_equal, prepared, states_of
from tests.asking import generated as run
from tests.conftest import random_pieces, shared_zoo_model

REQUEST = THREE[0]


def turn_of(seed):
    """The pieces of a later turn."""
    drawn = random_pieces((14, 21), seed=seed, question=6)
    return {"chunks": drawn["chunks"], "question": drawn["question"]}


@torch.no_grad()
def test_history_keeps_its_own_states_and_new_chunks_go_behind_it(shared_model, store):
    model = shared_model()
    cache, inputs = prepared(model, REQUEST, store=store, recompute_ratio=0.15)
    output = run(model, inputs, cache)
    held = cache.get_seq_length()
    before = [states.clone() for states in states_of(cache)]
    turn = turn_of(5)
    run(model, cache.inputs(None, **turn, prefix=output[0]), cache)
    assert cache.report.computed_chunks == 2
    (chosen,) = cache.report.chosen_columns
    assert len(chosen) == 6
    assert min(chosen) > held
    check_equal([states[:, :, :held] for states in states_of(cache)], before)
    key = ChunkKey(fingerprint(model), (1,), turn["chunks"][1])
    _, stored = store.get(key).layers[3]
    start = held + 1 + 14
    values = cache.layers[3].values[0, :, start : start + 21]
    is_stored = (values == stored).all(2).all(0)
    recomputed = [column - start for column in chosen if column >= start]
    assert (~is_stored).nonzero()[:, 0].tolist() == recomputed


@pytest.mark.parametrize(
    ("family", "batch", "size"),
    [("llama", 1, 7), ("gemma3_text", 3, 25)],
)
def test_prefill_chunk_size_blends_every_part(store, family, batch, size):
    model = shared_zoo_model(family)
    requests = THREE[:batch]
    cache, inputs = prepared(model, *requests, store=store, recompute_ratio=1.0)
    got = run(model, inputs, cache, prefill_chunk_size=size)
    assert torch.equal(got, run(model, inputs))
    whole, inputs = prepared(model, *requests, store=store, recompute_ratio=0.15)
    run(model, inputs, whole)
    parts, inputs = prepared(model, *requests, store=store, recompute_ratio=0.15)
    run(model, inputs, parts, prefill_chunk_size=size)
    number = -(-inputs["input_ids"].shape[1] // size)
    expected = whole.report
    reused = expected.reusable_tokens + expected.exact_tokens
    for got in (cache.report, parts.report):
        assert got.prompt_tokens == expected.prompt_tokens
        lost = reused - got.reusable_tokens - got.exact_tokens
        assert 0 <= lost <= number * batch, "only the last token of each part is always computed"
    assert parts.report.charged_budget < 1
    for columns in parts.report.chosen_columns:
        assert columns == sorted(set(columns))
        assert not columns or columns[-1] > size
