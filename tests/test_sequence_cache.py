# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A sequence cache holds the keys that a direct computation at its positions gives, and leaves the model alone."""

import copy
import gc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import tiny_model
from transformers import TextIteratorStreamer

from hf_blend.context.self_extend import self_extend
from hf_blend.context.sequence_cache import SequenceCache, ShiftCache
from hf_blend.errors import ConfigError, PromptError, UnsupportedModelError
from hf_blend.model.capture import capture
from tests.asking import apart, failing, hooks, prompt
from tests.sequences import fed, filled, shifted_by_hand
from tests.test_sequence_ops import moves

FAMILIES = ("llama", "gpt_neox", "cohere2", "gemma3_text", "deepseek_v3", "gptj")
TOLERANCE = 1e-5
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 128}
MODELS = {name: tiny_model(name) for name in FAMILIES}
LLAMA = MODELS["llama"]


def is_direct(cache):
    """Layer-0 K and V, which do not depend on context, are those computed at the positions of the active sequence."""
    ids, positions = torch.tensor([cache.tokens()]), torch.tensor([cache.positions()])
    layer = cache.materialize()[0]
    expected = capture(cache.model, ids, positions).layers[0]
    return max(map(apart, (layer.keys, layer.values), expected)) <= TOLERANCE


@given(moves(24), st.sampled_from(["llama", "gpt_neox", "deepseek_v3", "gptj"]))
def test_keys_after_any_program_are_those_of_a_direct_computation(program, name):
    cache = filled(MODELS[name])
    for operation, *arguments in program:
        getattr(cache, operation)(*arguments)
    cache.keep(0)  # cells of the copy alone stay where they are, hidden
    cache.compact()
    assert not cache.get_seq_length() or is_direct(cache)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_hundred_shifts_of_one_are_one_shift_of_a_hundred(name):
    many, once = filled(MODELS[name]), filled(MODELS[name])
    for _ in range(100):
        many.shift(0, 0, None, 1)
        many.compact()
    once.shift(0, 0, None, 100)
    once.compact()
    for one, other in zip(many.layers, once.layers, strict=True):
        assert torch.equal(one.keys, other.keys)
        assert torch.equal(one.values, other.values)


@pytest.mark.parametrize(
    ("name", "mode"), [*((name, {}) for name in FAMILIES), ("llama", {"prompt_lookup_num_tokens": 3})]
)
def test_generate_without_operations_is_plain_generate(name, mode):
    """Prompt lookup crops what was guessed wrong."""
    model, ids = MODELS[name], prompt(20).repeat(1, 2)
    expected = model.generate(ids, max_new_tokens=12, do_sample=False)
    assert torch.equal(model.generate(ids, past_key_values=SequenceCache(model), max_new_tokens=12, **mode), expected)


def test_what_is_done_to_a_copy_changes_nothing_for_the_sequence():
    cache, alone = filled(LLAMA), filled(LLAMA)
    alone.crop(-4)
    cache.copy(0, 1)
    fed(cache, prompt(2, 1))
    cache.crop(-6)
    assert apart(fed(cache, prompt(5, 2)), fed(alone, prompt(5, 2))) <= TOLERANCE
    assert cache.tokens(1) == prompt(24)[0].tolist()
    cache = filled(LLAMA)
    cache.copy(0, 1)
    cache.use(1)
    cache.remove(1, 4, 9)
    cache.shift(1, 9, None, -5)
    fed(cache, prompt(3, seed=1))
    cache.use(0)
    assert apart(fed(cache, prompt(5, 2)), fed(filled(LLAMA), prompt(5, 2))) <= TOLERANCE
    pieces = prompt(24)[0, :4], prompt(24)[0, 9:], prompt(3, seed=1)[0]
    assert cache.tokens(1) == torch.cat(pieces).tolist()
    assert cache.positions(1) == list(range(22))


def test_forgotten_tokens_free_their_storage():
    cache = filled(LLAMA, 400)
    cache.remove(0, 10)
    cache.compact()
    assert cache.nbytes < filled(LLAMA, 280).nbytes


def test_positions_of_a_plain_call_are_those_of_the_cache_and_a_copy_of_the_model_is_refused():
    cache = filled(LLAMA)
    cache.remove(0, 2, 5)
    with pytest.raises(ConfigError, match="not a copy"):
        copy.deepcopy(LLAMA)(prompt(2), past_key_values=cache)
    LLAMA(prompt(2), past_key_values=cache)
    assert cache.positions()[-2:] == [24, 25]


def lengthening(kind):
    """A model whose rotary frequencies change at 128 tokens."""
    factors = {"short_factor": [1.5] * 8, "long_factor": [2.0] * 8} if kind == "longrope" else {}
    rope = {**YARN, "rope_type": kind, **factors}
    return tiny_model("llama", rope_parameters=rope, max_position_embeddings=512 if kind == "longrope" else 128)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_frequencies_that_depend_on_the_length_stay_those_below_it(kind):
    model = lengthening(kind)
    with torch.no_grad():
        model(prompt(140), use_cache=False)  # a longer prompt before leaves its frequencies in the module
    cache = ShiftCache(model, window_tokens=60)
    model.generate(prompt(20), past_key_values=cache, max_new_tokens=200, min_new_tokens=200)
    assert cache.shifts > 0
    assert is_direct(cache)
    with torch.no_grad():
        model(prompt(140), use_cache=False)
    assert is_direct(cache)
    assert ShiftCache(model).window_tokens == 127


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_crossing_to_other_frequencies_is_refused(kind):
    model, most = lengthening(kind), 127
    with pytest.raises(ConfigError, match="127 at most"):
        ShiftCache(model, window_tokens=128)
    cache = filled(model, most)
    with pytest.raises(PromptError, match=r"position 127.*less than 127"):
        fed(cache, prompt(1))
    cache.shift(0, 100, None, 1)
    with pytest.raises(PromptError, match="position 127"):
        fed(cache, prompt(1))
    with pytest.raises(PromptError, match="position 139"):
        model(prompt(140), past_key_values=SequenceCache(model))
    with pytest.raises(UnsupportedModelError, match=kind), self_extend(model, trained_tokens=64, max_tokens=100):
        pass


def test_hook_goes_with_its_cache():
    cache, before = SequenceCache(LLAMA), hooks(LLAMA)
    assert not cache.is_compileable
    LLAMA.generate(prompt(8), past_key_values=cache, max_new_tokens=3)
    assert hooks(LLAMA) == before == 1
    del cache
    gc.collect()
    assert hooks(LLAMA) == 0


@pytest.mark.parametrize("kv_bits", [None, 8])
def test_a_forward_that_fails_leaves_the_cache_as_it_was(kv_bits):
    cache = filled(LLAMA, 150, kv_bits=kv_bits)
    before = {name: part.clone() for name, part in cache.state().items()}
    with failing(LLAMA.model.layers[2].mlp), pytest.raises(ZeroDivisionError):
        LLAMA.generate(**cache.inputs(prompt(100, 1)[0]), past_key_values=cache, max_new_tokens=2)
    assert all(torch.equal(part, before[name]) for name, part in cache.state().items())
    assert torch.equal(fed(cache, prompt(60, 2)), fed(filled(LLAMA, 150, kv_bits=kv_bits), prompt(60, 2)))


@torch.no_grad()
def test_a_shift_drops_half_and_goes_on_as_a_cache_moved_by_hand():
    cache, more = ShiftCache(LLAMA, window_tokens=40, keep_tokens=4), prompt(2, seed=5)
    fed(cache, prompt(40))
    expected = LLAMA(more, past_key_values=shifted_by_hand(LLAMA, prompt(40), 4, 22)).logits
    assert apart(fed(cache, more), expected) <= 2e-5
    assert cache.positions() == list(range(24))
    assert cache.shifts == 1


@pytest.mark.parametrize("new_tokens", [96, pytest.param(640, marks=pytest.mark.slow)])
def test_generation_goes_on_past_the_window_in_bounded_memory(new_tokens):
    cache = ShiftCache(LLAMA, window_tokens=32, keep_tokens=4)
    ways = {"do_sample": True, "streamer": TextIteratorStreamer(Decoder(), skip_prompt=True)}
    count = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens}
    out = LLAMA.generate(prompt(10), past_key_values=cache, **count, **ways)
    assert out.shape[1] == 10 + new_tokens
    assert cache.get_seq_length() <= 32
    assert cache.shifts >= new_tokens // 16
    assert cache.nbytes <= 1.5 * with_room(LLAMA, 32)  # K twice: as computed, and as it stands
    assert cache.tokens()[:4] == prompt(10)[0, :4].tolist()
    assert cache.tokens()[4:] == out[0, -len(cache.tokens()) + 3 : -1].tolist()


class Decoder:
    """The least that a streamer asks of a tokenizer."""

    def decode(self, ids, **_):
        return " ".join(map(str, ids))


def with_room(model, tokens):
    """What a plain cache of so many tokens takes, with the spare room of our buffers."""
    config = model.config
    return 2 * 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * (tokens + 256)


def test_a_prompt_longer_than_the_window_is_read_in_parts():
    cache = ShiftCache(LLAMA, window_tokens=32)
    with pytest.raises(PromptError, match="prefill_chunk_size"):
        LLAMA.generate(prompt(100), past_key_values=cache, max_new_tokens=4)
    inputs = cache.inputs(prompt(100)[0])
    LLAMA.generate(**inputs, past_key_values=cache, max_new_tokens=4, prefill_chunk_size=8)
    assert cache.get_seq_length() <= 32
    assert cache.tokens()[:4] == prompt(100)[0, :4].tolist()


@pytest.mark.parametrize(("window", "keep"), [(8, 7), (8, -1), (1, 0)])
def test_a_window_without_room_is_refused(window, keep):
    with pytest.raises(ConfigError, match="keep_tokens"):
        ShiftCache(LLAMA, window_tokens=window, keep_tokens=keep)
