# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What a forward with a blend cache gives, beside stock; whose forward it may be; what may be done with the cache."""

import copy
import io
import itertools
import logging
import pickle
import re
from functools import cache as remembered

import pytest
import torch
from transformers import DynamicCache

from hf_blend import BlendCache, ChunkStore
from hf_blend.cache.blend_cache import _warn_once
from hf_blend.errors import ConfigError
from hf_blend.verify.zoo import tiny_model as zoo_model

FAMILIES = ("llama", "gemma3_text", "gpt_neox")
RATIOS = (0.0, 0.15, 1.0)
GREEDY = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
LOUD = {"return_dict_in_generate": True, "output_logits": True}
TOLERANCE = 2e-5  # of logits of size 1 to 10, float32
BATCH = ({"chunks": (17, 23, 31)}, {"chunks": (29,), "seed": 1, "question": 7})


@remembered
def model_of(family):
    """A model that is not shared with other files: transformers leaves hooks on one that has given hidden states."""
    return zoo_model(family)


def asked(pieces, tokenizer, model, ratio, batch, announced, store):
    """A cache and the inputs that go with it; the prompts are announced, or found in the store by their content."""
    requests = [pieces(**one) for one in BATCH[:batch]]
    given = requests[0] if batch == 1 else {name: [one[name] for one in requests] for name in requests[0]}
    known = BlendCache(model, store, recompute_ratio=ratio)
    inputs = known.inputs(tokenizer, **given)
    store.add(model, None, [chunk for one in requests for chunk in one["chunks"]])
    cache = known if announced else BlendCache(model, store, recompute_ratio=ratio)
    cache.get_seq_length()
    places = (inputs["attention_mask"].cumsum(-1) - 1).clamp_min(0)
    return cache, {**inputs, "position_ids": places}


def apart(one, other, real=None):
    """Largest absolute difference, at real tokens only."""
    assert one.shape == other.shape
    return float((one - other).abs()[real if real is not None else slice(None)].max())


# each family with one or two forms of a request; all with all in the slow suite
FORMS = ((1, True), (1, False), (2, True), (2, False))  # requests in the batch, announced
ONCE = {("llama", FORMS[1]), ("llama", FORMS[2]), ("gemma3_text", FORMS[3]), ("gpt_neox", FORMS[0])}
diagonal = pytest.mark.parametrize(
    ("family", "request_of"),
    [pytest.param(*one, marks=[] if one in ONCE else pytest.mark.slow) for one in itertools.product(FAMILIES, FORMS)],
    indirect=["request_of"],
)


@pytest.fixture
def request_of(request, pieces, tokenizer):
    """Give `make(model, ratio, store)`: a cache and its inputs, of one request or two, announced or not."""
    return lambda *args: asked(pieces, tokenizer, *args[:2], *request.param, args[2])


def full_outputs(ids):
    """The ways to ask for an output of every token, or of some by their places."""
    return {
        "nothing": {},
        "all logits": {"logits_to_keep": 0},
        "places": {"logits_to_keep": torch.tensor([3, 40, ids.shape[1] - 1])},
        "labels": {"labels": ids},
        "labels of the last": {"labels": ids[:, -7:], "logits_to_keep": 7},
        "hidden states": {"output_hidden_states": True, "logits_to_keep": 1},
    }


@torch.no_grad()
@diagonal
def test_outputs_of_every_token_are_those_of_a_stock_cache(request_of, family):
    model, store = model_of(family), ChunkStore.open("memory://")
    for ratio in RATIOS:
        _, inputs = request_of(model, ratio, store)
        real = inputs["attention_mask"].bool()
        for name, given in full_outputs(inputs["input_ids"]).items():
            blend, _ = request_of(model, ratio, store)
            stock = model(**inputs, past_key_values=DynamicCache(config=model.config), **given)
            got = model(**inputs, past_key_values=blend, **given)
            shown = real[:, given["logits_to_keep"]] if name == "places" else real[:, -got.logits.shape[1] :]
            assert apart(got.logits, stock.logits, shown) <= TOLERANCE, name
            if stock.loss is not None:
                assert abs(float(got.loss - stock.loss)) <= TOLERANCE
            for mine, theirs in zip(got.hidden_states or (), stock.hidden_states or (), strict=True):
                assert apart(mine, theirs, real) <= TOLERANCE * float(theirs.abs().max())
            assert blend.report.fallback_reason
            assert (blend.report.reusable_tokens, blend.report.prompt_tokens) == (0, int(real.sum()))
            assert blend.get_seq_length() == real.shape[1]


@torch.no_grad()
def test_attentions_are_those_of_a_stock_cache(tiny_model, pieces, tokenizer):
    model, store = tiny_model(attn_implementation="eager"), ChunkStore.open("memory://")
    cache, inputs = asked(pieces, tokenizer, model, 0.15, 1, True, store)
    got = model(**inputs, past_key_values=cache, logits_to_keep=1, output_attentions=True)
    stock = model(**inputs, past_key_values=DynamicCache(), logits_to_keep=1, output_attentions=True)
    for mine, theirs in zip(got.attentions, stock.attentions, strict=True):
        assert apart(mine, theirs) <= 1e-5
    assert "output_attentions" in cache.report.fallback_reason


@torch.no_grad()
@diagonal
def test_so_many_last_rows_are_given_and_the_last_is_what_generate_sees(request_of, family):
    model, store = model_of(family), ChunkStore.open("memory://")
    for ratio in RATIOS:
        seen, inputs = request_of(model, ratio, store)
        plain = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        first = model.generate(**plain, past_key_values=seen, **GREEDY, **LOUD).logits[0]
        assert not seen.report.fallback_reason
        stock = model(**inputs, past_key_values=DynamicCache(config=model.config)).logits
        for rows in (1, 2, 7):
            cache, _ = request_of(model, ratio, store)
            got = model(**inputs, past_key_values=cache, logits_to_keep=rows).logits
            assert got.shape[1] == rows
            assert cache.report.reusable_tokens == seen.report.reusable_tokens > 0
            assert cache.report.chosen_columns == seen.report.chosen_columns
            assert apart(got[:, -1], first) <= TOLERANCE
            if ratio == 1.0:
                assert apart(got, stock[:, -rows:]) <= TOLERANCE


@torch.no_grad()
@pytest.mark.parametrize("rows", [40, 85, 200])
def test_rows_that_reach_into_chunks_or_past_the_prompt_are_computed(shared_model, pieces, tokenizer, rows):
    cache, inputs = asked(pieces, tokenizer, shared_model(), 1.0, 1, True, ChunkStore.open("memory://"))
    got = shared_model()(**inputs, past_key_values=cache, logits_to_keep=rows).logits
    assert apart(got, shared_model()(**inputs, logits_to_keep=rows).logits) <= TOLERANCE


def hooks(model):
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


@torch.no_grad()
def test_announced_prompts_are_seen_by_the_very_next_call(shared_model, pieces, tokenizer, untouched):
    """Nobody has asked the cache for its length: the hook is there since `inputs`."""
    model, store = shared_model(), ChunkStore.open("memory://")
    for given, reusable in (({"logits_to_keep": 1}, 71), ({}, 0), ({"logits_to_keep": torch.tensor([3, 40])}, 0)):
        with untouched(model):
            cache = BlendCache(model, store, recompute_ratio=0.15)
            inputs = cache.inputs(tokenizer, **pieces())
            assert hooks(model) == 1
            got = model(**inputs, past_key_values=cache, **given).logits
            assert hooks(model) == 0
        assert cache.report.reusable_tokens == reusable
        if not reusable:
            assert apart(got, model(**inputs, **given).logits) <= 1e-5


def test_an_announced_prompt_that_is_dropped_or_reset_leaves_no_hook(shared_model, pieces, tokenizer):
    model = shared_model()
    for resets in (True, False):
        cache = BlendCache(model, ChunkStore.open("memory://"))
        inputs = cache.inputs(tokenizer, **pieces())
        assert hooks(model) == 1
        plain = model.generate(**inputs, **GREEDY)  # beside it, with a cache of its own
        if resets:
            cache.reset()
        else:
            del cache
        assert hooks(model) == 0
        assert torch.equal(model.generate(**inputs, **GREEDY), plain)


@torch.no_grad()
def test_losses_hidden_states_and_steps_behind_the_prefill_go_on_as_in_stock(pieces, tokenizer):
    model, store = model_of("llama"), ChunkStore.open("memory://")
    cache, inputs = asked(pieces, tokenizer, model, 1.0, 1, True, store)
    stock = DynamicCache()
    for one in (cache, stock):
        model(**inputs, past_key_values=one, logits_to_keep=1)
    more = torch.tensor([[9, 8, 7, 6]])
    for given in ({"labels": more}, {"output_hidden_states": True}, {}):
        got, wanted = (model(more, past_key_values=one, **given) for one in (cache, stock))
        assert apart(got.logits, wanted.logits) <= TOLERANCE
    assert cache.report.reusable_tokens == 71, "the report is that of the prefill"
    assert not cache.report.fallback_reason


@torch.no_grad()
def test_generate_with_hidden_states_gives_those_of_stock(pieces, tokenizer):
    model, store = model_of("llama"), ChunkStore.open("memory://")
    cache = BlendCache(model, store, recompute_ratio=0.15)
    inputs = cache.inputs(tokenizer, **pieces())
    given = {**GREEDY, "return_dict_in_generate": True, "output_hidden_states": True}
    got = model.generate(**inputs, past_key_values=cache, **given)
    stock = model.generate(**inputs, **given)
    assert torch.equal(got.sequences, stock.sequences)
    for step, other in zip(got.hidden_states, stock.hidden_states, strict=True):
        for mine, theirs in zip(step, other, strict=True):
            assert apart(mine, theirs) <= TOLERANCE * float(theirs.abs().max())


@torch.no_grad()
def test_outputs_that_the_config_asks_for_count_too_and_bring_no_model_into_disrepute(tiny_model, pieces, tokenizer):
    model = tiny_model(output_hidden_states=True)
    cache = BlendCache(model, ChunkStore.open("memory://"))
    inputs = cache.inputs(tokenizer, **pieces())
    got = model(**inputs, past_key_values=cache, logits_to_keep=1)
    for mine, theirs in zip(got.hidden_states, model(**inputs, logits_to_keep=1).hidden_states, strict=True):
        assert apart(mine, theirs) <= TOLERANCE * float(theirs.abs().max())
    assert "output_hidden_states" in cache.report.fallback_reason


@torch.no_grad()
def test_prompts_that_cannot_be_searched_say_so_in_the_report_and_once_in_the_log(shared_model, pieces, caplog):
    model, store, request = shared_model(), ChunkStore.open("memory://"), pieces()
    store.add(model, None, request["chunks"])
    ids = torch.tensor([[*request["prefix"], *sum(request["chunks"], []), *request["question"]]])
    right = torch.ones_like(ids)
    right[0, -3:] = 0
    states = model.get_input_embeddings()(ids)
    four = torch.full((ids.shape[1],) * 2, torch.finfo(torch.float32).min).triu(1)[None, None]
    ways = {
        "inputs_embeds.*Pass input_ids": {"inputs_embeds": states},
        r"padding stands behind.*padding_side='left'": {"input_ids": ids, "attention_mask": right},
        "does not have two axes": {"input_ids": ids, "attention_mask": four},
        "labels were passed": {"input_ids": ids, "labels": ids},
    }
    _warn_once.cache_clear()
    for text, given in ways.items():
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="hf_blend"):
            for _ in range(2):
                cache = BlendCache(model, store, recompute_ratio=0.0)
                cache.get_seq_length()
                model(**given, past_key_values=cache, logits_to_keep=0 if "labels" in given else 1)
                assert cache.report.reusable_tokens == 0
        assert re.search(text, str(cache.report))
        assert len(caplog.records) == 1
        assert cache.report.as_dict()["fallback_reason"] in caplog.text
        assert cache.report.prompt_tokens == (82 if given.get("attention_mask") is right else 85)


@torch.no_grad()
def test_a_call_that_was_not_seen_is_right_and_says_so(shared_model, pieces, tokenizer):
    model, store = shared_model(), ChunkStore.open("memory://")
    for announced in (True, False):
        cache = BlendCache(model, store, recompute_ratio=0.0)
        inputs = BlendCache(model, store).inputs(tokenizer, **pieces())
        if announced:
            cache.inputs(tokenizer, **pieces())
        forward = model.forward if announced else model.__call__  # past the hooks, or before there are any
        got = forward(**inputs, past_key_values=cache, logits_to_keep=1).logits
        assert apart(got, model(**inputs, logits_to_keep=1).logits) <= 1e-5
        assert "was not seen" in str(cache.report)
        assert hooks(model) == 0
    decoder = model.get_decoder()
    cache = BlendCache(model, store, recompute_ratio=0.0)
    cache.inputs(tokenizer, **pieces())
    got = decoder(**inputs, past_key_values=cache).last_hidden_state
    assert apart(got, decoder(**inputs).last_hidden_state) <= 1e-4
    assert hooks(model) == 0


@pytest.fixture
def another(tiny_model):
    """Two models with the same weights, and one with others."""
    own = tiny_model()
    return own, [copy.deepcopy(own), tiny_model(seed=1)]


@torch.no_grad()
@pytest.mark.parametrize("announced", [True, False])
@pytest.mark.parametrize("through", ["generate", "call", "decoder"])
def test_a_prefill_of_another_model_object_is_refused_and_changes_nothing(
    another, pieces, tokenizer, untouched, announced, through
):
    own, others = another
    store = ChunkStore.open("memory://")
    with untouched(own), untouched(others[0]):
        inputs = BlendCache(own, store).inputs(tokenizer, **pieces())
        wanted_cache = BlendCache(own, store, recompute_ratio=0.15)
        wanted_cache.inputs(tokenizer, **pieces())
        wanted = own.generate(**inputs, past_key_values=wanted_cache, **GREEDY)
        for other in others:
            cache = BlendCache(own, store, recompute_ratio=0.15)
            if announced:
                inputs = cache.inputs(tokenizer, **pieces())
            called = other.model if through == "decoder" else other
            call, given = {
                "generate": (other.generate, GREEDY),
                "call": (other, {"logits_to_keep": 1}),
                "decoder": (other.model, {}),
            }[through]
            names = [rf"{type(one).__name__} at {id(one):#x}" for one in (own, called)]
            text = rf"made for {names[0]} .*another model object, {names[1]}, .*BlendCache\(model, store\)"
            with pytest.raises(ConfigError, match=text):
                call(**inputs, past_key_values=cache, **given)
            assert {layer.get_seq_length() for layer in cache.layers} == {0}
            assert hooks(own) == int(announced)
            assert torch.equal(own.generate(**inputs, past_key_values=cache, **GREEDY), wanted)
            assert cache.report.reusable_tokens == 71
        del cache, wanted_cache


@torch.no_grad()
def test_a_step_of_another_model_object_is_refused_and_changes_nothing(another, pieces, tokenizer):
    own, others = another
    cache = BlendCache(own, ChunkStore.open("memory://"), recompute_ratio=0.15)
    output = own.generate(**cache.inputs(tokenizer, **pieces()), past_key_values=cache, **GREEDY)
    before = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
    for other in others:
        with pytest.raises(ConfigError, match="another model object"):
            other(output[:, -1:], past_key_values=cache)
        with pytest.raises(ConfigError, match="another model object"):
            other.generate(output, past_key_values=cache, **GREEDY)
    for layer, (keys, values) in zip(cache.layers, before, strict=True):
        assert torch.equal(layer.keys, keys)
        assert torch.equal(layer.values, values)
    twin = copy.deepcopy(cache)
    assert torch.equal(
        own.generate(output, past_key_values=cache, **GREEDY), own.generate(output, past_key_values=twin, **GREEDY)
    )


@torch.no_grad()
def test_a_copy_of_a_model_that_is_watched_is_another_model_and_its_own_requests_work(tiny_model, pieces, tokenizer):
    model, store = tiny_model(), ChunkStore.open("memory://")
    cache = BlendCache(model, store, recompute_ratio=0.15)
    inputs = cache.inputs(tokenizer, **pieces())
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with pytest.raises(ConfigError, match="another model object"):
            twin.generate(**inputs, past_key_values=cache, **GREEDY)
        own = BlendCache(twin, store, recompute_ratio=0.15)
        got = twin.generate(**own.inputs(tokenizer, **pieces()), past_key_values=own, **GREEDY)
        fresh = BlendCache(model, store, recompute_ratio=0.15)
        wanted = model.generate(**fresh.inputs(tokenizer, **pieces()), past_key_values=fresh, **GREEDY)
        assert torch.equal(got, wanted)
    assert model.generate(**inputs, past_key_values=cache, **GREEDY).shape[1] == 90
    assert cache.report.reusable_tokens == 71


class Wrapped(torch.nn.Module):
    """A wrapper that calls the model's own layers, past its hooks, as PEFT does."""

    def __init__(self, model):
        super().__init__()
        self.inside = model

    def forward(self, *args, **kwargs):
        return self.inside.forward(*args, **kwargs)


@torch.no_grad()
def test_a_wrapper_around_the_model_is_the_model(tiny_model, pieces, tokenizer):
    model, store = tiny_model(), ChunkStore.open("memory://")
    cache = BlendCache(model, store, recompute_ratio=0.15)
    inputs = cache.inputs(tokenizer, **pieces())
    got = Wrapped(model)(**inputs, past_key_values=cache, logits_to_keep=1).logits
    assert apart(got, model(**inputs, logits_to_keep=1).logits) <= 1e-5
    assert "Call the object that the cache was made for" in cache.report.fallback_reason
    model(torch.tensor([[5]]), past_key_values=cache)
    assert cache.get_seq_length() == 86


def test_a_cache_may_be_filled_by_hand(shared_model):
    cache = BlendCache(shared_model(), ChunkStore.open("memory://"))
    for layer in range(4):
        cache.update(torch.zeros(1, 2, 3, 16), torch.zeros(1, 2, 3, 16), layer)
    assert cache.get_seq_length() == 3
    assert not cache.report.fallback_reason


@torch.no_grad()
def test_an_assistant_with_a_cache_of_its_own_is_no_other_model(tiny_model, pieces, tokenizer):
    model, assistant, store = tiny_model(), tiny_model(seed=1, num_hidden_layers=2), ChunkStore.open("memory://")
    cache = BlendCache(model, store, recompute_ratio=1.0)
    inputs = cache.inputs(tokenizer, **pieces())
    got = model.generate(**inputs, past_key_values=cache, assistant_model=assistant, **GREEDY)
    assert torch.equal(got, model.generate(**inputs, **GREEDY))
    assert cache.report.reusable_tokens == 71


@pytest.mark.parametrize("filled", [False, True])
def test_a_shallow_copy_and_a_pickle_are_refused_with_what_to_do(shared_model, pieces, tokenizer, filled):
    model = shared_model()
    cache = BlendCache(model, ChunkStore.open("memory://"))
    if filled:
        model.generate(**cache.inputs(tokenizer, **pieces()), past_key_values=cache, **GREEDY)
    with pytest.raises(ConfigError, match=rf"of {89 * filled} tokens.*Use copy.deepcopy\(cache\)"):
        copy.copy(cache)
    for write in (pickle.dumps, lambda one: torch.save(one, io.BytesIO())):
        with pytest.raises(ConfigError, match=r"BlendCache\(model, ChunkStore.open\(path\)\).*save_session"):
            write(cache)
    assert copy.deepcopy(cache).get_seq_length() == cache.get_seq_length()
