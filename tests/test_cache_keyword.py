# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A cache is passed under either name that transformers has for it, and the library itself uses none that is old."""

import inspect
import warnings

import pytest
import torch
from torch import nn
from transformers import GenerationMixin

from hf_blend import blended
from hf_blend.context.sequence_cache import SequenceCache
from hf_blend.model.anatomy import KEYWORD, KEYWORDS, cache_among, cache_argument, without_cache
from tests.asking import GREEDY, PIECES, prepared

TAKEN = KEYWORDS if KEYWORD == "cache" else (KEYWORD,)  # by this transformers
OUTDATED = "ignore:.*`past_key_values` is deprecated:FutureWarning"


@pytest.fixture
def model(tiny_model):
    return tiny_model(num_hidden_layers=3)


@pytest.mark.filterwarnings(OUTDATED)
@pytest.mark.parametrize("name", TAKEN)
def test_generate_and_forward_reuse_chunks_under_each_name(model, name):
    cache, inputs = prepared(model, PIECES, recompute_ratio=0.2)
    model.generate(**inputs, **{name: cache}, **GREEDY)
    assert cache.report.reused_tokens > 0
    cache, inputs = prepared(model, PIECES, recompute_ratio=0.2)
    model(**inputs, **{name: cache}, logits_to_keep=1)
    assert cache.report.reused_tokens > 0


@torch.no_grad()
def test_own_calls_of_model_use_no_name_that_is_deprecated(model):
    """Of storing, testing the model, blending, healing, `blended` and sequences."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        cache, inputs = prepared(model, PIECES, recompute_ratio=0.2)
        model.generate(**inputs, **cache.keyword, **GREEDY)
        assert cache.report.reused_tokens > 0
        assert cache.heal(8) > 0
        cache, inputs = prepared(model, PIECES, recompute_ratio=0.2)
        assert model(**inputs, **cache_argument(model, cache), logits_to_keep=1).logits.shape[1] == 1
        answer = blended(cache.store, recompute_ratio=0.2)
        model.generate(inputs["input_ids"], custom_generate=answer, **GREEDY)
        assert answer.report.reused_tokens > 0
        sequences = SequenceCache(model)
        model.generate(inputs["input_ids"], **cache_argument(model, sequences), **GREEDY)
        sequences.remove(0, 10, 20)
        assert sequences.get_seq_length() > inputs["input_ids"].shape[1] - 10


def test_name_is_that_of_forward_and_wrapper_has_one_of_transformers(model):
    class Wrapper(nn.Module):
        def forward(self, *args, **kwargs):
            return args, kwargs

    class Older(nn.Module):
        def forward(self, input_ids, past_key_values=None):
            return past_key_values

    assert KEYWORD in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    assert cache_argument(model, 3) == cache_argument(Wrapper(), 3) == {KEYWORD: 3}
    assert cache_argument(Older(), 3) == {"past_key_values": 3}
    for name in KEYWORDS:
        arguments = {name: 3, "use_cache": True}
        assert cache_among(arguments) == 3
        assert without_cache(arguments) == {"use_cache": True}
    assert cache_among({"cache": None}) is None
