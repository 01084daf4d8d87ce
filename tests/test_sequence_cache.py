# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A sequence cache gives what stock caches give at its positions, alone and in a batch, and leaves the model alone."""

import copy
import gc

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
from tests.asking import apart, failing, prompt
from tests.sequences import fed, filled, shifted_by_hand
from tests.test_sequence_ops import moves

FAMILIES = ("llama", "gpt_neox", "cohere2", "gemma3_text", "deepseek_v3", "gptj")
BATCHES = [("llama", "sdpa"), ("llama", "eager"), ("deepseek_v3", "sdpa"), ("gptj", "eager")]
TOLERANCE = 2e-5
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 128}
MODELS = {name: tiny_model(name) for name in FAMILIES}
LLAMA = MODELS["llama"]
GREEDY = {"max_new_tokens": 12, "do_sample": False}


def is_direct(cache):
    """Layer-0 K and V, which do not depend on context, are those computed at the positions of the active sequence."""
    ids = torch.tensor([cache.tokens()])
    positions = torch.tensor([cache.positions()])
    keys, values = capture(cache.model, ids, positions).layers[0]
    layer = cache.materialize()[0]
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
    """A forward of the active sequences gives what a stock cache gives for each."""
    held = [(cache.tokens(number), cache.positions(number)[:1]) for number in cache.batch]
    got = fed(cache, new)
    for row, (ids, start) in enumerate(held):
        expected = stock_logits(cache.model, ids, new[row].tolist(), *start)
        assert apart(got[row], expected) <= TOLERANCE


def lengths(cache):
    return [len(cache.tokens(number)) for number in cache.batch]


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
    for layer, other in zip(many.layers, once.layers, strict=True):
        assert torch.equal(layer.keys, other.keys)
        assert torch.equal(layer.values, other.values)


@pytest.mark.parametrize(
    ("name", "mode"), [*((name, {}) for name in FAMILIES), ("llama", {"prompt_lookup_num_tokens": 3})]
)
def test_generate_without_operations_is_plain_generate(name, mode):
    """Prompt lookup crops what was guessed wrong."""
    model = MODELS[name]
    ids = prompt(20).repeat(1, 2)
    got = model.generate(ids, past_key_values=SequenceCache(model), **GREEDY, **mode)
    assert torch.equal(got, model.generate(ids, **GREEDY))


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
    expected = [*prompt(24)[0, :4].tolist(), *prompt(24)[0, 9:].tolist(), *prompt(3, 1)[0].tolist()]
    assert cache.tokens(1) == expected
    assert cache.positions(1) == list(range(22))


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


def test_hook_goes_with_its_cache():
    before = len(LLAMA._forward_pre_hooks)
    cache = SequenceCache(LLAMA)
    assert len(LLAMA._forward_pre_hooks) == before + 1
    LLAMA.generate(prompt(8), past_key_values=cache, max_new_tokens=3)
    assert len(LLAMA._forward_pre_hooks) == before + 1
    del cache
    gc.collect()
    assert len(LLAMA._forward_pre_hooks) == before


def test_forward_that_fails_leaves_cache_as_it_was(untouched):
    cache = filled(LLAMA, 150)
    before = {name: part.clone() for name, part in cache.state().items()}
    with untouched(LLAMA), failing(LLAMA.model.layers[2].mlp), pytest.raises(ZeroDivisionError):
        LLAMA.generate(**cache.inputs(prompt(100, 1)[0]), past_key_values=cache, max_new_tokens=2)
    for name, part in cache.state().items():
        assert torch.equal(part, before[name])
    assert torch.equal(fed(cache, prompt(60, 2)), fed(filled(LLAMA, 150), prompt(60, 2)))


# Frequencies that depend on the length


def lengthening(kind):
    """A model whose rotary frequencies change at 128 tokens."""
    factors = {"short_factor": [1.5] * 8, "long_factor": [2.0] * 8} if kind == "longrope" else {}
    rope = {**YARN, "rope_type": kind, **factors}
    return tiny_model("llama", rope_parameters=rope, max_position_embeddings=512 if kind == "longrope" else 128)


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
    output = LLAMA.generate(
        prompt(10), past_key_values=cache, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=True
    )
    assert cache.get_seq_length() <= 32
    assert cache.shifts >= new_tokens // 16
    assert cache.nbytes <= 1.5 * filled(LLAMA, 32).nbytes  # K twice: as computed, and as it stands
    assert cache.tokens()[:4] == prompt(10)[0, :4].tolist()
    assert cache.tokens()[4:] == output[0, -len(cache.tokens()) + 3 : -1].tolist()


def test_prompt_longer_than_window_is_read_in_parts():
    cache = ShiftCache(LLAMA, window_tokens=32)
    with pytest.raises(PromptError, match="prefill_chunk_size"):
        LLAMA.generate(prompt(100), past_key_values=cache, max_new_tokens=4)
    inputs = cache.inputs(prompt(100)[0])
    LLAMA.generate(**inputs, past_key_values=cache, max_new_tokens=4, prefill_chunk_size=8)
    assert cache.get_seq_length() <= 32
    assert cache.tokens()[:4] == prompt(100)[0, :4].tolist()


def test_window_is_kept_by_each_sequence_of_batch():
    cache = ShiftCache(LLAMA, window_tokens=32, keep_tokens=4)
    cache.use(0, 1)
    ids = prompt(20, rows=2)
    answer = LLAMA.generate(ids, past_key_values=cache, max_new_tokens=60, do_sample=True)
    with torch.no_grad():  # with a mask of all that ever came, as generate of transformers 5.17 makes it
        LLAMA(answer[:, -1:], past_key_values=cache, attention_mask=torch.ones_like(answer))
    assert max(lengths(cache)) <= 32
    assert [cache.tokens(number)[:4] for number in (0, 1)] == ids[:, :4].tolist()


@pytest.mark.parametrize(("window", "keep"), [(8, 7), (8, -1), (1, 0)])
def test_window_without_room_is_refused(window, keep):
    with pytest.raises(ConfigError, match="keep_tokens"):
        ShiftCache(LLAMA, window_tokens=window, keep_tokens=keep)


# A batch of sequences


@pytest.mark.parametrize(("name", "attention"), BATCHES)
def test_batch_over_shared_prefix_gives_logits_of_stock_caches(name, attention):
    cache = filled(tiny_model(name, attn_implementation=attention))
    numbers = cache.fork(3)
    cache.remove(numbers[1], 20)
    for seed, tokens in enumerate((5, 1, 1, 3)):
        check_forward(cache, prompt(tokens, seed + 1, 3))
    assert lengths(cache) == [34, 30, 34]


def test_sequences_of_their_own_are_continued_together():
    cache = SequenceCache(LLAMA)
    cache.use(3, 4)
    check_forward(cache, prompt(9, rows=2))
    for number in (1, 2):
        cache.use(number)
        check_forward(cache, prompt(9 + number, number))
    cache.use(2, 3, 1)
    check_forward(cache, prompt(2, 7, 3))


def test_moved_sequences_are_continued_together_from_one_copy_of_each_cell():
    cache = filled(LLAMA)
    cache.fork(3)
    cache.shift(1, 0, None, 11)
    cache.shift(2, 0, None, 11)
    for seed in range(2):
        check_forward(cache, prompt(2, seed + 3, 3))
    assert cache.layers[0].keys.shape[2] == 2 * 24 + 2 * 2 * 3


def test_questions_of_several_lengths_are_padded_by_tokens_of_no_sequence():
    prefix = prompt(24)[0].tolist()
    questions = [prompt(6, 1)[0].tolist(), prompt(4, 2)[0].tolist()]
    cache = filled(LLAMA)
    cache.fork(2)
    inputs = cache.inputs(*questions)
    output = LLAMA.generate(**inputs, past_key_values=cache, **GREEDY)
    for row, question in enumerate(questions):
        stock = LLAMA.generate(torch.tensor([[*prefix, *question]]), **GREEDY)
        assert output[row, 30:].tolist() == stock[0, 24 + len(question) :].tolist()
        assert cache.tokens(row) == stock[0, :-1].tolist()
    check_forward(cache, prompt(1, 3, 2))


def test_beam_search_over_shared_cells_is_beam_search():
    cache = filled(LLAMA)
    cache.fork(4)
    inputs = cache.inputs(prompt(3, 1)[0])
    ids = torch.cat([prompt(24), prompt(3, 1)], 1)
    assert torch.equal(inputs["input_ids"], ids)
    got = LLAMA.generate(**inputs, past_key_values=cache, num_beams=4, **GREEDY)
    assert torch.equal(got, LLAMA.generate(ids, num_beams=4, **GREEDY))


def test_samples_of_prompt_hold_it_once():
    one = filled(LLAMA, 300)
    cache = filled(LLAMA, 300)
    cache.fork(8)
    inputs = cache.inputs(prompt(2, 1)[0])
    LLAMA.generate(**inputs, past_key_values=cache, num_return_sequences=8, do_sample=True, max_new_tokens=12)
    assert cache.nbytes == one.nbytes  # the tails fit the spare room
    assert cache.state()["ids"].numel() == 300 + 8 * 13


def test_wrong_batches_are_refused_by_name():
    cache = filled(LLAMA)
    for wrong in ((), (1, 1), (0, -1)):
        with pytest.raises(ConfigError, match="expected"):
            cache.use(*wrong)
    with pytest.raises(ConfigError, match="fork"):
        cache.fork(0)
    with pytest.raises(PromptError, match="2 came for 1 active sequences, but one request"):
        LLAMA.generate(prompt(6, rows=2), past_key_values=SequenceCache(LLAMA), max_new_tokens=2)
    cache.fork(2)
    with pytest.raises(ConfigError, match="use"):
        cache.fork(2)
    with pytest.raises(PromptError, match="2 active"):
        fed(cache, prompt(2))
    for new in ((), ([5], [6], [7]), ([5], [])):
        with pytest.raises(ConfigError, match="new tokens came for 2 active sequences"):
            cache.inputs(*new)
    cache.remove(1, 20)  # all ones would count as many tokens of both
    with pytest.raises(PromptError, match=r"\[24, 20\]"):
        LLAMA(prompt(2, rows=2), past_key_values=cache, attention_mask=torch.ones(2, 26))
    with pytest.raises(ConfigError, match="sequence 1 holds other tokens than sequence 0"):
        cache.inputs([5, 6])
    check_forward(cache, prompt(2, rows=2))


@pytest.mark.parametrize(
    ("name", "attention", "says"),
    [
        ("gemma3_text", "sdpa", "measures in tokens"),
        ("bloom", "eager", "measures in tokens"),
        ("llama", "flex_attention", r"'flex_attention'.*eager, sdpa"),
    ],
)
def test_models_without_masks_for_batch_are_refused_by_name(name, attention, says):
    model = tiny_model(name)
    cache = filled(model)
    model.set_attn_implementation(attention)
    with pytest.raises(UnsupportedModelError, match=says):
        cache.fork(2)
    assert cache.batch == (0,)
