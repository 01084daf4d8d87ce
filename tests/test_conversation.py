# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A conversation keeps its turns, stays in its window, and brings old turns back."""

import copy

import pytest
import torch
from tiny_models import tiny_model
from transformers import DynamicCache

from hf_blend import ConfigError, PromptError, ShiftCache
from hf_blend.context.conversation import Conversation
from hf_blend.context.reuse import blended, continued, take_back
from hf_blend.errors import StoreError
from hf_blend.store.tiers.base import EntryFault
from tests.asking import apart, memory, packed_by_hand, prompt, rotated
from tests.conftest import slow_but
from tests.sequences import fed, filled, shifted_by_hand

MODEL = tiny_model("llama")
TOLERANCE = 1e-5
MARA = "Mara keeps a goat.\nShe lives in Velden.\nWhere does Mara live?"
SAID = "The market opens at noon.\nAll was quiet until morning.\nTomas keeps a dog.\n"


def talked(model, tokenizer, *first):
    """A conversation that was shifted."""
    chat = Conversation(model, tokenizer, window_tokens=96, archive=memory())
    for said in (*first, *[SAID] * 6):
        chat.ask(said, max_new_tokens=2)
    assert chat.cache.shifts > 0
    return chat


@torch.no_grad()
def test_a_blend_of_a_conversation_comes_near_a_full_prefill_and_is_one_at_full_recompute():
    ids = prompt(150)[0].tolist()
    cache, errors, expected = filled(MODEL, 150), {}, [*ids[:30], *prompt(9, 1)[0].tolist(), *ids[50:110], 5, 6]
    truth = MODEL(torch.tensor([expected])).logits[:, -1]
    for ratio in (0.0, 0.3, 1.0):
        blend = blended(cache, expected, recompute_ratio=ratio)
        blend.get_seq_length()  # as generate does before the prefill
        got = MODEL(torch.tensor([expected]), past_key_values=blend, logits_to_keep=1).logits[:, -1]
        errors[ratio] = apart(got, truth)
        assert (blend.report.exact_tokens, blend.report.reusable_tokens) == (30, 60)
    assert errors[1.0] <= TOLERANCE * 10 < errors[0.3] < errors[0.0]
    assert cache.tokens() == ids


def test_turns_give_what_a_prompt_of_all_turns_gives(reference):
    model, tokenizer = reference
    chat = Conversation(model, tokenizer)
    first = chat.ask(f"Tomas keeps a dog.\n{MARA}", max_new_tokens=3)
    assert first == "Velden"
    second = chat.ask("\nWhat does Mara keep?", max_new_tokens=3)
    asked = tokenizer(chat.turns[1].question, add_special_tokens=False)["input_ids"]
    assert [*chat.turns[1].token_ids[: len(asked)]] == asked
    whole = torch.tensor([[*chat.turns[0].token_ids, *asked]])
    plain = model.generate(whole, max_new_tokens=3, do_sample=False)
    assert tokenizer.decode(plain[0, whole.shape[1] :], skip_special_tokens=True).strip() == second


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


def test_a_turn_that_was_shifted_out_is_brought_back(reference):
    model, tokenizer = reference
    chat = talked(model, tokenizer, MARA)
    assert "Velden" not in tokenizer.decode(chat.cache.tokens())
    report = chat.recall(0, recompute_ratio=1.0).report
    assert report.reusable_tokens > 0
    assert "Velden" in tokenizer.decode(chat.cache.tokens())
    assert chat.cache.get_seq_length() <= 96
    check_plain(model, chat.cache)


def test_a_turn_is_put_back_where_layers_attend_within_windows(reference):
    model = tiny_model("gemma3_text", vocab_size=512)
    chat = talked(model, reference[1])
    chat.recall(0, recompute_ratio=1.0)
    check_plain(model, chat.cache)


def check_plain(model, cache):
    """A cache holds what a stock prefill of its tokens gives."""
    plain = DynamicCache()
    with torch.no_grad():
        model(torch.tensor([cache.tokens()]), past_key_values=plain)
    for one, other in zip(cache.materialize(), plain.layers, strict=True):
        assert max(apart(one.keys, other.keys), apart(one.values, other.values)) <= 1e-4


@pytest.mark.parametrize("kv_bits", [None, 8])
@torch.no_grad()
def test_a_chunk_is_blended_behind_a_shift_as_a_stock_cache_that_was_moved_by_hand_goes_on(kv_bits):
    chunk, store = prompt(20, 3)[0].tolist(), memory()
    cache = ShiftCache(MODEL, window_tokens=60, keep_tokens=4, kv_bits=kv_bits)
    fed(cache, prompt(40))
    cache.make_room(25)
    assert cache.shifts == 1
    by_hand = shifted_by_hand(MODEL, prompt(40), 4, 44 - cache.get_seq_length())
    for ratio in (1.0, 0.0):
        blend, held = continued(cache, store, recompute_ratio=ratio), cache.get_seq_length()
        inputs = blend.inputs(None, prefix=[7, 8], chunks=[chunk], question=[5, 6, 9], history=[cache.tokens()])
        new = inputs["input_ids"][:, held:]
        got = MODEL(new, past_key_values=blend, attention_mask=inputs["attention_mask"], logits_to_keep=1).logits
        assert (blend.report.past_tokens, blend.report.reusable_tokens) == (held, 20)
        if ratio:
            expected = MODEL(new, past_key_values=by_hand).logits[:, -1:]
            assert apart(got, expected) <= (TOLERANCE * 10 if kv_bits is None else 0.1)
    take_back(cache, blend, new[0].tolist())
    assert cache.positions() == list(range(held + 25))
    alone, first, at = DynamicCache(), len(blend.chunk_prefix_ids), held + 2
    MODEL(torch.tensor([[*blend.chunk_prefix_ids, *chunk]]), past_key_values=alone)
    rounding = TOLERANCE if kv_bits is None else 0.1
    for layer, past, one in zip(cache.materialize(), by_hand.layers, alone.layers, strict=True):
        stored = rotated(one.keys[:, :, first:], at - first).float(), one.values[:, :, first:]
        for got, before, own in zip((layer.keys, layer.values), (past.keys, past.values), stored, strict=True):
            assert apart(got[:, :, :held], before[:, :, :held]) <= rounding
            assert apart(got[:, :, at : at + 20], own) <= rounding
    fed(cache, prompt(30, 4))
    assert cache.shifts == 2


def test_documents_are_blended_into_a_conversation_that_was_shifted(reference):
    model, tokenizer = reference
    chat, document = talked(model, tokenizer), "Mara keeps a goat.\nShe lives in Velden.\n"
    assert chat.ask("Where does Mara live?", [document], blend={"recompute_ratio": 0.3}, max_new_tokens=2) == "Velden"
    assert chat.report.reusable_tokens == len(tokenizer(document, add_special_tokens=False)["input_ids"])
    assert document + "Where does Mara live?" in tokenizer.decode(chat.cache.tokens())
    before = chat.cache.tokens()
    with pytest.raises(ConfigError, match="recompute_ratio"):
        chat.ask("Where?", [document], blend={"recompute_ratio": 7})
    assert chat.cache.tokens() == before
    fresh = Conversation(tiny_model("gemma3_text", vocab_size=512), tokenizer)
    fresh.ask("Where does Mara live?", [document], blend={"recompute_ratio": 1.0}, max_new_tokens=2)
    fresh.ask("\nWho?", [document], blend={"recompute_ratio": 1.0}, max_new_tokens=2)
    check_plain(fresh.model, fresh.cache)


HYBRIDS = ("qwen3_next", "jamba", *(pytest.param(name, marks=pytest.mark.slow) for name in ("lfm2", "falcon_h1")))


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_conversation_of_a_hybrid_is_the_stock_model_on_the_text_that_stays(reference, tmp_path, name, untouched):
    model, tokenizer = tiny_model(name, vocab_size=512), reference[1]
    chat = Conversation(model, tokenizer, system="Mara keeps a goat.\n", window_tokens=60)
    keep, said = chat.cache.keep_tokens, []
    few = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    with untouched(model):
        for number in range(5):
            chat.ask("The market opens at noon. " * (1 + number % 2), **few)
            said += chat.turns[-1].token_ids
            held = chat.cache.tokens()
            assert [*held[keep:], said[-1]] == said[len(said) - len(held) - 1 + keep :]
            plain = model.generate(torch.tensor([held[:-3]]), attention_mask=torch.ones(1, len(held) - 3), **few)
            assert plain[0, -4:].tolist() == said[-4:]
            assert len(held) < 60
        assert chat.cache.shifts > 0
        before = chat.cache.tokens()
        with pytest.raises(ZeroDivisionError):
            chat.ask("Where?", stopping_criteria=[lambda *_: 1 // 0], **few)
        assert chat.cache.tokens() == before
        with pytest.raises(PromptError, match="do not fit a window of 60"):
            chat.ask("The market opens at noon. " * 9, **few)
    chat.save(tmp_path / "chat")
    other = Conversation(model, tokenizer, window_tokens=60)
    other.load(tmp_path / "chat")
    assert other.cache.tokens() == before
    assert other.ask("Where does Mara live?", **few) == chat.ask("Where does Mara live?", **few)
    state = other.cache.state()
    name = next(one for one in state if "recurrent" in one or "conv" in one)
    for wrong in ({**state, name: state[name][..., :-1]}, {**state, name: state[name] * float("nan")}):
        with pytest.raises(EntryFault):
            other.cache.check_state(wrong)
    with pytest.raises(ConfigError, match=r"archive=.* came with .* Leave archive out"):
        Conversation(model, tokenizer, archive=memory())


@pytest.mark.parametrize("name", slow_but("qwen3_next", among=("qwen3_next", "lfm2", "qwen4_exp_text")))
def test_a_conversation_of_a_hybrid_in_8_bits_is_the_stock_model_on_a_cache_that_was_packed_by_hand(
    reference, tmp_path, name
):
    fields = {"layer_types": ["linear_attention", "indexed_attention"] * 2} if name == "qwen4_exp_text" else {}
    model, tokenizer = tiny_model(name, vocab_size=512, **fields), reference[1]
    few = {"max_new_tokens": 1, "do_sample": False, "eos_token_id": None}
    chat, plain = Conversation(model, tokenizer, kv_bits=8), Conversation(model, tokenizer)
    for one in (chat, plain):
        one.ask("The market opens at noon. " * 60, **few)
    assert chat.turns == plain.turns, "a forward sees its own tokens as they are"
    held, by_hand = chat.cache.tokens(), copy.deepcopy(plain.cache._cache)
    for packed, layer in zip(chat.cache._cache.layers, by_hand.layers, strict=True):
        if not hasattr(layer, "recurrent_states"):
            keys, values = packed_by_hand(layer.keys, layer.values)
            beside = getattr(packed, "indexer_keys", torch.empty(0)).nbytes
            assert packed.nbytes < (layer.keys.nbytes + layer.values.nbytes) * 0.6 + beside
            assert apart(packed.keys, keys) <= TOLERANCE * 0.1 < apart(packed.keys, layer.keys)
            assert apart(packed.values, values) <= TOLERANCE * 0.1 < apart(packed.values, layer.values)
            layer.keys, layer.values = keys, values
    chat.save(tmp_path / "chat")
    later = Conversation(model, tokenizer, kv_bits=8)
    later.load(tmp_path / "chat")
    assert [*map(type, later.cache._cache.layers)] == [*map(type, chat.cache._cache.layers)]
    for one, again in zip(chat.cache.state().values(), later.cache.state().values(), strict=True):
        torch.testing.assert_close(one, again, rtol=0, atol=1e-6)
    with pytest.raises(StoreError, match="another kv_bits"):
        plain.load(tmp_path / "chat")
    few["max_new_tokens"] = 12
    assert chat.ask("Where?", **few) == later.ask("Where?", **few)
    ids = chat.turns[1].token_ids
    prompt = torch.tensor([[*held, *chat.turns[0].token_ids[-1:], *ids[:-12]]])
    expected = model.generate(prompt, past_key_values=by_hand, attention_mask=torch.ones_like(prompt), **few)
    assert expected[0, -12:].tolist() == [*ids[-12:]]
    with pytest.raises(ConfigError, match=r"kv_bits=8 came with .* Leave kv_bits out"):
        Conversation(tiny_model("falcon_h1", vocab_size=512), tokenizer, kv_bits=8)


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
