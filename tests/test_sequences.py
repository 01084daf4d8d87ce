# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A batch of sequences over one storage gives what stock caches of their own give, and holds what they share once."""

import pytest
import torch
from tiny_models import tiny_model
from transformers import DynamicCache

from hf_blend.context.sequence_cache import SequenceCache, ShiftCache
from hf_blend.errors import ConfigError, PromptError, UnsupportedModelError
from tests.asking import apart, failing, prompt
from tests.sequences import fed, filled

FAMILIES = [("llama", "sdpa"), ("llama", "eager"), ("gpt_neox", "sdpa"), ("deepseek_v3", "sdpa"), ("gptj", "eager")]
TOLERANCE = 2e-5
MODEL = tiny_model("llama")


@torch.no_grad()
def alone(model, ids, more, start=0):
    """Logits of `more` behind `ids`, which may be empty, in a stock cache, with the first token at a position."""
    cache, places = DynamicCache(), torch.arange(start, start + len(ids) + len(more))[None]
    if ids:
        model(torch.tensor([ids]), past_key_values=cache, position_ids=places[:, : len(ids)])
    return model(torch.tensor([more]), past_key_values=cache, position_ids=places[:, len(ids) :]).logits[0]


def check(cache, new):
    """A forward of the active sequences against a stock cache for each."""
    held = [(cache.tokens(number), cache.positions(number)[:1]) for number in cache.batch]
    got = fed(cache, new)
    for row, (ids, start) in enumerate(held):
        assert apart(got[row], alone(cache.model, ids, new[row].tolist(), *start)) <= TOLERANCE


def lengths(cache):
    return [len(cache.tokens(number)) for number in cache.batch]


@pytest.mark.parametrize(("name", "attention"), FAMILIES)
def test_a_batch_over_a_shared_prefix_gives_the_logits_of_stock_caches(name, attention):
    cache = filled(tiny_model(name, attn_implementation=attention))
    numbers = cache.fork(3)
    cache.remove(numbers[1], 20)
    for seed, tokens in enumerate((5, 1, 1, 3)):
        check(cache, prompt(tokens, seed + 1, 3))
    assert lengths(cache) == [34, 30, 34]


def test_sequences_of_their_own_are_continued_together():
    cache = SequenceCache(MODEL)
    cache.use(3, 4)
    check(cache, prompt(9, rows=2))
    cache = filled(MODEL)
    for number in (1, 2):
        cache.use(number)
        check(cache, prompt(9 + number, number))
    cache.use(2, 0, 1)
    check(cache, prompt(2, 7, 3))
    cache.use(1)
    check(cache, prompt(1, 8))


def test_moved_sequences_are_continued_together_from_one_copy_of_each_cell():
    cache = filled(MODEL)
    cache.fork(3)
    cache.shift(1, 0, None, 11)
    cache.shift(2, 0, None, 11)
    for seed in range(2):
        check(cache, prompt(2, seed + 3, 3))
    assert cache.layers[0].keys.shape[2] == 2 * 24 + 2 * 2 * 3


def test_questions_of_several_lengths_behind_one_prefix_are_padded_by_tokens_of_no_sequence():
    prefix, questions = prompt(24)[0].tolist(), [prompt(6, 1)[0].tolist(), prompt(4, 2)[0].tolist()]
    ids = torch.tensor([[*prefix, *questions[0]], [*prefix, 0, 0, *questions[1]]])
    given, greedy = {"attention_mask": torch.ones_like(ids)}, {"max_new_tokens": 8, "do_sample": False}
    given["attention_mask"][1, 24:26] = 0
    cache, generating = filled(MODEL), filled(MODEL)
    cache.fork(2)
    cache.inputs(*questions)
    generating.fork(2)
    with torch.no_grad():
        logits = MODEL(ids[:, 24:], past_key_values=cache, **given).logits
    texts = MODEL.generate(**generating.inputs(*questions), past_key_values=generating, **greedy)
    for row, question in enumerate(questions):
        assert apart(logits[row, -len(question) :], alone(MODEL, prefix, question)) <= TOLERANCE
        assert cache.tokens(row) == [*prefix, *question]
        plain = MODEL.generate(torch.tensor([[*prefix, *question]]), **greedy)
        assert texts[row, 30:].tolist() == plain[0, 24 + len(question) :].tolist()
    check(cache, prompt(1, 3, 2))


def test_beam_search_over_shared_cells_is_beam_search():
    ids, beams = torch.cat([prompt(24), prompt(3, 1)], 1), {"num_beams": 4, "max_new_tokens": 12, "do_sample": False}
    cache = filled(MODEL)
    cache.fork(4)
    inputs = cache.inputs(prompt(3, 1)[0])
    assert torch.equal(inputs["input_ids"], ids)
    assert torch.equal(MODEL.generate(**inputs, past_key_values=cache, **beams), MODEL.generate(ids, **beams))


def test_samples_of_a_prompt_hold_it_once():
    one, cache = filled(MODEL, 300), filled(MODEL, 300)
    cache.fork(8)
    inputs = cache.inputs(prompt(2, 1)[0])
    out = MODEL.generate(**inputs, past_key_values=cache, num_return_sequences=8, do_sample=True, max_new_tokens=12)
    assert len({tuple(row) for row in out.tolist()}) > 1
    assert cache.nbytes == one.nbytes  # the tails fit the spare room
    held = torch.cat([cache._table.row(number)[0] for number in cache.batch]).unique()
    assert len(held) == 300 + 8 * 13


def test_using_a_sequence_among_others_copies_nothing():
    cache = filled(MODEL, 200)
    cache.fork(3)
    check(cache, prompt(4, 1, 3))
    before = cache.nbytes
    for number in (1, 0, 2):
        cache.use(number)
        check(cache, prompt(1, number))
    cache.use(5)
    check(cache, prompt(9, 5))
    assert cache.nbytes == before
    cache.use(0, 1, 2)
    cache.crop(-3)
    assert lengths(cache) == [202] * 3
    check(cache, prompt(2, 2, 3))


def test_most_of_the_storage_is_not_looked_at_in_vain():
    cache = filled(MODEL, 10)
    for number in (1, 2):
        cache.use(number)
        check(cache, prompt(60, number))
    cache.use(0)
    check(cache, prompt(1))
    assert cache.layers[0].keys.shape[2] == 11


def test_a_window_is_kept_by_each_sequence_of_a_batch():
    cache = ShiftCache(MODEL, window_tokens=32, keep_tokens=4)
    cache.use(0, 1)
    ids = prompt(20, rows=2)
    answer = MODEL.generate(ids, past_key_values=cache, max_new_tokens=60, do_sample=True)
    with torch.no_grad():  # with a mask of all that ever came, as generate of transformers 5.17 makes it
        MODEL(answer[:, -1:], past_key_values=cache, attention_mask=torch.ones_like(answer))
    assert max(lengths(cache)) <= 32
    assert [cache.tokens(number)[:4] for number in (0, 1)] == ids[:, :4].tolist()


def test_the_sequence_with_the_longest_prefix_in_common_is_chosen():
    cache, ids = filled(MODEL), prompt(24)[0].tolist()
    assert SequenceCache(MODEL).closest(ids) == (0, 0)
    cache.copy(0, 1, 0, 9)
    cache.copy(0, 2, 0, 15)
    cache.copy(0, 3, 5)
    cache.use(1)
    assert cache.closest(ids) == (0, 24)
    assert cache.closest([*ids[:12], 1, 2]) == (0, 12)
    cache.remove(0, 8, 9)
    cache.shift(0, 9, None, -1)
    assert cache.closest([*ids[:12], 1]) == (2, 12)
    assert cache.closest([*ids[:8], *ids[9:]])[1] == 8  # what was moved is not what a prefill computes
    assert cache.closest([1, 2]) == (1, 0)


def test_what_a_batch_cannot_be_is_refused():
    model, cache = MODEL, filled(MODEL)
    for wrong in ((), (1, 1), (0, -1)):
        with pytest.raises(ConfigError, match="expected"):
            cache.use(*wrong)
    with pytest.raises(ConfigError, match="fork"):
        cache.fork(0)
    cache.fork(2)
    with pytest.raises(ConfigError, match="use"):
        cache.fork(2)
    with pytest.raises(PromptError, match="2 active"):
        model.generate(prompt(26), past_key_values=cache, max_new_tokens=2)
    for new in ((), ([5], [6], [7]), ([5], [])):
        with pytest.raises(ConfigError, match="new tokens came for 2 active sequences"):
            cache.inputs(*new)
    with pytest.raises(PromptError, match="2 came for 1 active sequences, but one request"):
        model.generate(prompt(6, rows=2), past_key_values=SequenceCache(model), max_new_tokens=2)
    with pytest.raises(PromptError, match="counts"):
        model(prompt(2, rows=2), past_key_values=cache, attention_mask=torch.ones(2, 20))
    cache.remove(1, 20)  # all ones would count as many tokens of both
    with pytest.raises(PromptError, match=r"\[24, 20\]"):
        model(prompt(2, rows=2), past_key_values=cache, attention_mask=torch.ones(2, 26))
    with pytest.raises(ConfigError, match="sequence 1 holds other tokens than sequence 0"):
        cache.inputs([5, 6])
    check(cache, prompt(2, rows=2))


def test_models_that_count_tokens_and_attention_without_masks_are_refused_by_name():
    for name in ("gemma3_text", "bloom"):
        cache = filled(tiny_model(name))
        with pytest.raises(UnsupportedModelError, match="measures in tokens"):
            cache.fork(2)
        assert cache.batch == (0,)
    model = tiny_model("llama")
    cache = SequenceCache(model)
    model.set_attn_implementation("flex_attention")
    with pytest.raises(UnsupportedModelError, match=r"'flex_attention'.*eager, sdpa"):
        cache.use(0, 1)


def test_the_model_is_as_before_when_a_batch_fails(untouched):
    cache = filled(MODEL)
    cache.fork(2)
    before = [cache.tokens(number) for number in cache.batch]
    with untouched(MODEL), failing(MODEL.model.layers[1].self_attn.o_proj), pytest.raises(ZeroDivisionError):
        MODEL.generate(**cache.inputs(prompt(2, 1)[0], prompt(2, 1)[0]), past_key_values=cache)
    assert [cache.tokens(number) for number in cache.batch] == before
    check(cache, prompt(2, rows=2))
