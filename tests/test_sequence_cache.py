# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A sequence cache gives what stock caches give at its positions, alone and in a batch, and leaves the model alone."""

import copy
import pickle
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import tiny_model
from transformers import DynamicCache

from hf_blend.context.self_extend import self_extend
from hf_blend.context.sequence_cache import SequenceCache, ShiftCache
from hf_blend.errors import ConfigError, PromptError, UnsupportedModelError
from hf_blend.model.capture import capture
from tests.asking import apart, as_stock, check_equal, failing, longrope, prompt, states_of
from tests.sequences import fed, filled, shifted_by_hand
from tests.test_sequence_ops import moves

FAMILIES = "llama gpt_neox cohere2 gemma3_text deepseek_v3 gptj".split()
TOLERANCE = 2e-5
MODELS = {name: tiny_model(name) for name in FAMILIES}
LLAMA = MODELS["llama"]
GREEDY = {"max_new_tokens": 12, "do_sample": False}


def is_direct(cache):
    """Layer-0 K and V, which do not depend on context, are those computed at the positions of the active sequence."""
    ids = torch.tensor([cache.tokens()])
    positions = torch.tensor([cache.positions()])
    keys, values = capture(cache.model, ids, positions).layers[0]
    layer = cache.compact()[0]
    return max(apart(layer.keys, keys), apart(layer.values, values)) <= TOLERANCE


@torch.no_grad()
def stock_logits(model, ids, new, start=0):
    """Logits of `new` behind `ids`, which may be empty, in a stock cache, with the first token at a position."""
    cache = DynamicCache()
    positions = torch.arange(start, start + len(ids) + len(new))[None]
    if ids:
        model(torch.tensor([ids]), past_key_values=cache, position_ids=positions[:, : len(ids)])
    return model(torch.tensor([new]), past_key_values=cache, position_ids=positions[:, len(ids) :]).logits[0]


def check_forward(cache, new):
    """A forward of the active sequence gives what a stock cache gives."""
    ids = cache.tokens()
    start = cache.positions()[:1]
    expected = stock_logits(cache.model, ids, new[0].tolist(), *start)
    assert apart(fed(cache, new)[0], expected) <= TOLERANCE


# One sequence


@given(moves(24), st.sampled_from(["llama", "gpt_neox", "deepseek_v3", "gptj"]))
def test_keys_after_any_program_are_those_of_direct_computation(program, name):
    cache = filled(MODELS[name])
    for operation, *arguments in program:
        getattr(cache, operation)(*arguments)
    cache.keep(0)  # cells of the copy alone stay where they are, hidden
    cache.compact()
    assert not cache.get_seq_length() or is_direct(cache)


@pytest.mark.parametrize("name", FAMILIES)
def test_hundred_shifts_of_one_are_one_shift_of_hundred(name):
    many = filled(MODELS[name])
    once = filled(MODELS[name])
    for _ in range(100):
        many.shift(0, 0, None, 1)
        many.compact()
    once.shift(0, 0, None, 100)
    once.compact()
    check_equal(states_of(many), states_of(once))


@pytest.mark.parametrize("name", FAMILIES)
def test_generate_without_operations_is_plain_generate(name):
    model = MODELS[name]
    as_stock(model, {"inputs": prompt(20)}, SequenceCache(model))


def test_copy_that_changes_leaves_its_source_alone():
    cache = filled(LLAMA)
    cache.copy(0, 1)
    cache.use(1)
    cache.remove(1, 4, 9)
    cache.shift(1, 9, None, -5)
    fed(cache, prompt(3, 1))
    cache.use(0)
    cache.crop(-4)
    check_forward(cache, prompt(5, 2))
    expected = prompt(24)[0].tolist()
    del expected[4:9]
    expected += prompt(3, 1)[0].tolist()
    assert cache.tokens(1) == expected
    assert cache.positions(1) == list(range(22))


@pytest.mark.parametrize("kind", [SequenceCache, partial(ShiftCache, window_tokens=40)])
def test_deepcopy_continues_by_itself_and_other_copies_are_refused(kind):
    cache = kind(LLAMA)
    fed(cache, prompt(24))
    cache.remove(0, 4, 9)
    cache.shift(0, 9, None, -5)
    twin = copy.deepcopy(cache)
    assert twin.model is LLAMA
    assert twin.author == cache.author
    assert getattr(twin, "window_tokens", None) == getattr(cache, "window_tokens", None)
    expected = fed(cache, prompt(5, 1))
    assert len(twin.tokens()) == 19
    assert torch.equal(fed(twin, prompt(5, 1)), expected)
    for way in (copy.copy, pickle.dumps):
        with pytest.raises(ConfigError, match=r"of 24 tokens.*Use copy.deepcopy\(cache\)"):
            way(cache)


def test_crop_into_shared_tokens_leaves_copy_alone():
    cache = filled(LLAMA)
    cache.copy(0, 1)
    check_forward(cache, prompt(3, 1))
    cache.crop(-5)
    check_forward(cache, prompt(4, 2))
    cache.use(1)
    check_forward(cache, prompt(2, 3))


def test_compact_frees_forgotten_tokens():
    cache = filled(LLAMA, 400)
    cache.remove(0, 10)
    cache.compact()
    assert cache.nbytes < filled(LLAMA, 280).nbytes


def test_plain_call_has_positions_of_cache_and_copy_of_model_is_refused():
    cache = filled(LLAMA)
    cache.remove(0, 2, 5)
    with pytest.raises(ConfigError, match="not a copy"):
        copy.deepcopy(LLAMA)(prompt(2), past_key_values=cache)
    LLAMA(prompt(2), past_key_values=cache)
    assert cache.positions()[-2:] == [24, 25]


def test_forward_that_fails_leaves_cache_as_it_was(untouched):
    cache = filled(LLAMA, 150)
    before = {name: part.clone() for name, part in cache.state().items()}
    with untouched(LLAMA), failing(LLAMA.model.layers[2].mlp), pytest.raises(ZeroDivisionError):
        LLAMA.generate(**cache.inputs(prompt(100, 1)[0]), past_key_values=cache, max_new_tokens=2)
    for name, part in cache.state().items():
        assert torch.equal(part, before[name])
    assert cache.compact()[0].keys.shape[2] == 150
    assert torch.equal(fed(cache, prompt(60, 2)), fed(filled(LLAMA, 150), prompt(60, 2)))


# Frequencies that depend on the length


def lengthening(kind):
    """A model whose rotary frequencies change at 128 tokens."""
    longest = 512 if kind == "longrope" else 128
    rope = longrope(128, rope_type=kind, factor=4.0)
    return tiny_model("llama", rope_parameters=rope, max_position_embeddings=longest)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_frequencies_that_depend_on_length_stay_those_below_it(kind):
    model = lengthening(kind)
    with torch.no_grad():
        model(prompt(140), use_cache=False)  # a longer prompt before leaves its frequencies in the module
    cache = ShiftCache(model, window_tokens=60)
    model.generate(prompt(20), past_key_values=cache, max_new_tokens=200, min_new_tokens=200)
    assert cache.shifts > 0
    assert is_direct(cache)
    assert ShiftCache(model).window_tokens == 127


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_other_frequencies_are_refused(kind):
    model = lengthening(kind)
    with pytest.raises(ConfigError, match="127 at most"):
        ShiftCache(model, window_tokens=128)
    cache = filled(model, 127)
    with pytest.raises(PromptError, match=r"position 127.*less than 127"):
        fed(cache, prompt(1))
    cache.shift(0, 100, None, 1)
    with pytest.raises(PromptError, match="position 127"):
        fed(cache, prompt(1))
    with pytest.raises(UnsupportedModelError, match=kind), self_extend(model, trained_tokens=64, max_tokens=100):
        pass


# A window


@torch.no_grad()
def test_shift_drops_half_and_goes_on_as_cache_moved_by_hand():
    cache = ShiftCache(LLAMA, window_tokens=40, keep_tokens=4)
    fed(cache, prompt(40))
    expected = LLAMA(prompt(2, 5), past_key_values=shifted_by_hand(LLAMA, prompt(40), 4, 22)).logits
    assert apart(fed(cache, prompt(2, 5)), expected) <= TOLERANCE
    assert cache.positions() == list(range(24))
    assert cache.shifts == 1


@pytest.mark.parametrize("new_tokens", [96, pytest.param(640, marks=pytest.mark.slow)])
def test_generation_past_window_takes_bounded_memory(new_tokens):
    cache = ShiftCache(LLAMA, window_tokens=32, keep_tokens=4)
    ways = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": True}
    ids = prompt(10)
    output = LLAMA.generate(ids, past_key_values=cache, **ways)
    assert cache.get_seq_length() <= 32
    assert cache.shifts >= new_tokens // 16
    assert cache.nbytes <= 1.5 * filled(LLAMA, 32).nbytes  # K twice: as computed, and as it stands
    tokens = cache.tokens()
    assert tokens[:4] == ids[0, :4].tolist()
    assert tokens[4:] == output[0, 3 - len(tokens) : -1].tolist()


def test_prompt_longer_than_window_is_read_in_parts():
    cache = ShiftCache(LLAMA, window_tokens=32)
    with pytest.raises(PromptError, match="prefill_chunk_size"):
        LLAMA.generate(prompt(100), past_key_values=cache, max_new_tokens=4)
    inputs = cache.inputs(prompt(100)[0])
    LLAMA.generate(**inputs, past_key_values=cache, max_new_tokens=4, prefill_chunk_size=8)
    assert cache.get_seq_length() <= 32
    assert cache.tokens()[:4] == prompt(100)[0, :4].tolist()


@pytest.mark.parametrize(("window", "keep"), [(8, 7), (8, -1), (1, 0)])
def test_window_without_room_is_refused(window, keep):
    with pytest.raises(ConfigError, match="keep_tokens"):
        ShiftCache(LLAMA, window_tokens=window, keep_tokens=keep)


# Several sequences


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_use_continues_each_sequence_as_stock_cache(name, attention):
    cache = filled(tiny_model(name, attn_implementation=attention))
    cache.copy(0, 1, 0, 20)
    cache.copy(0, 2)
    cache.shift(2, 0, None, 11)
    for seed, number in enumerate((1, 2, 0, 1, 2)):
        cache.use(number)
        for tokens in (5, 1):
            check_forward(cache, prompt(tokens, seed + tokens))
    assert [len(cache.tokens(number)) for number in (0, 1, 2)] == [30, 32, 36]


def test_batches_and_wrong_sequences_are_refused_by_name():
    cache = filled(LLAMA)
    for wrong in (-1, 1.0, True):
        with pytest.raises(ConfigError, match="expected a whole number from 0 on"):
            cache.use(wrong)
    with pytest.raises(ConfigError, match="no new tokens"):
        cache.inputs([])
    for wrong in (lambda: cache.batch_repeat_interleave(2), lambda: cache.reorder_cache(torch.tensor([0, 0]))):
        with pytest.raises(ConfigError, match=r"rows \[0, 0\].*BlendCache"):
            wrong()
    for settings in ({}, {"num_beams": 2}, {"num_return_sequences": 2, "do_sample": True}):
        ids = prompt(6, rows=1 if settings else 2)
        with pytest.raises(PromptError, match=r"2 requests came.*BlendCache"):
            LLAMA.generate(ids, past_key_values=SequenceCache(LLAMA), max_new_tokens=2, **settings)
    mask = torch.ones(1, 26)
    mask[0, 0] = 0
    with pytest.raises(PromptError, match="with padding"):
        LLAMA(prompt(2), past_key_values=cache, attention_mask=mask)
    check_forward(cache, prompt(2))
