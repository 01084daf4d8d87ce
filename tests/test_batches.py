# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Requests side by side: each has its own prefix, chunks, length and hits, and its own answer."""

import copy
import functools

import pytest
import torch

from hf_blend import BlendCache, ChunkStore
from hf_blend.verify.zoo import tiny_model as zoo_model
from tests.conftest import slow_but

families = pytest.mark.parametrize(
    "family", slow_but("llama", "gemma3_text", among=["llama", "gemma3_text", "qwen3_moe", "gpt_neox"])
)
LENGTH = {"max_new_tokens": 10, "eos_token_id": None}
MODES = {
    "greedy": {"do_sample": False},
    "beams": {"do_sample": False, "num_beams": 4},
    "sampling": {"do_sample": True, "temperature": 1.5, "top_k": 30},
}
REQUESTS = (  # different prefixes, numbers of chunks, lengths
    {"chunks": (17, 23, 31), "prefix": 4, "question": 9},
    {"chunks": (29,), "prefix": 0, "question": 3, "seed": 1},
    {"chunks": (8, 12, 5, 9), "prefix": 11, "question": 6, "seed": 2},
)


@functools.cache
def model_of(family, seed=0):
    return zoo_model(family, seed=seed)


@functools.cache
def store_of(family):
    return ChunkStore.open("memory://")


def run(model, inputs, cache=None, seed=11, **mode):
    torch.manual_seed(seed)
    return model.generate(**inputs, past_key_values=cache, **{**LENGTH, "do_sample": False, **mode})


def ask(model, store, tokenizer, requests, ratio, **mode):
    """Answers, the cache, and the inputs."""
    cache = BlendCache(model, store, recompute_ratio=ratio)
    given = requests[0] if len(requests) == 1 else {name: [one[name] for one in requests] for name in requests[0]}
    inputs = cache.inputs(tokenizer, **given)
    return run(model, inputs, cache, **mode)[:, inputs["input_ids"].shape[1] :], cache, inputs


@families
@pytest.mark.parametrize("mode", MODES)
def test_at_ratio_one_a_batch_gives_the_tokens_of_stock_generate(pieces, tokenizer, family, mode):
    model, requests = model_of(family), [pieces(**one) for one in REQUESTS]
    got, cache, inputs = ask(model, store_of(family), tokenizer, requests, 1.0, **MODES[mode])
    assert torch.equal(got, run(model, inputs, **MODES[mode])[:, inputs["input_ids"].shape[1] :])
    assert cache.report.reusable_tokens > 0


@families
@pytest.mark.parametrize("mode", ["greedy", "beams"])
def test_at_a_small_ratio_a_batch_gives_the_tokens_of_its_single_requests(pieces, tokenizer, family, mode):
    model, requests = model_of(family), [pieces(**one) for one in REQUESTS]
    together, cache, _ = ask(model, store_of(family), tokenizer, requests, 0.15, **MODES[mode])
    assert 0 < cache.report.charged_budget < 0.8
    for row, request in enumerate(requests):
        alone, _, _ = ask(model, store_of(family), tokenizer, [request], 0.15, **MODES[mode])
        assert torch.equal(together[row], alone[0])


@families
def test_what_is_sampled_from_is_that_of_the_single_requests(pieces, tokenizer, family):
    """Rows of a batch share one random stream, so equal seeds give equal draws for the batch as a whole only."""
    model, requests = model_of(family), [pieces(**one) for one in REQUESTS]
    again = [ask(model, store_of(family), tokenizer, requests, 0.15, **MODES["sampling"])[0] for _ in range(2)]
    assert torch.equal(*again)
    wish = {**MODES["sampling"], "max_new_tokens": 1, "output_logits": True, "return_dict_in_generate": True}

    def logits_of(some):
        cache = BlendCache(model, store_of(family), recompute_ratio=0.15)
        given = some[0] if len(some) == 1 else {name: [one[name] for one in some] for name in some[0]}
        return run(model, cache.inputs(tokenizer, **given), cache, **wish).logits[0]

    together, alone = logits_of(requests), torch.cat([logits_of([request]) for request in requests])
    assert (together - alone).abs().max() <= 1e-5
    seeds = [torch.multinomial(one.softmax(-1), 20, True, generator=torch.Generator().manual_seed(3)) for one in alone]
    for row, drawn in enumerate(seeds):
        same = torch.multinomial(together[row].softmax(-1), 20, True, generator=torch.Generator().manual_seed(3))
        assert torch.equal(drawn, same)


@families
@pytest.mark.parametrize("mode", ["draft model", "prompt lookup"])
@pytest.mark.parametrize("ratio", [1.0, 0.15])
def test_assisted_decoding_which_stock_has_for_single_requests_gives_the_same(pieces, tokenizer, family, mode, ratio):
    model, request = model_of(family), pieces(**REQUESTS[0])
    given = {"assistant_model": model_of(family, seed=1)} if mode == "draft model" else {"prompt_lookup_num_tokens": 3}
    got, cache, inputs = ask(model, store_of(family), tokenizer, [request], ratio, **given)
    if ratio == 1.0:
        wanted = run(model, inputs)[:, inputs["input_ids"].shape[1] :]
    else:
        wanted, _, _ = ask(model, store_of(family), tokenizer, [request], ratio)
    assert torch.equal(got, wanted)
    assert cache.report.reusable_tokens == 71


def test_hit_rates_may_differ_from_row_to_row(shared_model, pieces):
    """Found by content: all chunks of the first request are stored, one of the second, none of the third."""
    model, store, requests = shared_model(), ChunkStore.open("memory://"), [pieces(**one) for one in REQUESTS]
    store.add(model, None, [*requests[0]["chunks"], requests[2]["chunks"][1]])
    rows = [[*one["prefix"], *sum(one["chunks"], []), *one["question"]] for one in requests]
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    cache = BlendCache(model, store, recompute_ratio=0.15)
    together = run(model, {"input_ids": ids, "attention_mask": mask}, cache)[:, width:]
    assert cache.report.reusable_tokens == 71 + 12
    assert [len(chosen) for chosen in cache.report.chosen_columns] == [11, 0, 2]
    for row, tokens in enumerate(rows):
        single = BlendCache(model, store, recompute_ratio=0.15)
        alone = run(model, {"input_ids": torch.tensor([tokens])}, single)[0, len(tokens) :]
        assert torch.equal(together[row], alone)


@pytest.mark.parametrize("expand", [{"num_return_sequences": 3, "do_sample": True}, {"num_beams": 2}])
def test_repeated_rows_of_a_batch_choose_alike(shared_model, pieces, tokenizer, expand):
    model, requests = shared_model(), [pieces(**one) for one in REQUESTS]
    _, cache, _ = ask(model, ChunkStore.open("memory://"), tokenizer, requests, 0.15, **expand)
    repeats = next(iter(expand.values()))
    chosen = cache.report.chosen_columns
    assert len(chosen) == 3 * repeats
    assert all(chosen[row] == chosen[row - row % repeats] for row in range(len(chosen)))


def test_a_batch_keeps_a_conversation_for_each_of_its_rows(shared_model, pieces, tokenizer):
    model, store, requests = shared_model(), ChunkStore.open("memory://"), [pieces(**one) for one in REQUESTS]
    later = [pieces((14, 10), seed=5), pieces((25,), seed=6, question=4), pieces((6, 7, 8), seed=7)]
    first, cache, inputs = ask(model, store, tokenizer, requests, 1.0)
    output = torch.cat((inputs["input_ids"], first), dim=1)
    turn = {name: [one[name] for one in later] for name in ("chunks", "question")}
    inputs = cache.inputs(tokenizer, **turn, history=output)
    got = run(model, inputs, cache)
    assert cache.report.reusable_tokens == 24 + 25 + 21
    assert torch.equal(got, run(model, inputs))


def test_a_copied_cache_knows_the_padding_between_the_turns_of_its_batch(shared_model, tokenizer):
    model, said, output = shared_model(), [[1, 4], [1, 4]], None
    cache = BlendCache(model, ChunkStore.open("memory://"), recompute_ratio=1.0)
    turns = (
        {"prefix": [1, 4], "chunks": [[[*range(10, 40)]], [[*range(20, 60)]]], "question": [[5, 6], [7, 8, 9]]},
        {"chunks": [[], [[*range(50, 70)]]], "question": [[15, 16], [17, 18, 19]]},
        {"chunks": [[], []], "question": [[25, 26, 33, 34], [27, 28, 29]]},
    )
    for number, turn in enumerate(turns):
        cache = copy.deepcopy(cache) if number == 2 else cache
        inputs = cache.inputs(tokenizer, **turn, history=output)
        output = run(model, inputs, cache)
        for row, answer in enumerate(output[:, inputs["input_ids"].shape[1] :]):
            said[row] += [*sum(turn["chunks"][row], []), *turn["question"][row]]
            alone = run(model, {"input_ids": torch.tensor([said[row]])})[0, len(said[row]) :]
            assert torch.equal(answer, alone), f"turn {number}, row {row}"
            said[row] += answer.tolist()


def test_a_row_that_was_done_earlier_is_masked_in_the_next_turn(shared_model, pieces, tokenizer):
    model, store, requests = shared_model(), ChunkStore.open("memory://"), [pieces(**one) for one in REQUESTS[:2]]
    answers, cache, inputs = ask(model, store, tokenizer, requests, 1.0)
    output = torch.cat((inputs["input_ids"], answers), dim=1)
    output[1, -4:] = tokenizer.pad_token_id
    again = cache.inputs(tokenizer, chunks=[[], []], question=[[5, 6], [7, 8]], history=output)
    assert again["attention_mask"][1, -6:].tolist() == [0] * 4 + [1] * 2
    assert again["attention_mask"][0, -6:].tolist() == [1] * 6
    assert torch.equal(again["attention_mask"][:, : inputs["input_ids"].shape[1]], inputs["attention_mask"])


def test_random_choice_in_a_batch_is_that_of_the_single_requests(shared_model):
    model, store = shared_model("llama"), ChunkStore.open("memory://")
    requests = [
        {"prefix": [1, 7, 8], "chunks": [list(range(20, 40)), list(range(50, 65))], "question": [9, 10]},
        {"prefix": [1], "chunks": [list(range(30, 70)), list(range(40, 52))], "question": [11, 12, 13]},
    ]

    def chosen(requests):
        cache = BlendCache(model, store, selector="random", recompute_ratio=0.15)
        inputs = cache.inputs(None, **{name: [one[name] for one in requests] for name in requests[0]})
        model.generate(**inputs, past_key_values=cache, max_new_tokens=1, do_sample=False)
        pads = (inputs["attention_mask"] == 0).sum(dim=1).tolist()
        return [[column - pad for column in row] for row, pad in zip(cache.report.chosen_columns, pads, strict=True)]

    assert chosen(requests) == [chosen([one])[0] for one in requests]
    assert all(chosen(requests))
