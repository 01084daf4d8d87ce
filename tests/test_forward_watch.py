# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A cache is in one named state before, in and behind each forward, whichever way the forward shows itself."""

import gc
import weakref
from functools import partial

import pytest
import torch
from transformers import DynamicCache

from hf_blend import BlendCache, ConfigError, observer
from hf_blend.cache.forward_watch import State
from hf_blend.model.cache_keyword import cache_among
from tests.asking import GREEDY, PIECES, as_stock, failing, hooks, memory, prepared

BLENDED = State.BLENDED
IDLE = State.IDLE
PLAIN = State.PLAIN
WATCHED = State.WATCHED


@pytest.fixture
def model(tiny_model):
    return tiny_model(num_hidden_layers=3)


@pytest.fixture
def states(model):
    """The states of the cache in which its forwards come to the first layer."""
    seen = []

    @observer
    def look(layer, args, kwargs):
        if isinstance(cache := cache_among(kwargs), BlendCache):
            seen.append(cache.watch.state)

    handle = model.model.layers[0].register_forward_pre_hook(look, with_kwargs=True)
    yield seen
    handle.remove()


def test_prefill_is_blended_and_no_hook_stays_for_steps_behind_it(model, states):
    cache, inputs = prepared(model, PIECES, recompute_ratio=1.0)
    assert cache.watch.state is WATCHED
    watched_hooks = hooks(model)
    model.generate(**inputs, past_key_values=cache, **{**GREEDY, "max_new_tokens": 3})
    assert states[-3:] == [BLENDED, IDLE, IDLE]
    assert cache.watch.state == IDLE
    assert hooks(model) < watched_hooks


@torch.no_grad()
def test_prompt_in_parts_is_watched_between_them(model, states):
    cache, inputs = prepared(model, PIECES)
    ids = inputs["input_ids"]
    mask = inputs["attention_mask"]
    model(ids[:, :30], attention_mask=mask[:, :30], past_key_values=cache, logits_to_keep=1)
    assert states[-1] == BLENDED
    assert cache.watch.state == WATCHED
    model(ids[:, 30:], attention_mask=mask, past_key_values=cache, logits_to_keep=1)
    assert states[-1] == BLENDED
    assert cache.watch.state == IDLE


@torch.no_grad()
def test_forward_whose_outputs_are_all_asked_for_is_plain_up_to_its_first_layer(model, states):
    cache, inputs = prepared(model, PIECES)
    model(**inputs, past_key_values=cache)
    assert states[-1] == PLAIN
    assert cache.watch.state == IDLE
    assert "the logits of every token" in cache.report.fallback_reason


@torch.no_grad()
def test_forward_that_no_hook_announces_is_noticed_at_its_first_layer(model, states):
    cache = BlendCache(model, memory())
    ids = torch.arange(3, 40)[None]
    model(ids, past_key_values=cache, logits_to_keep=1)
    assert states[-1] == WATCHED  # the model itself has asked for the length, too late
    assert cache.watch.state == IDLE
    assert "the call of the model was not seen" in cache.report.fallback_reason


@torch.no_grad()
@pytest.mark.parametrize(("is_blended", "layer"), [(True, 1), (False, 0)])  # a plain one, as stock, keeps layer 0
def test_forward_that_fails_leaves_nothing_behind(model, is_blended, layer, monkeypatch):
    cache, inputs = prepared(model, PIECES, recompute_ratio=1.0)
    with monkeypatch.context() as patch:
        patch.setattr(model.model.layers[layer], "forward", lambda *args, **kwargs: [][0])
        with pytest.raises(IndexError):
            model(**inputs, past_key_values=cache, logits_to_keep=int(is_blended))
    assert cache.get_seq_length() == 0
    assert cache.watch.blended is None
    as_stock(model, inputs, cache)
    assert cache.watch.state is IDLE


def interrupted(model, cache, ids, layer=1):
    """Let a forward end in the midst, behind the attention of a layer."""
    with failing(model.model.layers[layer].mlp), pytest.raises(ZeroDivisionError):
        model(ids, past_key_values=cache)
    assert len({held.get_seq_length() for held in cache.layers if hasattr(held, "length")}) == 2, "nothing is tested"


@torch.no_grad()
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("way", ["generate", "model", "crop", "heal", "inputs"])
@pytest.mark.parametrize("past", [0, 20])
def test_plain_forward_that_ends_between_layers_is_taken_back_by_next_use(model, layer, way, past):
    cache = BlendCache(model, memory())
    stock = DynamicCache(config=model.config)
    ids = torch.arange(3, 40)[None]
    for kept in (cache, stock) if past else ():
        model(ids[:, :past], past_key_values=kept)
    interrupted(model, cache, ids[:, past:], layer)
    if way == "model":
        with pytest.raises(ConfigError, match=r"ended between two layers.* Call the model again"):
            model(ids[:, past:], past_key_values=cache)
    elif way == "generate":
        answer = model.generate(ids, past_key_values=cache, **GREEDY)
        assert torch.equal(answer, model.generate(ids, past_key_values=stock, **GREEDY))
        return
    elif way == "inputs":
        inputs = cache.inputs(None, **PIECES, history=ids[:, :past] if past else None)
        past_ids = torch.tensor([sum((PIECES["prefix"], *PIECES["chunks"], PIECES["question"]), [])])
        assert torch.equal(inputs["input_ids"], torch.cat([ids[:, :past], past_ids], dim=1))
        return
    else:
        assert (cache.heal if way == "heal" else cache.crop)(0) in (0, None)
    assert {layer.get_seq_length() for layer in cache.layers} == {past}
    got = model(ids[:, past:], past_key_values=cache).logits
    assert torch.equal(got, model(ids[:, past:], past_key_values=stock).logits)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["gemma3_text", "qwen3_next"])
def test_window_or_state_that_has_moved_on_is_refused_until_reset(kind, tiny_model):
    windows = {"sliding_window": 8}
    states = {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2}
    model = tiny_model(kind, **(windows if kind == "gemma3_text" else states))
    cache = BlendCache(model, memory(), allow_unverified=True)
    ids = torch.arange(3, 40)[None]
    model(ids, past_key_values=cache)
    interrupted(model, cache, ids[:, :1], len(model.model.layers) - 2)
    answer = torch.cat([ids, ids[:, :1]], dim=1)
    for use in (cache.get_seq_length, partial(cache.crop, -1), partial(model.generate, answer, past_key_values=cache)):
        with pytest.raises(ConfigError, match=r"ended between two layers.* reset\(\) the cache"):
            use()
    cache.reset()
    answer = model.generate(ids, past_key_values=cache, **GREEDY)
    assert torch.equal(answer, model.generate(ids, **GREEDY))


@torch.no_grad()
def test_forward_of_another_model_is_refused_and_own_one_is_watched_still(model, tiny_model):
    cache, inputs = prepared(model, PIECES, recompute_ratio=1.0)
    with pytest.raises(ConfigError, match="another model object"):
        tiny_model(num_hidden_layers=3, seed=1)(**inputs, past_key_values=cache, logits_to_keep=1)
    assert cache.watch.state is WATCHED
    as_stock(model, inputs, cache)
    assert cache.report.reusable_tokens
    cache = BlendCache(model, memory())
    with pytest.raises(ConfigError, match="another model object"):
        tiny_model(num_hidden_layers=3, seed=1)(**inputs, past_key_values=cache, logits_to_keep=1)
    assert hooks(model) == 0
    assert cache.watch.state == IDLE


def test_cache_is_freed_with_its_last_reference(model):
    """A cycle would keep K and V until the garbage is collected."""
    cache, inputs = prepared(model, PIECES)
    gc.collect()
    gc.disable()
    try:
        model.generate(**inputs, past_key_values=cache, **GREEDY)
        gone = weakref.ref(cache), weakref.ref(cache.watch), weakref.ref(cache.layers[0])
        del cache
        assert [reference() for reference in gone] == [None] * 3
    finally:
        gc.enable()
