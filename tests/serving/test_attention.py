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
from hf_blend.serving.paged import BlendedPagedCache

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
def test_walk_requests_gives_the_answers_of_stock_batching_and_of_lone_requests(
    family, shared_model, bench, untouched, monkeypatch
):
    model, prompts, seen = shared_model(family, **FAMILIES[family]), asked(bench), []

    def both(stock, module, query, key, value, mask, *args, cache, **kwargs):
        key, value = cache.update(key, value, module.layer_idx, kwargs)
        expected = stock(module, query, key, value, mask, *args, **kwargs)[0]
        updated = SimpleNamespace(update=lambda *given: (key, value))
        found = attend_by_request(stock, module, query, key, value, mask, *args, cache=updated, **kwargs)[0]
        assert float((found - expected).abs().max() / expected.abs().max()) < 2e-6
        seen.append(len(kwargs["cu_seq_lens_k"]) - 1)
        return found, None

    stock = answers(model, bench, prompts)
    monkeypatch.setattr(attention, "attend_by_request", both)
    with untouched(model), walking(model):
        assert answers(model, bench, prompts) == stock
    assert max(seen) > 3, "no step had several requests"
    alone = [
        model.generate(torch.tensor([ids]), generation_config=bench.generation())[0, len(ids) :] for ids in prompts
    ]
    assert [ids.tolist() for ids in alone] == stock


@contextmanager
def watched(monkeypatch, model):
    """Per attention call of a step: the scores that are computed for a head, rows and keys of the requests, errors."""
    calls, own, in_place, now = [], functional.scaled_dot_product_attention, attention._attend_in_place, []

    def scores(query, key, *args, **kwargs):
        if now:
            now[-1].append(query.shape[1] * query.shape[2] * key.shape[2] // model.config.num_attention_heads)
        return own(query, key, *args, **kwargs)

    def scores_in_place(query, blocks, slices, scaling):
        now[-1].append(sum(one.stop - one.start for one in slices))
        slices_of.append(len(slices))
        return in_place(query, blocks, slices, scaling)

    def watch(stock, module, query, key, value, mask, *args, cache, **kwargs):
        now.append([])
        reads = kwargs["read_index"][0]
        found = taken(stock, module, query, key, value, mask, *args, cache=cache, **kwargs)[0]
        keys = kwargs["cu_seq_lens_k"]["full_attention"]
        if len(reads):
            key, value = (one[reads].transpose(0, 1)[None] for one in cache.rows(module.layer_idx))
        groups = query.shape[1] // key.shape[1]
        key, value = (one.repeat_interleave(groups, dim=1).double() for one in (key, value))
        expected = ((query.double() @ key.mT) * kwargs["scaling"] + mask.double()).softmax(3) @ value
        error = float((found - expected.transpose(1, 2)).abs().max() / expected.abs().max())
        calls.append((sum(now.pop()), kwargs["cu_seq_lens_q"].diff(), keys.diff(), error))
        return found, None

    taken, slices_of = attention.attend_by_request, []
    monkeypatch.setattr(functional, "scaled_dot_product_attention", scores)
    monkeypatch.setattr(attention, "_attend_in_place", scores_in_place)
    monkeypatch.setattr(attention, "attend_by_request", watch)
    yield calls, slices_of


@pytest.mark.parametrize(("family", "most"), [("llama", 12), ("qwen3", 1), ("llama", 0)])  # slices, one, copied
def test_a_step_computes_the_scores_of_each_request_alone(family, most, shared_model, bench, store, monkeypatch):
    model = shared_model(family, **FAMILIES[family])
    store.add(model, None, bench.workload.library)
    monkeypatch.setattr(attention, "MOST_SLICES", most)
    long = bench.generation(max_new_tokens=24, eos_token_id=-1)  # they take blocks in turn
    with watched(monkeypatch, model) as (calls, slices), bench.engine(
        model, store, recompute_ratio=0.3, generation_config=long
    ) as engine:  # fmt: skip
        bench.answers(engine, bench.workload.asks(6))
    crowded = [call for call in calls if len(call[1]) > 2]
    assert len(crowded) >= model.config.num_hidden_layers
    for scores, rows, keys, _ in crowded:
        assert scores == int((rows * keys).sum()) < int(rows.sum() * keys.sum())
    assert max(error for *_, error in calls) < 2e-6
    assert {1, 2} <= {*slices} if most == 12 else {*slices} == ({1} if most else set())


@pytest.mark.parametrize("name", attention.SPECIAL)
def test_a_row_meets_no_blocks_in_place_where_attention_has_more_than_scores(name, monkeypatch):
    states, given = torch.randn(1, 2, 3, 4), {"scaling": 0.5, "cu_seq_lens_k": torch.tensor([0, 3]), name: 7.0}
    cache = BlendedPagedCache.__new__(BlendedPagedCache)
    cache.update = lambda *_: (states, states)
    monkeypatch.setattr(attention, "_attend_in_place", None)

    def stock(module, query, key, value, mask, **seen):
        assert seen[name] == 7.0
        return query.transpose(1, 2), None

    found, _ = attend_by_request(
        stock, SimpleNamespace(layer_idx=0), states[:, :, :1], states, states, torch.zeros(1, 1, 1, 3),
        cache=cache, cu_seq_lens_q=torch.tensor([0, 1]), **given,
    )  # fmt: skip
    assert torch.equal(found, states[:, :, :1].transpose(1, 2))


def test_blocks_of_a_prompt_are_in_a_row_between_those_that_are_kept_of_others(shared_model, bench, store):
    with bench.engine(shared_model("llama"), store, {"num_blocks": 24}) as engine:
        prompts = [bench.Ask([1, *bench.draw(length, length)]) for length in (50, 20, 40, 60)]
        assert len(bench.answers(engine, prompts, blend=False)) == 4
        paged, free = engine.paged, set(range(2, 26)) - {*engine.paged.allocator.ledger.cached_blocks}
        assert len(free) == 14
        for tokens, name in ((6 * 16, "long"), (16 + 1, "short"), (16 + 1, "other")):
            assert paged.reserve(SimpleNamespace(request_id=name, current_len=lambda: 0), tokens)
        tables = [paged.allocator.block_table[name] for name in ("long", "short", "other")]
        assert all(table == list(range(table[0], table[0] + len(table))) for table in tables)
        assert {one for table in tables for one in table} < free


def flash(module, query, key, value, attention_mask, dropout=0.0, scaling=None, cache=None, **kwargs):
    """What flash attention computes: no mask, causal at the bottom right, each request of a step for itself."""
    if cache is not None:  # transformers 5.24 has updated it before
        key, value = cache.update(key, value, module.layer_idx, kwargs)
    ends = [(0, query.shape[2], 0, key.shape[2])]
    if "read_index" in kwargs:  # a step
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
