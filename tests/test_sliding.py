# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Layers with a window: exact for scattered rows, and nothing is held that the window cannot see."""

import functools
import itertools
import random

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicSlidingWindowLayer

from hf_blend.cache.layers import BlendSlidingLayer
from hf_blend.verify.model_under_test import ModelUnderTest
from hf_blend.verify.stale_tokens import fused_ratio
from tests import asking
from tests.asking import check_equal, prefill, prepared
from tests.conftest import shared_zoo_model, slow_but
from tests.test_quantised_kv import states

WINDOW = 16  # of every model in the zoo
FOUR_WINDOWS = {"chunks": (12, 15, 20), "question": 12}  # with BOS and a prefix of 4: 64 tokens
BATCH = (FOUR_WINDOWS, {"chunks": (29, 9), "seed": 1}, {"chunks": (7,), "seed": 2, "question": 5})
FAMILIES = ("mistral", "gemma3_text", "cohere2", "gpt_oss", "olmo3")  # windows everywhere; beside full layers; …
families = pytest.mark.parametrize("family", slow_but("mistral", "gemma3_text", "gpt_oss", among=FAMILIES))
NEW = 20  # tokens of an answer, in which every window rolls


def model_of(family, attention="eager"):
    model = shared_zoo_model(family, "eager")
    if attention == "sdpa" and not model._supports_sdpa:
        pytest.skip(f"{family} has no sdpa attention")
    return shared_zoo_model(family, attention)


run, as_stock = (functools.partial(one, max_new_tokens=NEW) for one in (asking.generated, asking.as_stock))


def sliding(cache):
    return [layer for layer in cache.layers if layer.is_sliding]


@pytest.mark.parametrize(
    ("family", "attention", "batch"),
    slow_but(
        ("mistral", "sdpa", 1), ("gemma3_text", "sdpa", 3), ("gpt_oss", "eager", 3),
        among=itertools.product(FAMILIES, ("eager", "sdpa"), (1, 3)),
    ),
)  # fmt: skip
def test_prompt_of_four_windows_is_exact(pieces, family, attention, batch):
    model = model_of(family, attention)
    requests = [pieces(**one) for one in BATCH[:batch]]
    cache, inputs = prepared(model, *requests, recompute_ratio=1.0)
    assert inputs["input_ids"].shape[1] == 4 * WINDOW
    got = prefill(model, inputs, cache)
    expected = prefill(model, inputs, DynamicCache(config=model.config))
    assert asking.apart(got, expected) <= 1e-5
    assert cache.report.reusable_tokens > 0
    cache, inputs = prepared(model, *requests, recompute_ratio=1.0)
    as_stock(model, inputs, cache)


@pytest.mark.parametrize(
    ("family", "attention"),
    slow_but(
        ("mistral", "eager"), ("gemma3_text", "sdpa"), ("gpt_oss", "eager"),
        among=itertools.product(FAMILIES, ("eager", "sdpa")),
    ),
)  # fmt: skip
def test_scattered_rows_see_their_windows(family, attention):
    outcome = fused_ratio(ModelUnderTest(model_of(family, attention)))
    assert outcome.error <= 1e-5


@families
def test_window_and_answer_is_all_that_is_held(pieces, family):
    model = model_of(family)
    cache, inputs = prepared(model, pieces(**FOUR_WINDOWS))
    prefill(model, inputs, cache)
    assert cache.is_sliding == DynamicCache(config=model.config).is_sliding
    token = sum(states[:, :, :1].nbytes for states in (cache.layers[0].keys, cache.layers[0].values))
    assert sliding(cache)
    for layer in sliding(cache):
        assert layer.get_seq_length() == 4 * WINDOW
        assert layer.keys.shape[2] == WINDOW - 1
        assert layer.nbytes <= WINDOW * token
    cache, inputs = prepared(model, pieces(**FOUR_WINDOWS))
    run(model, inputs, cache)
    for layer in cache.layers:
        assert layer.get_seq_length() == 4 * WINDOW + NEW - 1
        if layer.is_sliding:
            assert layer.nbytes <= (WINDOW + NEW - 1) * token
        else:
            assert layer.keys.shape[2] == 4 * WINDOW + NEW - 1


@pytest.mark.parametrize("recording", [False, True])
@pytest.mark.parametrize("window", [2, 5, 16, 40])
def test_sliding_layer_shows_what_stock_layer_shows(window, recording):
    mine = BlendSlidingLayer(window)
    theirs = DynamicSlidingWindowLayer(window)
    draw = random.Random(window)
    if recording:
        mine.activate_past_recording()
        theirs.activate_past_recording()
    for seed in range(60):
        tokens = draw.randrange(1, 4 if seed % 5 else 50)
        assert mine.get_mask_sizes(tokens) == theirs.get_mask_sizes(tokens)
        new = states(tokens, seed)
        check_equal(mine.update(*new), theirs.update(*new))
        removed = -draw.randrange(tokens)
        for layer in (mine, theirs):
            if recording:
                layer.crop(removed)
            elif seed % 7 == 0:
                layer.reorder_cache(torch.tensor([1, 0]))
        assert mine.get_seq_length() == theirs.get_seq_length()
        check_equal((mine.keys, mine.values), (theirs.keys, theirs.values))
        assert mine.nbytes <= 2 * 2 * (8 + 6) * 4 * (2 * window + 50)
    assert mine.get_max_length() == theirs.get_max_length() == window
