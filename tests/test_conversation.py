# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A conversation keeps its turns, stays in its window, and brings old turns back."""

import pytest
import torch
from tiny_models import tiny_model
from transformers import DynamicCache
from worlds import REFERENCE

from hf_blend import ChunkStore, ConfigError, PromptError, SequenceCache, UnsupportedModelError
from hf_blend.context.conversation import Conversation
from hf_blend.context.reuse import blended, fit
from hf_blend.evaluation.bundled import load_model

MODEL = tiny_model("llama")
TOLERANCE = 1e-5
MARA = "Mara keeps a goat.\nShe lives in Velden.\nWhere does Mara live?"


@pytest.fixture(scope="module")
def reference():
    return load_model(REFERENCE)


def prompt(tokens, seed=0):
    return torch.randint(3, 100, (1, tokens), generator=torch.Generator().manual_seed(seed))[0].tolist()


def filled(ids):
    cache = SequenceCache(MODEL)
    with torch.no_grad(), cache:
        MODEL(torch.tensor([ids]), past_key_values=cache)
    return cache


def apart(got, wanted):
    return float((got - wanted).abs().max())


def test_a_prompt_that_goes_on_keeps_all_and_is_exact():
    ids = prompt(50)
    cache = filled(ids)
    assert vars(fit(cache, [*ids, 7, 8])) == {"prefix_tokens": 50, "moved_tokens": 0}
    again = fit(cache, ids)
    assert (again.prefix_tokens, cache.get_seq_length()) == (49, 49)  # one token is left to compute


def test_what_was_cut_out_is_dropped_and_the_rest_moves_up():
    ids = prompt(120)
    cache, wanted = filled(ids), [*ids[:30], *ids[50:100], 5, 6]
    assert vars(fit(cache, wanted)) == {"prefix_tokens": 30, "moved_tokens": 50}
    assert cache.tokens() == wanted[:80]
    assert cache.positions() == list(range(80))
    output = MODEL.generate(torch.tensor([wanted]), past_key_values=cache, max_new_tokens=3, do_sample=False)
    assert output.shape[1] == len(wanted) + 3


def test_short_runs_are_not_moved():
    ids = prompt(100)
    cache = filled(ids)
    assert fit(cache, [*ids[:30], *ids[50:70], 5]).moved_tokens == 0
    cache = filled(ids)
    assert fit(cache, [*ids[:30], *ids[50:70], 5], min_run_tokens=8).moved_tokens == 20


@torch.no_grad()
def test_a_blend_of_a_conversation_with_everything_recomputed_is_a_full_prefill():
    ids = prompt(150)
    cache = filled(ids)
    wanted = [*ids[:30], *prompt(9, 1), *ids[50:110], 5, 6]
    blend = blended(cache, wanted, recompute_ratio=1.0)
    got = MODEL.generate(
        torch.tensor([wanted]), past_key_values=blend, max_new_tokens=4, do_sample=False, output_logits=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    plain = MODEL.generate(
        torch.tensor([wanted]), past_key_values=DynamicCache(), max_new_tokens=4, do_sample=False, output_logits=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    assert torch.equal(got.sequences, plain.sequences)
    assert apart(torch.stack(got.logits), torch.stack(plain.logits)) <= TOLERANCE * 100
    assert blend.report.exact_tokens == 30
    assert blend.report.reusable_tokens == 60
    assert cache.tokens() == ids


@torch.no_grad()
def test_blending_comes_nearer_to_a_full_prefill_than_moving_alone():
    ids, errors = prompt(200), {}
    wanted = [*ids[:20], *ids[60:180], 5, 6]
    truth = MODEL(torch.tensor([wanted])).logits[0, -1]
    for ratio in (0.0, 0.3, 1.0):
        blend = blended(filled(ids), wanted, recompute_ratio=ratio)
        out = MODEL.generate(
            torch.tensor([wanted]), past_key_values=blend, max_new_tokens=1, output_logits=True,
            return_dict_in_generate=True,
        )  # fmt: skip
        errors[ratio] = apart(out.logits[0][0], truth)
    assert errors[1.0] < errors[0.3] < errors[0.0]


def test_turns_give_what_a_prompt_of_all_turns_gives(reference):
    model, tokenizer = reference
    chat = Conversation(model, tokenizer)
    first = chat.ask(f"Tomas keeps a dog.\n{MARA}", max_new_tokens=3)
    assert first == "Velden"
    second = chat.ask("\nWhat does Mara keep?", max_new_tokens=3)
    whole = torch.tensor([[*chat.turns[0].token_ids, *chat.turns[1].token_ids]])
    start = len(chat.turns[0].token_ids) + len(chat.turns[1].token_ids) - chat_answer_tokens(chat, tokenizer)
    plain = model.generate(whole[:, :start], max_new_tokens=3, do_sample=False)
    assert tokenizer.decode(plain[0, start:], skip_special_tokens=True).strip() == second


def chat_answer_tokens(chat, tokenizer):
    """How many of the last turn's ids are its answer."""
    asked = tokenizer(chat.turns[-1].question, add_special_tokens=False)["input_ids"]
    return len(chat.turns[-1].token_ids) - len(asked)


def test_a_long_conversation_stays_in_its_window_and_keeps_the_system_prompt(reference):
    model, tokenizer = reference
    chat = Conversation(model, tokenizer, system="Mara keeps a goat.\n", window_tokens=64)
    for number in range(12):
        said = "Tomas keeps a dog." if number % 2 else "The market opens at noon."
        chat.ask(f"{said}\nWhere does Mara live?", max_new_tokens=2)
        assert chat.cache.get_seq_length() <= 64
    assert chat.cache.shifts > 0
    assert tokenizer.decode(chat.cache.tokens()[1:]).startswith("Mara keeps a goat.")
    assert not model._forward_pre_hooks


def test_a_saved_conversation_goes_on_in_another_object(reference, tmp_path):
    model, tokenizer = reference
    chat = Conversation(model, tokenizer)
    chat.ask(MARA, max_new_tokens=3)
    chat.save(tmp_path / "chat")
    other = Conversation(model, tokenizer)
    other.load(tmp_path / "chat")
    question = "\nWhat does Mara keep?"
    assert other.ask(question, max_new_tokens=3) == chat.ask(question, max_new_tokens=3)


def test_a_turn_that_was_shifted_out_is_brought_back(reference):
    model, tokenizer = reference
    chat = Conversation(model, tokenizer, window_tokens=96, archive=ChunkStore.open("memory://"))
    chat.ask(MARA, max_new_tokens=2)
    for _ in range(6):
        chat.ask("The market opens at noon.\nAll was quiet until morning.\nTomas keeps a dog.\n", max_new_tokens=2)
    assert "Velden" not in tokenizer.decode(chat.cache.tokens())
    report = chat.recall(0, recompute_ratio=1.0).report
    assert report.reusable_tokens > 0
    assert "Velden" in tokenizer.decode(chat.cache.tokens())
    assert chat.cache.get_seq_length() <= 96
    fresh = SequenceCache(model)
    with torch.no_grad(), fresh:
        model(torch.tensor([chat.cache.tokens()]), past_key_values=fresh)
    chat.cache.compact()
    for one, other in zip(chat.cache.layers, fresh.layers, strict=True):
        assert apart(one.keys, other.keys) <= 1e-4


def test_a_turn_is_not_put_back_where_layers_forget(reference):
    chat = Conversation(tiny_model("gemma3_text"), reference[1], archive=ChunkStore.open("memory://"))
    with pytest.raises(UnsupportedModelError, match="windows"):
        chat.recall(0)


def test_bad_input_changes_nothing(reference):
    model, tokenizer = reference
    chat = Conversation(model, tokenizer)
    with pytest.raises(PromptError, match="empty"):
        chat.ask("")
    with pytest.raises(ConfigError, match="archive"):
        chat.recall(0)
    with pytest.raises(ValueError, match="nonsense"):
        chat.ask("Where does Mara live?", nonsense=1)
    assert (chat.turns, chat.cache.get_seq_length()) == ([], 0)
    chat.ask(MARA, max_new_tokens=2)
    before = chat.cache.tokens()
    with pytest.raises(ZeroDivisionError):
        chat.ask("\nWhat does Mara keep?", max_new_tokens=2, stopping_criteria=[lambda *_: 1 // 0])
    assert chat.cache.tokens() == before
    assert chat.ask("\nWhat does Mara keep?", max_new_tokens=2).startswith("goat")
    with pytest.raises(ConfigError, match="min_run_tokens"):
        fit(SequenceCache(MODEL), [1, 2], min_run_tokens=0)
