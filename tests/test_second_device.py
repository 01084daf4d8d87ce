# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""On a second device a blend gives what it gives on the CPU, and is asked for no values in a layer."""

from contextlib import nullcontext

import pytest
import torch

from hf_blend import BlendCache, observer
from hf_blend.model.anatomy import decoder_layers
from hf_blend.sparse.decoding import sparse_decoding
from tests.asking import batched, generated, memory
from tests.conftest import build_tiny_model
from tests.second_device import move, second_device


def answer(model, inputs_of, sparse=False, **settings):
    cache = BlendCache(model, memory(), **{"recompute_ratio": 0.15, **settings})
    inputs = inputs_of(cache)
    with sparse_decoding(model, cache, share=0.3, block_tokens=8) if sparse else nullcontext():
        return generated(model, inputs, cache)


@pytest.fixture(scope="module")
def models():
    """A model on the CPU, and the same on the second device."""
    with second_device(), torch.no_grad():
        there = move(build_tiny_model())
    return build_tiny_model(), there


def values_asked_in_layers(model, store, pieces, mode, **settings):
    """How often the device was asked for a value from the first layer of a blended prefill to the end of its last."""
    asked = []
    cache = BlendCache(model, store, recompute_ratio=0.15, **settings)
    inputs = cache.inputs(None, **pieces())
    count = observer(lambda *_: asked.append(sum(mode.asked.values())))
    first, *_, last = decoder_layers(model)
    with first.register_forward_pre_hook(count), last.register_forward_hook(count):
        model(**inputs, past_key_values=cache, logits_to_keep=1)
    return asked[-1] - asked[-2]  # before these a prefix may have been computed alone


@pytest.mark.parametrize("selector", ["boundary", "kv-deviation", "query-attention"])
def test_inside_layers_no_value_is_asked_of_device_but_once_per_request(models, pieces, selector):
    with second_device() as mode, torch.no_grad():
        store = memory()
        store.add(models[1], None, pieces()["chunks"])
        asked = values_asked_in_layers(models[1], store, pieces, mode, selector=selector)
    assert asked <= 1  # does layer 0 fit


SLOW = pytest.mark.slow
CASES = [
    pytest.param({"selector": "kv-deviation"}, True, id="a-batch"),
    pytest.param({"sparse": True}, False, id="sparse"),
]


@pytest.mark.parametrize(("settings", "is_batch"), CASES)
def test_no_tensor_meets_one_of_another_device(models, pieces, tokenizer, settings, is_batch):
    batch = [pieces(), pieces((12, 20, 22), seed=1, question=5)]
    given = batched(*batch[: 1 + is_batch])
    expected = answer(models[0], lambda one: one.inputs(tokenizer, **given), **settings)
    with second_device(), torch.no_grad():
        output = answer(models[1], lambda one: one.inputs(tokenizer, **given), **settings)
    assert torch.equal(output.cpu(), expected)
