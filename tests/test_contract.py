# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What a forward with a blend cache gives, beside stock; whose forward it may be; what may be done with the cache."""

import copy
import pickle
import re
from functools import cache as remembered
from operator import attrgetter

import pytest
import torch
from tiny_models import tiny_model as zoo_model
from transformers import DynamicCache

from hf_blend import BlendCache, SequenceCache
from hf_blend.errors import ConfigError
from hf_blend.prefill.report import warn_once
from tests.asking import GREEDY, hooks, memory, prepared
from tests.conftest import random_pieces

RATIOS = (0.0, 0.15, 1.0)
WAYS = {**GREEDY, "max_new_tokens": 5}
LOUD = {"return_dict_in_generate": True, "output_logits": True}
TOLERANCE = 2e-5  # of logits of size 1 to 10, float32
BATCH = ({"chunks": (17, 23, 31)}, {"chunks": (29,), "seed": 1, "question": 7})


@remembered
def model_of(family):
    """A model that is not shared with other files: transformers leaves hooks on one that has given hidden states."""
    return zoo_model(family)


def asked(model, ratio, batch=1, announced=True, store=None):
    """A cache and the inputs that go with it; the prompts are announced, or found in the store by their content."""
    requests = [random_pieces(**one) for one in BATCH[:batch]]
    if store is None:
        store = memory()
    cache, inputs = prepared(model, *requests, store=store, recompute_ratio=ratio)
    for one in requests:
        store.add(model, None, one["chunks"])
    if not announced:
        cache = BlendCache(model, store, recompute_ratio=ratio)
    cache.get_seq_length()
    positions = (inputs["attention_mask"].cumsum(-1) - 1).clamp_min(0)
    return cache, {**inputs, "position_ids": positions}


def apart(one, other, real=None):
    """Largest absolute difference, at real tokens only."""
    assert one.shape == other.shape
    error = (one - other).abs()
    if real is not None:
        error = error[real]
    return float(error.max())


# requests in the batch, and whether they are announced
FORMS = [("llama", 1, False), ("llama", 2, True), ("gemma3_text", 2, False), ("gpt_neox", 1, True)]


def full_outputs(ids):
    """The ways to ask for an output of every token, or of some by their positions."""
    return {
        "nothing": {},
        "all logits": {"logits_to_keep": 0},
        "positions": {"logits_to_keep": torch.tensor([3, 40, ids.shape[1] - 1])},
        "labels": {"labels": ids},
        "hidden states": {"output_hidden_states": True, "logits_to_keep": 1},
    }


@torch.no_grad()
@pytest.mark.parametrize(("family", "batch", "announced"), FORMS)
def test_outputs_of_every_token_are_those_of_stock_cache(family, batch, announced):
    model = model_of(family)
    store = memory()
    for ratio in RATIOS:
        _, inputs = asked(model, ratio, batch, announced, store)
        real = inputs["attention_mask"].bool()
        for name, given in full_outputs(inputs["input_ids"]).items():
            blend, _ = asked(model, ratio, batch, announced, store)
            stock = model(**inputs, past_key_values=DynamicCache(config=model.config), **given)
            got = model(**inputs, past_key_values=blend, **given)
            columns = real[:, -got.logits.shape[1] :]
            if name == "positions":
                columns = real[:, given["logits_to_keep"]]
            assert apart(got.logits, stock.logits, columns) <= TOLERANCE, name
            if stock.loss is not None:
                assert apart(got.loss[None], stock.loss[None]) <= TOLERANCE
            for mine, theirs in zip(got.hidden_states or (), stock.hidden_states or (), strict=True):
                assert apart(mine, theirs, real) <= TOLERANCE * float(theirs.abs().max())
            report = blend.report
            assert report.fallback_reason
            assert report.reusable_tokens == 0
            assert report.prompt_tokens == int(real.sum())
            assert blend.get_seq_length() == real.shape[1]


@torch.no_grad()
@pytest.mark.parametrize(("family", "batch", "announced"), FORMS)
def test_logits_to_keep_gives_last_rows_and_last_is_what_generate_sees(family, batch, announced):
    """Nine are the question; further ones lie in a chunk, and have to be computed for their output."""
    model = model_of(family)
    store = memory()
    for ratio in RATIOS:
        seen, inputs = asked(model, ratio, batch, announced, store)
        plain = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        first = model.generate(**plain, past_key_values=seen, **WAYS, **LOUD).logits[0]
        assert not seen.report.fallback_reason
        stock = model(**inputs, past_key_values=DynamicCache(config=model.config)).logits
        for rows in (1, 7, 40, 200):
            cache, _ = asked(model, ratio, batch, announced, store)
            got = model(**inputs, past_key_values=cache, logits_to_keep=rows).logits
            assert got.shape[1] == min(rows, stock.shape[1])
            if rows < 10:
                report = cache.report
                assert report.reusable_tokens == seen.report.reusable_tokens > 0
                assert report.chosen_columns == seen.report.chosen_columns
                assert apart(got[:, -1], first) <= TOLERANCE
            if ratio == 1.0:
                mask = inputs["attention_mask"].bool()
                real = mask[:, -got.shape[1] :]
                assert apart(got, stock[:, -rows:], real) <= TOLERANCE


def test_hook_of_cache_goes_with_cache(shared_model, pieces):
    model = shared_model()
    before = len(model._forward_pre_hooks)
    cache, inputs = prepared(model, pieces())
    sequence = SequenceCache(model)
    assert len(model._forward_pre_hooks) == before + 2
    plain = model.generate(**inputs, **WAYS)  # beside it, with a cache of its own
    model.generate(**inputs, past_key_values=cache, **WAYS)
    model.generate(**inputs, past_key_values=sequence, **WAYS)
    cache.reset()
    assert len(model._forward_pre_hooks) == before + 2
    del cache, sequence
    assert len(model._forward_pre_hooks) == before
    assert torch.equal(model.generate(**inputs, **WAYS), plain)


def test_getters_change_nothing(shared_model, pieces):
    model = shared_model()
    for filled in (False, True):
        cache, inputs = prepared(model, pieces(), recompute_ratio=0.15)
        if filled:
            model.generate(**inputs, past_key_values=cache, **WAYS)
        before = KEPT(cache.state)
        count = len(model._forward_pre_hooks)
        for _ in range(2):
            held = cache.get_seq_length()
            assert (held > 0) == filled == bool(cache)
            assert cache.get_mask_sizes(5, 0) == (held + 5, 0)
            assert cache.is_compileable == filled
            assert bool(cache.state.pending.prompts) != filled
            assert len(cache) == 4
            assert cache.kv_memory is None
        assert KEPT(cache.state) == before
        assert len(model._forward_pre_hooks) == count
        assert hooks(model) == 0


KEPT = attrgetter("author", "inexact_from", "is_recording", "check_ms", "chunk_prefix_ids")


@torch.no_grad()
@pytest.mark.parametrize("why", ["embeddings", "padding", "axes", "labels"])
def test_fallback_reason_is_said_once_where_prompt_cannot_be_searched(shared_model, pieces, caplog, why):
    model = shared_model()
    store = memory()
    request = pieces()
    store.add(model, None, request["chunks"])
    ids = torch.tensor([[*request["prefix"], *sum(request["chunks"], []), *request["question"]]])
    tokens = ids.shape[1]
    given = {"input_ids": ids, "logits_to_keep": 1}
    if why == "embeddings":
        text = "inputs_embeds.*Pass input_ids"
        given["inputs_embeds"] = model.get_input_embeddings()(given.pop("input_ids"))
    elif why == "padding":
        text = r"padding stands behind.*padding_side='left'"
        given["attention_mask"] = torch.ones_like(ids)
        given["attention_mask"][0, -3:] = 0
        tokens -= 3
    elif why == "axes":
        text = "does not have two axes"
        hidden = torch.full((tokens, tokens), torch.finfo(torch.float32).min)
        given["attention_mask"] = hidden.triu(1)[None, None]
    else:
        text = "labels were passed"
        given |= {"labels": ids, "logits_to_keep": 0}
    warn_once.cache_clear()
    for _ in range(2):
        cache = BlendCache(model, store, recompute_ratio=0.0)
        got = model(**given, past_key_values=cache).logits
    expected = model(**given, past_key_values=DynamicCache()).logits
    assert apart(got[:, -1], expected[:, -1]) <= 1e-5
    report = cache.report
    assert report.reusable_tokens == 0
    assert report.prompt_tokens == tokens
    assert re.search(text, str(report))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert report.fallback_reason in caplog.text


@torch.no_grad()
@pytest.mark.parametrize("called", ["forward", "decoder"])
def test_call_past_hook_is_refused_by_name(shared_model, pieces, called):
    model = shared_model()
    cache, inputs = prepared(model, pieces())
    call = {"forward": model.forward, "decoder": model.get_decoder()}[called]
    with pytest.raises(ConfigError, match="did not see begin"):
        call(**inputs, past_key_values=cache)
    assert cache.get_seq_length() == 0
    model(**inputs, past_key_values=cache, logits_to_keep=1)
    assert cache.report.reusable_tokens == 71


@pytest.fixture
def another(tiny_model):
    """Two models with the same weights, and one with others."""
    own = tiny_model()
    return own, [copy.deepcopy(own), tiny_model(seed=1)]


@torch.no_grad()
@pytest.mark.parametrize(("through", "announced"), [("generate", True), ("call", False), ("decoder", True)])
def test_prefill_of_another_model_object_is_refused_and_changes_nothing(another, untouched, announced, through):
    own, others = another
    store = memory()
    with untouched(own), untouched(others[0]):
        plain, inputs = prepared(own, random_pieces(), store=store, recompute_ratio=0.15)
        expected = own.generate(**inputs, past_key_values=plain, **WAYS)
        for other in others:
            cache = BlendCache(own, store, recompute_ratio=0.15)
            if announced:
                inputs = cache.inputs(None, **random_pieces())
            call = {"generate": other.generate, "call": other, "decoder": other.model}[through]
            with pytest.raises(ConfigError, match=f"LlamaForCausalLM at {id(own):#x} .*another model object"):
                call(**inputs, past_key_values=cache)
            assert not any(layer.get_seq_length() for layer in cache.layers)
            got = own.generate(**inputs, past_key_values=cache, **WAYS)
            assert torch.equal(got, expected)
            assert cache.report.reusable_tokens == 71
        del cache, plain


class Wrapped(torch.nn.Module):
    """A wrapper that calls the model."""

    def __init__(self, model):
        super().__init__()
        self.inside = model

    def forward(self, *args, **kwargs):
        return self.inside(*args, **kwargs)


@torch.no_grad()
def test_wrapper_around_model_is_model(tiny_model):
    model = tiny_model()
    cache, inputs = prepared(model, random_pieces(), recompute_ratio=1.0)
    got = Wrapped(model)(**inputs, past_key_values=cache, logits_to_keep=1).logits
    assert apart(got, model(**inputs, logits_to_keep=1).logits) <= 1e-5
    assert cache.report.reusable_tokens == 71


@pytest.mark.parametrize("filled", [False, True])
def test_shallow_copy_and_pickle_are_refused_with_what_to_do(shared_model, filled):
    model = shared_model()
    cache, inputs = prepared(model, random_pieces())
    if filled:
        model.generate(**inputs, past_key_values=cache, **WAYS)
    with pytest.raises(ConfigError, match=rf"of {89 * filled} tokens.*Use copy.deepcopy\(cache\)"):
        copy.copy(cache)
    with pytest.raises(ConfigError, match=r"BlendCache\(model, ChunkStore.open\(path\)\).*cache.save\(path\)"):
        pickle.dumps(cache)
    assert copy.deepcopy(cache).get_seq_length() == cache.get_seq_length()


@torch.no_grad()
def test_each_way_to_reuse_nothing_has_its_reason(pieces):
    model = model_of("llama")
    request = pieces()
    ids = torch.tensor([[*request["prefix"], *sum(request["chunks"], []), *request["question"]]])
    filled, other = memory(), memory()
    filled.add(model, None, request["chunks"])
    other.add(model, None, [[*range(50, 90)]])
    ways = [
        (memory(), ids, {}, "the store is empty"),
        (other, ids, {}, "none of them is in the prompt"),
        (filled, ids[:, :1], {}, "the prompt is one token"),
        (filled, ids, {"logits_to_keep": 0}, "logits of every token"),
        (filled, ids, {"logits_to_keep": torch.tensor([3])}, "some by their places"),
        (filled, ids, {"output_attentions": True}, "outputs of every token"),
        (filled, ids, {"cu_seq_lens_q": torch.tensor([0, 5])}, "cu_seq_lens_q came with the prompt"),
        (filled, ids, {"position_ids": 2 * torch.arange(ids.shape[1])[None]}, "do not count up by 1"),
    ]
    for store, prompt_ids, given, words in ways:
        cache = BlendCache(model, store)
        model(prompt_ids, past_key_values=cache, **{"logits_to_keep": 1, **given})
        assert words in cache.report.fallback_reason, given
        assert cache.report.reusable_tokens + cache.report.exact_tokens == 0
        assert cache.report.prompt_tokens == prompt_ids.shape[1]
