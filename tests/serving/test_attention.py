# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A step that walks its requests computes what stock batching does, and no score between two requests."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional
from transformers import AttentionInterface
from transformers.generation.continuous_batching import continuous_api

from hf_blend.serving import attention
from hf_blend.serving.attention import attend_by_request, walk_requests

FAMILIES = {
    "llama": {},
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": 24},
    "gemma3_text": {"sliding_window": 24},
}
LENGTHS = (5, 90, 33, 1, 70, 64)  # some are cut into several steps, some reach beyond the window


@contextmanager
def walking(model):
    handles = walk_requests(model)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def asked(bench):
    return [bench.draw(length, number) for number, length in enumerate(LENGTHS)]


def answers(model, bench, prompts):
    found = model.generate_batch(prompts, bench.generation(), bench.batching(), warmup=False)
    assert not [output.error for output in found.values() if output.error]
    return [output.generated_tokens for output in found.values()]


@pytest.mark.parametrize("family", FAMILIES)
def test_walk_requests_gives_the_answers_of_stock_batching_and_of_lone_requests(family, shared_model, bench):
    model, prompts = shared_model(family, **FAMILIES[family]), asked(bench)
    stock = answers(model, bench, prompts)
    with walking(model):
        assert answers(model, bench, prompts) == stock
    alone = [
        model.generate(torch.tensor([ids]), generation_config=bench.generation())[0, len(ids) :] for ids in prompts
    ]
    assert [ids.tolist() for ids in alone] == stock


@pytest.mark.parametrize("family", FAMILIES)
def test_attend_by_request_computes_what_the_mask_of_the_whole_step_says(family, shared_model, bench, monkeypatch):
    model, seen, furthest = shared_model(family, **FAMILIES[family]), [], [0.0]

    def both(stock, module, query, key, value, mask, *args, cache, **kwargs):
        key, value = cache.update(key, value, module.layer_idx, kwargs)
        expected = stock(module, query, key, value, mask, *args, **kwargs)[0]
        updated = SimpleNamespace(update=lambda *given: (key, value))
        found = attend_by_request(stock, module, query, key, value, mask, *args, cache=updated, **kwargs)[0]
        assert found.shape == expected.shape
        furthest[0] = max(furthest[0], float((found - expected).abs().max() / expected.abs().max()))
        seen.append(len(kwargs["cu_seq_lens_k"]) - 1)
        return expected, None

    monkeypatch.setattr(attention, "attend_by_request", both)
    with walking(model):
        answers(model, bench, asked(bench))
    assert max(seen) > 3, "no step had several requests"
    assert furthest[0] < 2e-6


@contextmanager
def counted(monkeypatch, model):
    """Per attention call of a step: the scores that are computed for a head, and the sum over the requests."""
    rows, own, now = [], functional.scaled_dot_product_attention, []

    def scores(query, key, *args, **kwargs):
        if now:
            now[-1] += query.shape[1] * query.shape[2] * key.shape[2] // model.config.num_attention_heads
        return own(query, key, *args, **kwargs)

    def watch(stock, module, query, key, value, mask, *args, **kwargs):
        now.append(0)
        found = taken(stock, module, query, key, value, mask, *args, **kwargs)
        rows.append((now.pop(), kwargs["cu_seq_lens_q"].diff(), kwargs["cu_seq_lens_k"]["full_attention"].diff()))
        return found

    taken = attention.attend_by_request
    monkeypatch.setattr(functional, "scaled_dot_product_attention", scores)
    monkeypatch.setattr(attention, "attend_by_request", watch)
    yield rows


def test_a_step_computes_the_scores_of_each_request_alone(shared_model, bench, store, monkeypatch):
    model = shared_model("llama")
    store.add(model, None, bench.workload.library)
    with counted(monkeypatch, model) as rows, bench.engine(model, store, recompute_ratio=0.3) as engine:
        bench.answers(engine, bench.workload.asks(6))
    crowded = [row for row in rows if len(row[1]) > 2]
    assert len(crowded) >= model.config.num_hidden_layers
    for scores, of_rows, of_keys in crowded:
        assert scores == int((of_rows * of_keys).sum()) < int(of_rows.sum() * of_keys.sum())


def test_a_step_of_a_model_that_was_walked_is_stock_again(shared_model, bench, untouched):
    model = shared_model("llama")
    with untouched(model), walking(model):
        answers(model, bench, asked(bench)[:2])


def flash(module, query, key, value, attention_mask, dropout=0.0, scaling=None, cache=None, **kwargs):
    """What flash attention computes: no mask, causal at the bottom right, each request of a step for itself."""
    if cache is None:
        ends = [(0, query.shape[2], 0, key.shape[2])]
    else:
        key, value = cache.update(key, value, module.layer_idx, kwargs)
        rows, keys = kwargs["cu_seq_lens_q"].tolist(), kwargs["cu_seq_lens_k"].tolist()
        ends = list(zip(rows, rows[1:], keys, keys[1:], strict=False))
    assert attention_mask is None
    done = []
    for start, end, first, last in ends:
        seen = torch.ones(end - start, last - first, dtype=torch.bool).tril(last - first - (end - start))
        states = query[:, :, start:end], key[:, :, first:last], value[:, :, first:last]
        done.append(functional.scaled_dot_product_attention(*states, seen, scale=scaling, enable_gqa=True))
    return torch.cat(done, dim=2).transpose(1, 2).contiguous(), None


def switch(model, name):
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation_internal = name


def test_an_engine_takes_flash_attention_where_stock_batching_would(tiny_model, bench, store, monkeypatch):
    model, asks = tiny_model("llama"), bench.workload.asks(4)
    store.add(model, None, bench.workload.library)
    monkeypatch.setitem(AttentionInterface._global_mapping, "flash_attention_2", flash)
    monkeypatch.setattr(continuous_api, "is_flash_attn_2_available", lambda **given: True)
    monkeypatch.setattr(type(model), "set_attn_implementation", switch)
    with bench.engine(model, store, recompute_ratio=0.3) as engine:
        assert model.config._attn_implementation == "flash_attention_2"
        monkeypatch.setattr(attention, "attend_by_request", None)  # its own kernel walks the requests
        answers = bench.answers(engine, asks)
    assert model.config._attn_implementation == "sdpa"
    assert answers == [bench.lone_answer(model, store, ask.ids, recompute_ratio=0.3) for ask in asks]
