# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What every kind of cache promises: a failure leaves no trace, a crop is a past that was shorter, a copy is its own.

The kinds differ in what a layer keeps: all tokens, 8 bits of them, K and V elsewhere, a window, a state, an indexer.
"""

import copy

import pytest
import torch

from hf_blend import ConfigError
from hf_blend.model.anatomy import decoder_layers
from tests.asking import failing, generated, memory, prepared
from tests.conftest import random_pieces, shared_zoo_model, skip_in_the_oldest

KINDS = {  # model type, settings of the cache
    "full": ("llama", {}),
    "8 bits": ("llama", {"kv_bits": 8}),
    "elsewhere": ("llama", {"kv_device_map": {1: "cpu", 3: "disk"}}),
    "windows": ("gemma3_text", {}),
    "state": ("qwen3_next", {}),
    "indexer": ("deepseek_v32", {}),
    "latent": ("deepseek_v3", {}),
}
CROPPED = [kind for kind in KINDS if kind not in ("windows", "state")]
TURN = {"chunks": random_pieces((30, 25), seed=4)["chunks"], "question": [5, 6, 7]}
STEP = torch.tensor([[9, 17, 4]])
each = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture
def first_turn(tmp_path):
    """Gives the model of a kind, a cache that answered a blended prompt, and all ids; `store` may be shared."""

    def answered(kind, store=None):
        model_type, settings = KINDS[kind]
        if kind == "indexer":
            skip_in_the_oldest("models with an indexer turn their keys in a way that is refused")
        if kind == "elsewhere":
            settings = {**settings, "offload_folder": str(tmp_path)}
        model = shared_zoo_model(model_type)
        cache, inputs = prepared(model, random_pieces((40, 50)), store=store, recompute_ratio=0.3, **settings)
        return model, cache, generated(model, inputs, cache)

    return answered


@torch.no_grad()
def step(model, cache, ids=STEP):
    """Logits of a few further tokens."""
    return model(ids, past_key_values=cache, use_cache=True).logits


@each
@pytest.mark.parametrize("layer", [0, 2])
def test_failed_turn_leaves_model_and_cache_as_they_were_and_can_be_asked_again(kind, layer, first_turn, untouched):
    store = memory()
    model, cache, ids = first_turn(kind, store)
    expected = generated(model, cache.inputs(None, **TURN, prefix=ids[0]), cache)
    report = cache.report
    model, cache, ids = first_turn(kind, store)
    held = cache.get_seq_length()
    with untouched(model):
        inputs = cache.inputs(None, **TURN, prefix=ids[0])
        with failing(decoder_layers(model)[layer].mlp), pytest.raises(ZeroDivisionError):
            generated(model, inputs, cache)
        assert cache.get_seq_length() == held
        assert torch.equal(generated(model, cache.inputs(None, **TURN, prefix=ids[0]), cache), expected)
    assert cache.report.reusable_tokens == report.reusable_tokens > 50
    assert cache.report.charged_budget == report.charged_budget


@each
def test_failed_first_prompt_can_be_asked_again(kind, first_turn):
    store = memory()
    _, used, expected = first_turn(kind, store)
    model, fresh, _ = first_turn(kind, store)
    fresh.reset()
    inputs = fresh.inputs(None, **random_pieces((40, 50)))
    with failing(decoder_layers(model)[1].mlp), pytest.raises(ZeroDivisionError):
        generated(model, inputs, fresh)
    assert fresh.get_seq_length() == 0
    inputs = fresh.inputs(None, **random_pieces((40, 50)))
    assert torch.equal(generated(model, inputs, fresh), expected)
    assert fresh.report.reusable_tokens == used.report.reusable_tokens > 50


@each
@pytest.mark.parametrize("tokens", [1, 3])
def test_failed_step_leaves_cache_as_it_was_or_is_refused_until_reset(kind, tokens, first_turn):
    model, cache, expected = first_turn(kind)
    twin = copy.deepcopy(cache)
    with failing(decoder_layers(model)[2].mlp), pytest.raises(ZeroDivisionError):
        step(model, cache, STEP[:, :tokens])
    if tokens > 1 or kind in CROPPED:  # before single tokens nothing is written down of windows and states
        assert cache.get_seq_length() == twin.get_seq_length()
        assert torch.equal(step(model, cache), step(model, twin))
        return
    with pytest.raises(ConfigError, match=r"reset\(\) the cache"):
        step(model, cache)
    cache.reset()
    assert torch.equal(generated(model, cache.inputs(None, **random_pieces((40, 50))), cache), expected)


@each
def test_copy_goes_on_alike_and_neither_sees_other(kind, first_turn):
    model, cache, _ = first_turn(kind)
    twin = copy.deepcopy(cache)
    held = twin.get_seq_length()
    first = step(model, cache)
    assert twin.get_seq_length() == held
    step(model, cache, torch.tensor([[3]]))
    assert torch.equal(step(model, twin), first)


@each
def test_reset_gives_empty_cache_that_blends_as_new_one(kind, first_turn):
    store = memory()
    model, cache, expected = first_turn(kind, store)
    cache.reset()
    assert cache.get_seq_length() == 0
    again = generated(model, cache.inputs(None, **random_pieces((40, 50))), cache)
    _, _, fresh = first_turn(kind, store)
    assert torch.equal(again, expected)
    assert torch.equal(again, fresh)
