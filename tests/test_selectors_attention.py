# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Selectors that look at attention see what the model looks at, and pay for it."""

import copy

import pytest
import torch

from hf_blend import BlendCache, ChunkStore, plugins
from hf_blend.errors import ConfigError
from hf_blend.prefill.probing import AttentionObserver
from hf_blend.selectors.attention import Attention, received
from hf_blend.selectors.base import Selector, by_turns, layer_numbers

FAMILIES = ("llama", "qwen3", "gpt_neox", "gemma")
LOOKING = ("auto", "dependency", "query-attention", "attention-x-deviation", "inter-attention")


def blended(model, tokenizer, request, hear=None, **settings):
    """One prefill; gives the cache and the logits behind the prompt."""
    cache = BlendCache(model, ChunkStore.open("memory://"), **settings)
    cache.listener = None if hear is None else AttentionObserver(hear)
    inputs = cache.inputs(tokenizer, **request)
    output = model.generate(
        **inputs, past_key_values=cache, max_new_tokens=1, do_sample=False, output_logits=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    return cache, output.logits[0], inputs


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_heard_is_the_models_own_attention(shared_model, tokenizer, pieces, family, attention):
    model, heard = shared_model(family, attention), {}
    hear = lambda layer, seen, weights: heard.update({layer: weights})  # noqa: E731
    _, _, inputs = blended(model, tokenizer, pieces(), hear, selector="full", recompute_ratio=1.0)
    with torch.no_grad():
        plain = copy.deepcopy(model)
        plain.set_attn_implementation("eager")
        wanted = plain(**inputs, output_attentions=True).attentions
    for layer, weights in heard.items():
        rows = weights.shape[2]
        torch.testing.assert_close(weights, wanted[layer][:, :, -rows:], rtol=1e-3, atol=1e-4)
    assert sorted(heard) == list(range(4))


def test_listening_changes_no_answer(shared_model, tokenizer, pieces):
    settings = {"selector": "kv-deviation", "recompute_ratio": 0.3}
    _, plain, _ = blended(shared_model(), tokenizer, pieces(), **settings)
    _, heard, _ = blended(shared_model(), tokenizer, pieces(), lambda *_: None, **settings)
    torch.testing.assert_close(heard, plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", LOOKING)
@pytest.mark.parametrize("family", FAMILIES)
def test_recomputing_all_of_it_is_a_full_prefill(shared_model, tokenizer, pieces, family, name):
    model = shared_model(family)
    _, logits, inputs = blended(model, tokenizer, pieces(), selector=name, recompute_ratio=1.0)
    with torch.no_grad():
        torch.testing.assert_close(logits, model(**inputs).logits[:, -1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", LOOKING)
def test_looking_leaves_the_model_untouched_and_is_charged(tiny_model, untouched, tokenizer, pieces, name):
    model = tiny_model()
    with untouched(model):
        cache, _, _ = blended(model, tokenizer, pieces(), selector=name, recompute_ratio=0.1)
    assert cache.report.scoring_flops > 0
    assert cache.report.charged_budget > 0.1 * 0.8


@pytest.mark.parametrize("name", LOOKING)
def test_an_entry_of_a_batch_gets_what_it_gets_alone(shared_model, tokenizer, pieces, name):
    requests = [pieces(), pieces((11, 29), question=5, seed=3)]
    together = {part: [request[part] for request in requests] for part in ("chunks", "question")}
    together["prefix"] = requests[0]["prefix"]
    requests[1]["prefix"] = requests[0]["prefix"]
    settings = {"selector": name, "recompute_ratio": 0.2}
    both, logits, inputs = blended(shared_model(), tokenizer, together, **settings)
    for row, request in enumerate(requests):
        alone, own, _ = blended(shared_model(), tokenizer, request, **settings)
        padding = int((inputs["attention_mask"][row] == 0).sum())
        assert [column - padding for column in both.report.chosen_columns[row]] == alone.report.chosen_columns[0]
        torch.testing.assert_close(logits[row], own[0], rtol=1e-3, atol=1e-3)


def test_a_selector_at_layer_0_computes_nothing_else_of_it(shared_model, tokenizer, pieces):
    settings = {"selector": "dependency", "selector_options": {"candidates": 0}, "recompute_ratio": 0.2}
    cache, _, _ = blended(shared_model(), tokenizer, pieces(), **settings)
    work = [(one.layer, one.kv_only, int((one.flowing & one.reusable).sum())) for one in cache.report._work]
    assert work[:2] == [(0, True, 71), (0, False, 15)]
    assert len(cache.report.chosen_columns[0]) == 15


def test_candidates_bound_what_is_looked_at(shared_model, tokenizer, pieces):
    cache, _, _ = blended(shared_model(), tokenizer, pieces(), selector="dependency", recompute_ratio=0.2)
    work = [(one.layer, one.kv_only, int((one.flowing & one.reusable).sum())) for one in cache.report._work]
    assert work[:2] == [(0, True, 43), (0, False, 15)]


def test_auto_spends_early_and_its_mean_is_the_asked_ratio():
    one = plugins.load("selectors", "auto")({})
    assert one.schedule(0.05, 8) == pytest.approx({0: 0.15, 2: 0.05 / 3})
    assert one.schedule(1.0, 8) == {0: 1.0, 2: 1.0}
    for layers in (2, 4, 12, 32):
        for ratio in (0.01, 0.1, 0.4, 0.9):
            shares = one.schedule(ratio, layers)
            early = max(shares) or layers
            shares = {early: 0.0, **shares}
            assert (shares[0] * early + shares[early] * (layers - early)) / layers == pytest.approx(ratio)


def test_a_conversation_goes_on(shared_model, tokenizer, pieces):
    model, request = shared_model(), pieces()
    cache = BlendCache(model, ChunkStore.open("memory://"), selector="auto", recompute_ratio=1.0)
    inputs = cache.inputs(tokenizer, **request)
    first = model.generate(**inputs, past_key_values=cache, max_new_tokens=3, do_sample=False)
    more = {"chunks": pieces(seed=5)["chunks"], "question": pieces(seed=5)["question"]}
    inputs = cache.inputs(tokenizer, history=first, **more)
    got = model.generate(**inputs, past_key_values=cache, max_new_tokens=3, do_sample=False)
    assert torch.equal(got, model.generate(**inputs, max_new_tokens=3, do_sample=False))


def test_attention_is_shared_out_by_hand():
    queries = torch.tensor([[[[1.0], [2.0]], [[0.0], [1.0]]]])  # two heads, two rows
    keys, values = torch.tensor([[[[1.0], [2.0], [3.0]]]]), torch.tensor([[[[1.0], [10.0], [100.0]]]])
    spent = []
    seen = Attention(queries, keys, values, torch.tensor([[1, 2]]), 0, None, 1.0, charge=spent.append)
    weights = seen.weights(slice(None))
    torch.testing.assert_close(weights[0, 0, 0], torch.tensor([1.0, 2.0, -torch.inf]).softmax(0))
    torch.testing.assert_close(weights[0, 1, 1], torch.tensor([1.0, 2.0, 3.0]).softmax(0))
    assert [flops() for flops in spent] == [2 * 1 * 2 * (2 + 3)]  # two FLOPs, width 1, two heads, keys that are seen
    torch.testing.assert_close(seen.outputs(weights), weights @ values)
    assert seen.first_key().tolist() == [0]


@pytest.mark.parametrize(
    ("reduce", "wanted"), [("mean", [0.3, 0.2]), ("last", [0.4, 0.1]), ("max", [0.4, 0.3]), ("l2", [0.4472, 0.3162])]
)
def test_what_is_received_by_hand(reduce, wanted):
    weights = torch.tensor([[[[0.9, 0.9], [0.2, 0.3], [0.4, 0.1]]]])
    seen = Attention(torch.zeros(1, 1, 3, 1), torch.zeros(1, 1, 2, 1), torch.ones(1, 1, 2, 1), torch.zeros(1, 3))
    rows = torch.tensor([[False, True, True]])
    torch.testing.assert_close(received(seen, weights, rows, reduce), torch.tensor([wanted]), rtol=1e-3, atol=0)


def test_chunks_take_turns_by_share():
    scores, chunk = torch.tensor([[5.0, 4, 3, 2, 1, 0]]), torch.tensor([[0, 0, 0, 0, 1, 1]])
    turns = by_turns(scores, chunk, torch.tensor([[1.0, 1, 1, 1, 2, 2]]))
    assert turns.argsort(dim=1, descending=True, stable=True)[0].tolist() == [4, 0, 5, 1, 2, 3]


@pytest.mark.parametrize(
    ("given", "wanted"),
    [("all", [0, 1, 2, 3, 4, 5]), ("last", [5]), ("middle", [2, 3]), ("0,3", [0, 3]), (2, [2]), ((4, 1), [1, 4])],
)
def test_layers_are_named_or_numbered(given, wanted):
    assert layer_numbers(given, 6) == wanted


@pytest.mark.parametrize("given", ["first", "6", "-1", (), "1,x"])
def test_layers_that_do_not_exist_are_refused(given):
    with pytest.raises(ConfigError, match="layers is"):
        layer_numbers(given, 6)


def test_numbers_may_come_as_text_and_nothing_else_may():
    compose = plugins.load("selectors", "compose")
    assert compose({"seed_tokens": "3", "per_chunk": "true"}).options["seed_tokens"] == 3
    with pytest.raises(ConfigError, match=r"seed_tokens='many'.*int"):
        compose({"seed_tokens": "many"})
    with pytest.raises(ConfigError, match="inner_options"):
        plugins.load("selectors", "auto")({"inner_options": {}})


def test_a_selector_may_leave_the_schedule_to_the_config():
    assert Selector.schedule(None, 0.1, 4) is None
    assert Selector.candidates(None, 0.1) is None
