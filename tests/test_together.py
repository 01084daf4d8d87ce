# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Chunks that were computed together: what is stored of them, which prompts reuse it, and what where it is missing."""

import itertools
from functools import partial

import pytest
import torch
from tiny_models import tiny_model
from transformers import DynamicCache

from hf_blend import BlendCache, ChunkStore
from hf_blend.errors import PromptError, UnsupportedModelError
from hf_blend.model.anatomy import default_sink
from hf_blend.prefill.plan import of_set
from tests.conftest import random_ids, random_pieces

CHUNKS = [random_ids(23, seed) for seed in (1, 2, 3)]  # the one in the middle stays where it is in the reverse order

BETWEEN = [7, 9]


def among(model, order):
    """K and V that stock leaves of each chunk of a prompt, by layer."""
    cache, ids, columns = DynamicCache(), list(default_sink(model)), {}  # without windows, so that it keeps all
    for one in order:
        columns[one] = slice(len(ids), len(ids) + len(CHUNKS[one]))
        ids += CHUNKS[one] + BETWEEN
    with torch.no_grad():
        model(torch.tensor([ids]), past_key_values=cache)
    return {
        one: [(layer.keys[0, :, at], layer.values[0, :, at]) for layer in cache.layers] for one, at in columns.items()
    }


def blend(model, store, chunks, ratio=0.0, of="values"):
    """Logits of a prompt with these chunks, V (or K) of the chunks by layer, and the report."""
    pieces = {**random_pieces(), "chunks": chunks}
    cache = BlendCache(model, store, recompute_ratio=ratio)
    inputs = cache.inputs(None, **pieces)
    with torch.no_grad():
        logits = model(**inputs, past_key_values=cache, logits_to_keep=1).logits
    start = len(pieces["prefix"])
    return (
        logits,
        [getattr(layer, of)[0, :, start : start + sum(map(len, chunks))] for layer in cache.layers],
        cache.report,
    )


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gemma3_text"])
def test_chunk_of_a_set_is_stored_as_the_mean_of_what_stock_leaves_in_an_order_and_its_reverse(
    shared_model, store, family
):
    model = shared_model(family)
    stored = [store.get(key) for key in store.add_together(model, None, CHUNKS, separator=BETWEEN)]
    order = sorted(range(3), key=lambda one: store.keys(model, None, CHUNKS)[one].digest)
    there, back = among(model, order), among(model, order[::-1])
    for number, chunk in enumerate(stored):
        for layer, (keys, values) in enumerate(chunk.layers):
            mean = [(one + other) / 2 for one, other in zip(there[number][layer], back[number][layer], strict=True)]
            torch.testing.assert_close(values, mean[1], rtol=1e-4, atol=1e-5)
            if number == order[1]:  # at the same position in both
                torch.testing.assert_close(keys, mean[0], rtol=1e-4, atol=1e-4)
            assert layer == 0 or (there[number][layer][1] - values).abs().max() > 1e-3


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gemma3_text"])
def test_keys_of_a_set_are_turned_to_one_position_before_their_mean(shared_model, store, family):
    model = shared_model(family)
    first = []
    for prepare in (store.add, partial(store.add_together, separator=BETWEEN)):
        prepare(model, None, CHUNKS)
        first.append(blend(model, store, CHUNKS, of="keys")[1][0])
    torch.testing.assert_close(*first, rtol=1e-4, atol=1e-4)  # of layer 0 all are the same in every prompt


def test_prompt_with_the_set_in_any_order_reuses_it_and_other_prompts_do_not(shared_model, store):
    model = shared_model("llama")
    keys = store.add_together(model, None, CHUNKS, separator=BETWEEN)
    assert store.add_together(model, None, CHUNKS[::-1], separator=BETWEEN) == keys[::-1], "nothing is computed again"
    store.add(model, None, [*CHUNKS, random_ids(9, 4)])
    for order in itertools.permutations(range(3)):
        _, values, report = blend(model, store, [CHUNKS[one] for one in order])
        assert report.chunks_of_sets == 3
        for found, layer in zip(values, store.get(keys[order[0]]).layers, strict=True):
            torch.testing.assert_close(found[:, :23], layer[1])
    for others in (CHUNKS[:2], [*CHUNKS, random_ids(9, 4)]):
        assert blend(model, store, others)[2].chunks_of_sets == 0
    assert "as they are among each other" in str(report)


def test_of_sets_with_several_separators_that_between_the_chunks_of_the_prompt_is_reused(shared_model, store):
    model, separators = shared_model("llama"), [(7, 9), (9, 7), (7,), ()]
    [alone, *_] = store.add(model, None, CHUNKS)
    keys = {one: store.add_together(model, None, CHUNKS, separator=one) for one in separators}
    rows = [([*one], [*one], one) for one in separators]
    rows += [([7, 9], [9, 7], (7,)), ([8, 7, 9, 8], [5], (7, 9)), ([3], [4], ())]
    for left, right, expected in rows:
        ids = [1, *CHUNKS[0], *left, *CHUNKS[1], *right, *CHUNKS[2], 11, 12]
        spans = of_set(store, store.find(alone.fingerprint, alone.chunk_prefix_ids, ids), ids)
        assert [span.key for span in spans] == keys[expected]


def test_chunk_of_a_set_that_is_gone_is_reused_as_it_is_alone(shared_model, store):
    model = shared_model("llama")
    keys, [alone, *_] = store.add_together(model, None, CHUNKS, separator=BETWEEN), store.add(model, None, CHUNKS)
    store.delete(keys[0])
    _, values, report = blend(model, store, CHUNKS)
    assert report.chunks_of_sets == 2
    for found, layer in zip(values, store.get(alone).layers, strict=True):
        torch.testing.assert_close(found[:, :23], layer[1])


def test_chunk_of_a_set_that_is_damaged_is_computed_again_with_the_others(shared_model, tmp_path):
    model = shared_model("llama")
    with ChunkStore.open(tmp_path) as store:
        keys = store.add_together(model, None, CHUNKS, separator=BETWEEN)
        expected = [store.get(key).layers[-1][1].clone() for key in keys]
    for file in tmp_path.rglob(f"*{keys[0].digest}*"):
        raw = bytearray(file.read_bytes())
        raw[-5] ^= 0xFF
        file.write_bytes(raw)
    with ChunkStore.open(tmp_path) as store:
        _, values, report = blend(model, store, CHUNKS)
        assert (report.chunks_of_sets, report.computed_chunks) >= (2, 1)
        torch.testing.assert_close(values[-1], torch.cat(expected, 1))


def test_set_brings_a_prompt_nearer_to_full_prefill(shared_model, store):
    model, errors = shared_model("llama"), []
    chunks = [CHUNKS[one] for one in (1, 2, 0)]
    ids = BlendCache(model, store).inputs(None, **{**random_pieces(), "chunks": chunks})["input_ids"]
    whole = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, past_key_values=whole)
    for prepare in (store.add, partial(store.add_together, separator=BETWEEN)):
        prepare(model, None, chunks)
        _, values, _ = blend(model, store, chunks)
        true = [layer.values[0, :, 5 : 5 + 69] for layer in whole.layers]
        errors.append(sum(float((one - other).square().sum()) for one, other in zip(values, true, strict=True)))
    assert errors[1] < 0.8 * errors[0], errors


def test_set_without_a_separator_is_reused_where_there_is_none(shared_model, store):
    model = shared_model("llama")
    keys = store.add_together(model, None, CHUNKS, separator=None)
    assert {key.chunk_prefix_ids for key in keys} == {()}
    assert keys == store.add_together(model, None, CHUNKS, separator=())
    assert blend(model, store, CHUNKS)[2].chunks_of_sets == 3


def test_sets_that_cannot_be_are_refused(shared_model, store):
    model = shared_model("llama")
    most = model.config.max_position_embeddings
    with pytest.raises(PromptError, match="1 different chunk"):
        store.add_together(model, None, [CHUNKS[0], CHUNKS[0]], separator=())
    with pytest.raises(PromptError, match="came without a tokenizer"):
        store.add_together(model, None, CHUNKS)
    with pytest.raises(PromptError, match="positions"):
        store.add_together(model, None, [random_ids(most // 2, seed) for seed in (1, 2)], separator=())
    with pytest.raises(UnsupportedModelError, match=r"a state (beside|of another kind)"):
        store.add_together(tiny_model("qwen3_next"), None, CHUNKS, separator=())
    assert len(store) == 0
