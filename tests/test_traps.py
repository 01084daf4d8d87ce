# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What goes wrong silently when KV is reused inside transformers: each trap is shown to be there, and to be avoided.

Traps with tests elsewhere: KV-sharing layers and a norm behind the rotation (`test_families`), arguments by place
(`test_hooks`), windows that drop what a chunk needs (`test_capture`), scaling factors and short-regime chunks at layer
0 (`test_realign`), a mask that is left out, since a causal kernel needs none (`test_masks`, `test_blend`), positions
with gaps that flash attention takes for several sequences (`test_attention_kinds`), a scale by positions
(`test_positions`), assisted decoding on a filled cache (`test_conformance`), the tensor by which it crops in
transformers 5.17 (`test_stock_cache`), casts and repacked weights of bitsandbytes (`test_quantised`,
`test_fingerprint`).
"""

import copy

import pytest
import torch
from tiny_models import tiny_model as zoo_model
from transformers import DynamicCache

from tests.asking import GREEDY, PIECES, longrope, memory, prefilled, prepared
from tests.asking import prefill as logits
from tests.conftest import shared_zoo_model

WAYS = {**GREEDY, "max_new_tokens": 12}
OTHER = {"prefix": [1, 9], "chunks": [list(range(30, 50))], "question": [11, 12, 13]}
CHUNKED = {"floor_scale": 4, "attn_scale": 0.5}  # attention in chunks, and a scale by columns
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}


def error(model, *requests, other=None, **settings):
    """How far a blended prefill with every token recomputed is from a plain one, of `other` if it is given."""
    cache, got, inputs = prefilled(model, *requests, **{"recompute_ratio": 1.0, **settings})
    assert cache.report.reusable_tokens > 0
    return float((got - logits(other or model, inputs, DynamicCache())).abs().max())


def phi3(**fields):
    return shared_zoo_model("phi3", rope_parameters=longrope(58), original_max_position_embeddings=58, **fields)


def test_model_that_drops_cache_which_is_true_too_early_keeps_ours():
    model = phi3()
    cache, inputs = prepared(model, PIECES, recompute_ratio=1.0)
    stock = DynamicCache(config=model.config)
    given = {"past_key_values": stock, "attention_mask": inputs["attention_mask"], "use_cache": True}
    assert stock, "the trap: empty and true"
    assert model.prepare_inputs_for_generation(inputs["input_ids"], **given).get("past_key_values") is None
    assert not cache
    got = model.generate(**inputs, past_key_values=cache, **WAYS)
    assert cache.get_seq_length() == got.shape[1] - 1
    assert cache.report.reusable_tokens > 0
    assert torch.equal(got, model.generate(inputs["input_ids"], **WAYS))


def test_answer_that_crosses_into_long_factors_is_that_of_plain_model():
    model = phi3()
    short = {**PIECES, "chunks": [PIECES["chunks"][0], list(range(60, 74))]}
    cache, inputs = prepared(model, short, recompute_ratio=1.0)
    assert inputs["input_ids"].shape[1] < 58 < inputs["input_ids"].shape[1] + WAYS["max_new_tokens"]
    got = model.generate(**inputs, past_key_values=cache, **WAYS)
    assert cache.report.reusable_tokens > 0
    assert torch.equal(got, model.generate(inputs["input_ids"], **WAYS))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_batch_whose_layers_count_positions_recomputes_same_columns_in_every_entry(attention):
    model = shared_zoo_model("llama4_text", attention, **CHUNKED)
    found = []
    for requests in ([PIECES], [PIECES, PIECES], [PIECES, OTHER]):
        cache, inputs = prepared(model, *requests, recompute_ratio=0.3)
        of_first = logits(model, inputs, cache)[:1]
        found.append((of_first, cache.report.charged_budget))
    (alone, budget), (twice, same_budget), (_, larger_budget) = found
    torch.testing.assert_close(twice, alone, rtol=0, atol=1e-5)
    assert same_budget == pytest.approx(budget)
    assert larger_budget > budget, "more is recomputed where entries differ"
    shorter = {**PIECES, "chunks": PIECES["chunks"][-1:]}
    cache, inputs = prepared(model, PIECES, shorter, recompute_ratio=0.3, selector="kv-deviation")
    logits(model, inputs, cache)
    assert cache.report.charged_budget < 0.58, "padding of one keeps no column of the other: 0.64 where it does"


def test_chunked_attention_keeps_one_chunk_and_says_what_it_says_without_cache():
    model = shared_zoo_model("llama4_text", "sdpa", **CHUNKED)
    assert error(model, PIECES) <= 1e-5
    cache, inputs = prepared(model, PIECES, recompute_ratio=1.0)
    long = {**WAYS, "max_new_tokens": 40}
    got = model.generate(**inputs, past_key_values=cache, **long)
    assert torch.equal(got, model.generate(inputs["input_ids"], use_cache=False, **long))
    held = {"chunked_attention": model.config.attention_chunk_size - 1, "full_attention": got.shape[1] - 1}
    assert [layer.keys.shape[2] for layer in cache.layers] == [held[kind] for kind in model.config.layer_types]


def test_frequencies_that_depend_on_longest_prompt_so_far_are_those_of_plain_model():
    model = zoo_model("llama", rope_parameters=DYNAMIC, max_position_embeddings=58)
    store = memory()
    twin = copy.deepcopy(model)
    assert error(model, PIECES, other=twin, store=store) <= 1e-5
    before = logits(twin, prepared(model, PIECES, store=store)[1], DynamicCache())
    for one in (model, twin):
        one(torch.randint(3, 128, (1, 200), generator=torch.Generator().manual_seed(1)))
    after = logits(twin, prepared(model, PIECES, store=store)[1], DynamicCache())
    assert (after - before).abs().max() > 1e-3, "the trap: the same prompt has other logits"
    assert error(model, PIECES, other=twin, store=store) <= 1e-5
