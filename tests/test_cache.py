# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""One cache, one request: what it reuses, what it refuses, and that it leaves the model and itself as they were."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from hf_blend import BlendCache
from hf_blend.model.identity import fingerprint
from hf_blend.store.chunk import ChunkKey
from tests.asking import as_stock, asked, failing, generated, hooks, memory, prepared


def ids_of(request):
    return {"input_ids": torch.tensor([[*request["prefix"], *sum(request["chunks"], []), *request["question"]]])}


def test_chunk_that_occurs_twice_is_fetched_once(shared_model, pieces):
    model = shared_model()
    kept = memory()
    request = pieces()
    request["chunks"] = [request["chunks"][0], request["chunks"][1], request["chunks"][0]]
    cache, inputs = prepared(model, request, store=kept, recompute_ratio=1.0)
    as_stock(model, inputs, cache)
    assert cache.report.computed_chunks == 3
    assert cache.report.reusable_tokens == 17 + 23 + 17


@pytest.mark.parametrize("offset", [0, 1, 7])
def test_stored_chunks_are_found_by_content_at_any_offset_of_plain_ids(shared_model, pieces, offset):
    model = shared_model()
    kept = memory()
    request = pieces()
    kept.add(model, None, request["chunks"])
    filler = pieces(prefix=40, seed=6)["prefix"][1:]
    ids = [1, *filler[:offset], *request["chunks"][2], *filler[:3], *request["chunks"][0], 9, 8, 7]
    inputs = {"input_ids": torch.tensor([ids])}
    cache = BlendCache(model, kept, recompute_ratio=0.0)
    generated(model, inputs, cache)
    assert cache.report.loaded_chunks == 2
    assert cache.report.computed_chunks == (0 if offset else 1)  # directly behind its sink: the sink is an entry too
    assert cache.report.reusable_tokens + cache.report.exact_tokens == (48 if offset else 49)
    as_stock(model, inputs, BlendCache(model, kept, recompute_ratio=1.0))


def test_plain_ids_and_built_inputs_are_same_request(shared_model, pieces, tokenizer):
    model = shared_model()
    kept = memory()
    request = pieces()
    built = BlendCache(model, kept, recompute_ratio=0.15)
    first = generated(model, built.inputs(tokenizer, **request), built)
    found = BlendCache(model, kept, recompute_ratio=0.15)
    assert torch.equal(first, generated(model, ids_of(request), found))
    assert found.report.chosen_columns == built.report.chosen_columns
    assert found.report.exact_tokens == built.report.exact_tokens == 5
    other = BlendCache(model, kept)
    other.inputs(tokenizer, **request)
    generated(model, {"input_ids": ids_of(request)["input_ids"].flip(1)}, other)
    assert "other ids than those of the prompt" in other.report.notice
    assert not built.report.notice


@pytest.mark.parametrize("place", ["model.embed_tokens", "model.norm", "lm_head"])
def test_exception_outside_layers_leaves_no_hook(tiny_model, pieces, untouched, place):
    model = tiny_model()
    kept = memory()
    asked(model, pieces(), store=kept)
    with untouched(model):
        cache, inputs = prepared(model, pieces(), store=kept)
        with failing(model.get_submodule(place)), pytest.raises(ZeroDivisionError):
            generated(model, inputs, cache)
        assert hooks(model) == 0


def test_caches_in_threads_do_not_see_each_other(tiny_model, pieces, tokenizer, untouched):
    model = tiny_model()
    requests = [pieces(seed=seed) for seed in range(4)]

    def ask(request, kept):
        cache = BlendCache(model, kept, recompute_ratio=0.15)
        return generated(model, cache.inputs(tokenizer, **request), cache, max_new_tokens=3)

    shared = memory()
    with untouched(model), ThreadPoolExecutor(4) as pool:
        alone = [ask(request, memory()) for request in requests]
        together = list(pool.map(ask, requests, [shared] * 4))
    assert all(torch.equal(one, other) for one, other in zip(alone, together, strict=True))


def test_model_without_bos_keeps_chunks_behind_nothing(tiny_model, pieces, tokenizer):
    model = tiny_model(bos_token_id=None)
    kept = memory()
    request = pieces()
    cache = BlendCache(model, kept, recompute_ratio=1.0)
    assert cache.state.chunk_prefix_ids == ()
    as_stock(model, cache.inputs(tokenizer, **request), cache)
    again = BlendCache(model, kept, recompute_ratio=1.0)
    request["prefix"] = request["chunks"].pop(0)
    as_stock(model, ids_of(request), again)
    assert again.report.exact_tokens == 17


def test_sink_of_ones_own_stands_before_each_chunk(shared_model, pieces, tokenizer):
    model = shared_model()
    kept = memory()
    request = pieces()
    cache = BlendCache(model, kept, chunk_prefix_ids=tuple(request["prefix"]), recompute_ratio=0.0)
    generated(model, cache.inputs(tokenizer, **request), cache)
    assert cache.report.exact_tokens == 5 + 17
    assert cache.report.reusable_tokens == 23 + 31
    assert kept.contains(ChunkKey(fingerprint(model), request["prefix"], request["chunks"][1]))
