# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A cache layer: what was put in is what comes out, and no token costs a copy of the others."""

import pytest
import torch
from transformers.cache_utils import DynamicLayer

from hf_blend.cache.layers import ROOM_TOKENS, BlendLayer


def states(tokens, seed=0, batch=2, heads=2, width=4, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(batch, heads, tokens, width, generator=generator).to(dtype)
    return keys, torch.randn(batch, heads, tokens, width + 2, generator=generator).to(dtype)


def filled(*lengths):
    layer, reference = BlendLayer(), DynamicLayer()
    for seed, length in enumerate(lengths):
        layer.update(*states(length, seed))
        reference.update(*states(length, seed))
    return layer, reference


def assert_equal(layer, reference):
    assert layer.get_seq_length() == reference.get_seq_length()
    assert torch.equal(layer.keys, reference.keys)
    assert torch.equal(layer.values, reference.values)


def test_update_copies_nothing_until_the_room_is_used_up_and_then_rarely():
    layer, reference = filled(40)
    addresses = [layer.keys.data_ptr()]
    for seed in range(3 * ROOM_TOKENS):
        for one in (layer, reference):
            one.update(*states(1, seed))
        addresses.append(layer.keys.data_ptr())
    assert_equal(layer, reference)
    assert len(set(addresses[: ROOM_TOKENS + 1])) == 1 < len(set(addresses)) <= 3


def test_open_gives_views_behind_what_is_there():
    layer, reference = filled(5)
    keys, values = layer.open(3, *states(1))
    assert (keys.shape, values.shape) == ((2, 2, 3, 4), (2, 2, 3, 6))
    new = states(3, 9)
    keys.copy_(new[0])
    values.copy_(new[1])
    reference.update(*new)
    assert_equal(layer, reference)


@pytest.mark.parametrize(
    ("act", "argument"),
    [
        ("reorder_cache", torch.tensor([1, 1])),
        ("batch_repeat_interleave", 3),
        ("batch_select_indices", torch.tensor([1])),
    ],
)
def test_batch_operations_are_those_of_a_dynamic_layer_and_nothing_where_it_is_empty(act, argument):
    empty, (layer, reference) = BlendLayer(), filled(5, 1)
    getattr(empty, act)(argument)
    empty.crop(0)
    assert (empty.get_seq_length(), empty.is_initialized) == (0, False)
    getattr(layer, act)(argument)
    getattr(reference, act)(argument)
    assert_equal(layer, reference)
    new = states(1, 5, batch=layer.keys.shape[0])
    layer.update(*new)
    reference.update(*new)
    assert_equal(layer, reference)


def test_reset_forgets_everything_even_dtype_and_batch():
    layer, _ = filled(5)
    layer.reset()
    assert (layer.get_seq_length(), layer.is_initialized) == (0, False)
    keys, _ = layer.update(*states(2, 3, batch=1, dtype=torch.bfloat16))
    assert keys.shape == (1, 2, 2, 4)
    assert keys.dtype == torch.bfloat16
