# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A prompt that continues a held or saved prefix is what stock transformers makes of the whole."""

from functools import cache

import pytest
import torch
from tiny_models import tiny_model

from hf_blend import ConfigError, PromptError, StateCache, StoreError
from hf_blend.context.session import load_session, save_session
from hf_blend.model.anatomy import stock_cache
from tests import asking

HYBRIDS = ("lfm2", "qwen3_next", "qwen3_5_text", "bamba", "falcon_h1", "nemotron_h", "granitemoehybrid", "jamba",
           "kimi_linear", "minimax", "zamba", "zamba2")  # fmt: skip
ONE_BY_ONE = ("jamba", "zamba")  # the code of 5.23 ignores the state before several tokens
TYPES = (*HYBRIDS, "llama", "gemma2", "gemma3n_text", "deepseek_v32")
FAST = {("lfm2", 7), ("qwen3_next", 7), ("falcon_h1", 1), ("jamba", 7), ("minimax", 1), ("gemma2", 7), ("llama", 1)}
CASES = [pytest.param(name, tail, marks=() if (name, tail) in FAST else pytest.mark.slow)
         for name in TYPES for tail in (1, 7)]  # fmt: skip
PREFIX = 37  # longer than the windows and some chunks of the tiny models
FEW = {"max_new_tokens": 4, "min_new_tokens": 4}

model_of = cache(tiny_model)


def ids_of(tokens, seed=0):
    return asking.prompt(tokens, seed)[0].tolist()


def stock(model, ids):
    """The answer of stock transformers, which sees the whole prompt at once."""
    output = model.generate(torch.tensor([ids]), past_key_values=stock_cache(model), **FEW)
    return output[0, len(ids) :].tolist()


@pytest.fixture
def computed(monkeypatch):
    """How many tokens each call of a model computes; `computed(model)` begins to count."""

    def count(model):
        widths, forward = [], type(model).forward

        def counting(self, input_ids=None, *args, **kwargs):
            widths.append(input_ids.shape[1])
            return forward(self, input_ids, *args, **kwargs)

        monkeypatch.setattr(type(model), "forward", counting)
        return widths

    return count


@pytest.mark.parametrize(("name", "tail"), CASES)
def test_prompts_behind_a_prefix_are_answered_as_if_it_were_computed_with_them(tmp_path, name, tail, untouched):
    model, prefix, path = model_of(name), ids_of(PREFIX), tmp_path / "prefix.session"
    prompts = [[*prefix, *ids_of(tail, seed)] for seed in (1, 2, 3)]
    with untouched(model):
        live = StateCache(model)
        assert live.prefill(prefix) == PREFIX
        assert live.prefill(prefix) == 0
        save_session(live, path)
        loaded = StateCache(model)
        load_session(loaded, path)
    for state in (live, loaded):
        assert [state.generate(ids, **FEW) for ids in prompts] == [stock(model, ids) for ids in prompts]


@pytest.mark.parametrize("name", ["lfm2", "qwen3_next", "llama"])
@pytest.mark.parametrize("is_loaded", [False, True])
def test_a_prefix_is_not_computed_again_by_any_prompt_that_begins_with_it(tmp_path, computed, name, is_loaded):
    model, prefix = model_of(name), ids_of(PREFIX)
    widths = computed(model)  # before it computes: another forward is another author
    state = StateCache(model)
    state.prefill(prefix)
    if is_loaded:
        save_session(state, tmp_path / "prefix.session")
        load_session(state := StateCache(model), tmp_path / "prefix.session")
    for seed in (1, 2):
        widths.clear()
        state.generate([*prefix, *ids_of(7, seed)], **FEW)
        assert sum(widths) == 7 + 3, "the last token of the answer is not computed"


def test_a_turn_continues_behind_the_answer_and_an_earlier_parting_behind_the_prefix(computed):
    model = model_of("qwen3_next")
    widths, state = computed(model), StateCache(model)
    prefix, question = ids_of(PREFIX), ids_of(7, 1)
    state.prefill(prefix)
    answer = state.generate([*prefix, *question], **FEW)
    longer = [*prefix, *question, *answer, *ids_of(5, 2)]
    expected = stock(model, longer)
    widths.clear()
    assert state.generate(longer, **FEW) == expected
    assert sum(widths) == 1 + 5 + 3
    parted = [*prefix, *ids_of(9, 3)]
    expected = stock(model, parted)
    widths.clear()
    assert state.generate(parted, **FEW) == expected
    assert sum(widths) == 9 + 3


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_a_prompt_in_parts_behind_a_prefix_is_answered_as_in_one(computed, name):
    model, prompt = model_of(name), ids_of(PREFIX + 20)
    widths, state = computed(model), StateCache(model)
    state.prefill(prompt[:PREFIX])
    widths.clear()
    assert state.generate(prompt, prefill_chunk_size=8, **FEW) == stock(model, prompt)
    assert widths[:3] == [8, 8, 3]


def test_windows_behind_a_prefix_are_forgotten_by_a_prompt_that_begins_otherwise():
    model, state = model_of("gemma2"), StateCache(model_of("gemma2"))
    state.prefill(ids_of(PREFIX))
    other = ids_of(PREFIX + 9, 1)
    for ids in (other, [*other[: PREFIX + 4], *ids_of(5, 2)]):
        assert state.generate(ids, **FEW) == stock(model, ids)


def test_a_prompt_that_is_all_held_is_answered_as_if_nothing_were():
    model, state, prefix = model_of("llama"), StateCache(model_of("llama")), ids_of(PREFIX)
    state.prefill(prefix)
    assert state.generate(prefix, **FEW) == stock(model, prefix)


def test_states_of_a_prefix_that_another_model_computed_are_not_resumed():
    model, prefix = tiny_model("qwen3_next"), ids_of(PREFIX)
    state = StateCache(model)
    state.prefill(prefix)
    state.generate([*prefix, *ids_of(7, 1)], **FEW)
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(model.get_input_embeddings().weight.flip(0))
    parted = [*prefix, *ids_of(7, 2)]
    assert state.generate(parted, **FEW) == stock(model, parted)


def test_a_prefix_that_does_not_fit_and_a_session_of_another_model_are_refused_by_name(tmp_path):
    model = model_of("lfm2")
    with pytest.raises(PromptError, match="37 new tokens do not fit a window of 30"):
        StateCache(model, window_tokens=30).prefill(ids_of(PREFIX))
    state, path = StateCache(model), tmp_path / "prefix.session"
    state.prefill(ids_of(PREFIX))
    save_session(state, path)
    with pytest.raises(StoreError, match="saved with another model"):
        load_session(StateCache(tiny_model("lfm2", seed=1)), path)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(StoreError, match="is not what was saved"):
        load_session(StateCache(model), path)


def test_a_prefix_that_parts_says_all_that_it_computed():
    state, ids = StateCache(model_of("qwen3_next")), ids_of(PREFIX)
    assert state.prefill(ids) == PREFIX
    assert state.prefill([*ids[:20], *ids_of(9, 3)]) == 20 + 9, "no states were saved at the parting"
    assert state.prefill([*ids[:20], *ids_of(9, 3), 5]) == 1


REFUSED = {
    "a mask": (ConfigError, "attention_mask came", {"attention_mask": torch.zeros(1, PREFIX)}),
    "a cache": (ConfigError, "past_key_values came", {"past_key_values": ()}),
    "beams": (ConfigError, "num_beams came", {"num_beams": 2}),
    "answers": (ConfigError, "num_return_sequences came", {"num_return_sequences": 2, "do_sample": True}),
    "a record": (ConfigError, "return_dict_in_generate came", {"return_dict_in_generate": True}),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_would_hold_other_states_than_the_ids_make_is_refused_and_nothing_is_lost(what):
    error, words, options = REFUSED[what]
    state, ids = StateCache(model_of("lfm2")), ids_of(PREFIX)
    state.prefill(ids[:-3])
    with pytest.raises(error, match=words):
        state.generate(ids, **options)
    assert state.tokens() == ids[:-3]


def test_ids_of_a_batch_or_none_and_a_model_in_training_are_refused():
    model, ids = tiny_model("lfm2"), ids_of(PREFIX)
    state = StateCache(model)
    for odd in (torch.tensor([ids]), [], ["a"], [1.5]):
        with pytest.raises(PromptError, match=r"expected the token ids of one text|has no token"):
            state.prefill(odd)
    assert state.prefill(torch.tensor(ids)) == PREFIX
    model.train()
    with pytest.raises(ConfigError, match="in training mode"):
        state.generate(ids, **FEW)
