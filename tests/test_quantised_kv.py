# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Decoding from K and V in 8 bits: the prefill is exact, the error afterwards bounded, about half the bytes held."""

import pytest
import torch
from tiny_models import tiny_model as zoo_model

from hf_blend import ConfigError
from hf_blend.cache.layers import BlendLayer, BlendSlidingLayer
from hf_blend.cache.quantised_layer import GROUP_TOKENS, QuantisedLayer, pack, unpack
from hf_blend.model.anatomy import stock_cache
from tests.asking import LONG, apart, packed_by_hand, prefill, prepared
from tests.conftest import shared_zoo_model, skip_in_the_oldest, slow_but

GREEDY = {"max_new_tokens": 80, "do_sample": False, "eos_token_id": None}
LARGEST = 127  # of eight bits with a sign
KINDS = [("gemma3_text", 8), ("llama", 4), ("deepseek_v3", 8)]
each_width = pytest.mark.parametrize("bits", [8, 4])


def states(tokens, seed=0, batch=2, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    both = torch.randn(batch, 2, tokens, 14, generator=generator).to(dtype)
    return both.split([8, 6], -1)


def filled(layer, tokens=200, **how):
    layer.update(*states(tokens, **how))
    return layer


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@each_width
def test_no_entry_is_off_by_more_than_half_step_of_its_group(bits, dtype):
    generator = torch.Generator().manual_seed(1)
    keys, values = torch.randn(2, 2, 2, 4 * GROUP_TOKENS, 64, generator=generator).to(dtype)
    keys[..., 3] = keys[..., 3] * 50 + 30  # a large channel costs the others nothing
    values[:, :, 7, :32] *= 50  # nor a large token; in 4 bits nor a large group of channels
    found = torch.empty(2, *keys.shape, dtype=dtype)
    unpack(pack(bits, keys, values), *found)
    check_rounding(keys, found[0], bits, 2, GROUP_TOKENS)
    check_rounding(values, found[1], bits, 3, 64 if bits == 8 else 32)


def check_rounding(states, found, bits, axis, count):
    """Groups of so many neighbours along an axis share a scale."""
    groups = states.float().unflatten(axis, (-1, count))
    rounded = found.float().unflatten(axis, (-1, count))
    error = (rounded - groups).abs()
    low, high = groups.aminmax(dim=axis + 1, keepdim=True)
    size = torch.maximum(high, -low)
    if bits == 8:
        rounding = torch.finfo(states.dtype).eps / 2 * 1.01
        allowed = size * (0.5 / LARGEST * 1.001) + groups.abs() * rounding
    else:  # the least value is rounded, too
        allowed = (high - low) / 30 * 1.01 + size / 100
    assert (error <= allowed).all()
    assert error.max() > 0


def test_odd_width_is_not_packed_into_pairs():
    with pytest.raises(ConfigError, match=r"width 7.*kv_bits=8"):
        pack(4, torch.zeros(1, 1, 32, 7), torch.zeros(1, 1, 32, 8))


def test_what_is_zero_or_very_large_or_small_stays_finite():
    states = torch.zeros(2, 1, 1, GROUP_TOKENS, 4)
    limits = torch.finfo(torch.float32)
    states[0, ..., 1] = limits.max / 2
    states[1, :, :, 2] = limits.tiny
    back = torch.empty_like(states)
    unpack(pack(8, *states), *back)
    assert torch.isfinite(back).all()
    assert back[0, ..., 0].eq(0).all()


def test_new_tokens_are_seen_as_they_are_and_all_but_last_are_packed_behind_them():
    layer = QuantisedLayer()
    plain = BlendLayer()
    for seed, tokens in enumerate((200, 1, 1, 40, 1)):
        new = states(tokens, seed)
        seen = layer.update(*new)
        for got, true, part in zip(seen, plain.update(*new), new, strict=True):
            assert got.shape == true.shape
            assert torch.equal(got[:, :, -tokens:], part)
            assert (got - true).abs().max() <= 1.001 * 0.5 / LARGEST * true.abs().max()
        assert layer.packed_tokens % GROUP_TOKENS == 0
        assert GROUP_TOKENS <= layer.length - layer.packed_tokens < 2 * GROUP_TOKENS
    assert layer.get_seq_length() == plain.get_seq_length() == 243
    assert torch.equal(layer.keys, layer.keys)


@each_width
def test_beams_are_reordered_with_their_packed_tokens(bits):
    layer = filled(QuantisedLayer(bits))
    before = layer.values.clone()
    layer.reorder_cache(torch.tensor([1, 1]))
    assert torch.equal(layer.values, before[[1, 1]])
    layer.batch_repeat_interleave(2)
    assert torch.equal(layer.values, before[[1, 1, 1, 1]])


@pytest.mark.parametrize(("family", "bits"), slow_but(*KINDS[:2], among=KINDS))
def test_prefill_is_exact_and_decoding_keeps_half_bytes_or_less(family, bits):
    model = zoo_model(family).bfloat16()
    plain, inputs = prepared(model, LONG, recompute_ratio=0.3)
    cache, _ = prepared(model, LONG, recompute_ratio=0.3, kv_bits=bits)
    shown = {**GREEDY, "output_logits": True, "return_dict_in_generate": True}
    expected = model.generate(**inputs, past_key_values=plain, **shown)
    got = model.generate(**inputs, past_key_values=cache, **shown)
    assert torch.equal(got.logits[0], expected.logits[0]), "the first token comes from the prefill"
    assert got.sequences.shape == expected.sequences.shape
    assert any(isinstance(layer, QuantisedLayer) for layer in cache.layers)
    share = 0.75 if bits == 8 else 0.5
    for layer, other in zip(cache.layers, plain.layers, strict=True):
        assert layer.get_seq_length() == other.get_seq_length()
        if isinstance(layer, BlendSlidingLayer):
            continue
        assert layer.packed_tokens > 150
        packed_share = layer.packed_tokens / layer.length
        plain_bytes = other.keys.nbytes + other.values.nbytes
        assert layer.nbytes <= plain_bytes * (share * packed_share + 1 - packed_share)


INDEXED = ("llama", "deepseek_v32", "glm_moe_dsa", "qwen3_next")


@pytest.mark.parametrize("name", slow_but("deepseek_v32", among=INDEXED))
@torch.no_grad()
def test_step_is_that_of_stock_cache_that_was_packed_by_hand(name):
    if name in ("deepseek_v32", "glm_moe_dsa"):
        skip_in_the_oldest("models with an indexer turn their keys in a way that is refused")
    model = shared_zoo_model(name)
    cache, inputs = prepared(model, LONG, recompute_ratio=1.0, kv_bits=8)
    by_hand = stock_cache(model)
    assert apart(prefill(model, inputs, cache), prefill(model, inputs, by_hand)) <= 1e-4
    for layer in by_hand.layers:
        if not hasattr(layer, "recurrent_states"):
            layer.keys, layer.values = packed_by_hand(layer.keys, layer.values)
    assert any(isinstance(layer, QuantisedLayer) for layer in cache.layers)
    ids = torch.tensor([[5, 9, 11]]).split(1, 1)
    steps = []
    for one in ids:
        logits = model(one, past_key_values=cache).logits
        expected = model(one, past_key_values=by_hand).logits
        assert apart(logits, expected) <= 1e-4
        steps.append(logits)
    if name != "qwen3_next":
        cache.crop(-3)
        for one, logits in zip(ids, steps, strict=True):
            assert torch.equal(model(one, past_key_values=cache).logits, logits)
