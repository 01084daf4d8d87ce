# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A cache is in one named state before, in and behind each forward, whichever way the forward shows itself."""

import gc
import weakref

import pytest
import torch

from hf_blend import BlendCache, ConfigError, observer
from hf_blend.cache.forward_watch import State
from hf_blend.model.cache_keyword import cache_among
from tests.asking import GREEDY, PIECES, as_stock, hooks, memory, prepared

BLENDED, IDLE, PLAIN, WATCHED = State.BLENDED, State.IDLE, State.PLAIN, State.WATCHED


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


def test_prefill_is_blended_and_no_hook_stays_for_the_steps_behind_it(model, states):
    cache, inputs = prepared(model, PIECES, recompute_ratio=1.0)
    assert cache.watch.state is WATCHED
    watched_hooks = hooks(model)
    model.generate(**inputs, past_key_values=cache, **{**GREEDY, "max_new_tokens": 3})
    assert (states[-3:], cache.watch.state) == ([BLENDED, IDLE, IDLE], IDLE)
    assert hooks(model) < watched_hooks


@torch.no_grad()
def test_prompt_in_parts_is_watched_between_them(model, states):
    cache, inputs = prepared(model, PIECES)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    model(ids[:, :30], attention_mask=mask[:, :30], past_key_values=cache, logits_to_keep=1)
    assert (states[-1], cache.watch.state) == (BLENDED, WATCHED)
    model(ids[:, 30:], attention_mask=mask, past_key_values=cache, logits_to_keep=1)
    assert (states[-1], cache.watch.state) == (BLENDED, IDLE)


@torch.no_grad()
def test_forward_whose_outputs_are_all_asked_for_is_plain_up_to_its_first_layer(model, states):
    cache, inputs = prepared(model, PIECES)
    model(**inputs, past_key_values=cache)
    assert (states[-1], cache.watch.state) == (PLAIN, IDLE)
    assert "the logits of every token" in cache.report.fallback_reason


@torch.no_grad()
def test_forward_that_no_hook_announces_is_noticed_at_its_first_layer(model, states):
    cache, ids = BlendCache(model, memory()), torch.arange(3, 40)[None]
    model(ids, past_key_values=cache, logits_to_keep=1)
    assert (states[-1], cache.watch.state) == (WATCHED, IDLE)  # the model itself has asked for the length, too late
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


@torch.no_grad()
def test_forward_of_another_model_is_refused_and_the_own_one_is_watched_still(model, tiny_model):
    cache, inputs = prepared(model, PIECES, recompute_ratio=1.0)
    with pytest.raises(ConfigError, match="another model object"):
        tiny_model(num_hidden_layers=3, seed=1)(**inputs, past_key_values=cache, logits_to_keep=1)
    assert cache.watch.state is WATCHED
    as_stock(model, inputs, cache)
    assert cache.report.reusable_tokens
    cache = BlendCache(model, memory())
    with pytest.raises(ConfigError, match="another model object"):
        tiny_model(num_hidden_layers=3, seed=1)(**inputs, past_key_values=cache, logits_to_keep=1)
    assert (hooks(model), cache.watch.state) == (0, IDLE)


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
