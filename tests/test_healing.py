# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""`BlendCache.heal`: a blended cache becomes that of a full prefill from left to right, and is whole at any moment.

The oracle is stock transformers: a plain cache that is given all ids of prompt and answer at once.
"""

import copy
import random

import pytest
import torch
from transformers import DynamicCache

from hf_blend import BlendCache
from hf_blend.cache import idle_healing
from hf_blend.errors import ConfigError, PromptError
from tests.asking import generated, memory, prepared, prompt
from tests.conftest import random_pieces, skip_in_the_oldest, slow_but
from tests.conftest import shared_zoo_model as tiny
from tests.test_turns import small

KINDS = {
    "llama": {}, "mistral": {"sliding_window": 16}, "gemma3_text": {}, "llama4_text": {}, "gemma3n_text": {},
    "deepseek_v3": {}, "deepseek_v32": {"index_topk": 512}, "qwen3_next": {}, "falcon_h1": {}, "minimax": {},
}  # fmt: skip
FAST = ("llama", "gemma3_text", "gemma3n_text", "deepseek_v3", "falcon_h1")
DOCUMENTS = ["Mara keeps a goat in the garden. ", "Tomas keeps a dog behind the house. ", "The market opens at noon. "]
REUSED = {"recompute_ratio": 0.0, "selector": "none"}
ANSWER = {"max_new_tokens": 8, "min_new_tokens": 8}
TURN = prompt(8, seed=9)


def blended(model, *requests, **settings):
    """A cache behind a prompt that was blended without recomputing anything, and an answer; all ids but the last."""
    settings = {**REUSED, "allow_unverified": True, **settings}
    cache, inputs = prepared(model, *(requests or [random_pieces()]), **settings)
    ids = generated(model, inputs, cache, **ANSWER)
    return cache, ids


@torch.no_grad()
def stock(model, ids):
    """The plain cache of these tokens."""
    cache = DynamicCache(config=model.config)
    model(ids, past_key_values=cache)
    return cache


@torch.no_grad()
def next_turn(model, cache, ids=TURN):
    """The logits of a further turn; the cache stays as it is."""
    behind = ids.expand(cache.layers[0].keys.shape[0] if hasattr(cache.layers[0], "keys") else 1, -1)
    return model(behind, past_key_values=copy.deepcopy(cache)).logits


def off(model, cache, ids):
    """How far the next turn is from stock's."""
    expected = next_turn(model, stock(model, ids))
    return float((next_turn(model, cache) - expected).abs().max() / expected.abs().max())


def kv(cache):
    """Copies of K and V, `[batch, kv_heads, tokens, head_dim]` each, of every layer that holds any."""
    return [
        (layer.keys.clone(), layer.values.clone())
        for layer in cache.layers
        if getattr(layer, "keys", None) is not None
    ]


@pytest.mark.parametrize("kind", slow_but(*FAST, among=KINDS))
def test_healed_cache_is_that_of_full_prefill(kind):
    if kind == "gemma3n_text":
        skip_in_the_oldest("layers that share K and V leave none, which is refused")
    model = tiny(kind, **KINDS[kind])
    cache, ids = blended(model)
    assert off(model, cache, ids[:, :-1]) > 1e-3
    steps = [cache.heal(tokens, ids) for tokens in (1, 20, None)]
    assert steps[0] > steps[1] > steps[2] == 0 == cache.heal(history=ids)
    assert off(model, cache, ids[:, :-1]) < 1e-5
    assert cache.report.healed_tokens == cache.get_seq_length() - 5  # all but what stands before the first chunk


def test_left_is_exact_and_right_untouched_at_any_moment():
    model = tiny("llama")
    cache, ids = blended(model)
    exact = kv(stock(model, ids[:, :-1]))
    before = kv(cache)
    length = cache.get_seq_length()
    while left := cache.heal(11, ids):
        done = length - left
        for now, true, was in zip(kv(cache), exact, before, strict=True):
            for states, right, blend in zip(now, true, was, strict=True):
                torch.testing.assert_close(states[:, :, :done], right[:, :, :done], rtol=0, atol=1e-4)
                assert torch.equal(states[:, :, done:], blend[:, :, done:])


@pytest.mark.parametrize("bits", [8, 4])
def test_every_token_of_few_bits_is_quantised_once_more_from_its_exact_states(bits):
    model = tiny("llama")
    cache, ids = blended(model, kv_bits=bits)
    steps = 127 if bits == 8 else 15
    while cache.heal(32, ids):
        pass
    for now, true in zip(kv(cache), kv(stock(model, ids[:, :-1])), strict=True):
        for states, right in zip(now, true, strict=True):
            assert (states - right).abs().max() <= 2 * right.abs().max() / steps
    plain = BlendCache(model, memory(), recompute_ratio=0.0, kv_bits=bits, allow_unverified=True)
    with torch.no_grad():
        model(ids[:, :-1], past_key_values=plain)
    assert [layer.packed_tokens for layer in cache.layers] == [layer.packed_tokens for layer in plain.layers]
    expected = next_turn(model, plain)
    assert (next_turn(model, cache) - expected).abs().max() < 0.2 * expected.abs().max()


def test_batch_of_equal_lengths_is_healed_together():
    model = tiny("gemma3_text")
    cache, ids = blended(model, random_pieces(), random_pieces(seed=3))
    assert cache.heal(history=ids) == 0
    assert off(model, cache, ids[:, :-1]) < 1e-5


def test_without_answer_prompt_alone_is_healed():
    model = tiny("llama")
    cache, ids = blended(model)
    answer = ANSWER["max_new_tokens"] - 1
    assert cache.heal() == cache.heal(5) == answer
    assert cache.heal(history=ids) == 0
    assert off(model, cache, ids[:, :-1]) < 1e-5


@pytest.mark.parametrize("tokens", [30, None])
def test_next_prompt_of_messages_keeps_answer_that_healing_was_told(tokens):
    model, tokenizer = small(model_type="llama", template="chatml")
    cache = BlendCache(model, memory(), allow_unverified=True, **REUSED)
    messages = [{"role": "user", "content": "".join([*DOCUMENTS, "Who keeps a dog?"])}]
    inputs = cache.inputs_from_messages(tokenizer, messages, DOCUMENTS)
    answer = "Tomas keeps it."
    ids = inputs["input_ids"]
    with torch.no_grad():
        model(**inputs, past_key_values=cache, logits_to_keep=1)
        for token in tokenizer(answer, add_special_tokens=False).input_ids:
            ids = torch.cat([ids, torch.tensor([[token]])], 1)
            model(ids[:, -1:], past_key_values=cache)
    assert cache.heal(tokens, ids) == 0 or tokens
    cache.heal(history=ids)
    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "And a goat?"}]
    longer = cache.inputs_from_messages(tokenizer, messages)["input_ids"]
    assert torch.equal(longer[:, : ids.shape[1]], ids)
    assert cache.get_seq_length() == ids.shape[1]


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "qwen3_next"])
def test_decoding_goes_on_between_two_calls(kind):
    model = tiny(kind)
    cache, ids = blended(model)
    cache.heal(30, ids)
    longer = generated(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, cache, **ANSWER)
    assert cache.heal(history=longer) == 0
    assert off(model, cache, longer[:, :-1]) < 1e-5


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
@pytest.mark.parametrize("more", [-9, 0, 7])
def test_crop_moves_frontier_as_it_must(kind, more):
    """Behind the frontier, at it and before it; what is computed behind an exact beginning is exact."""
    model = tiny(kind)
    cache, ids = blended(model)
    left = cache.heal(40, ids)
    length = cache.get_seq_length()
    removed = left + more
    try:
        cache.crop(-removed)
    except ConfigError:  # a window has forgotten what stood there
        assert kind == "gemma3_text"
        pytest.skip("a window cannot be cut so far")
    assert cache.heal(0) == max(0, -more)
    cut = ids[:, : length - removed]
    longer = torch.cat([cut, prompt(20, seed=8)], 1)
    again = random_pieces(seed=4)
    with torch.no_grad():
        model(longer[:, cut.shape[1] :], past_key_values=cache)
    assert cache.heal(0) == (20 - more if more < 0 else 0)
    inputs = cache.inputs(None, chunks=again["chunks"], question=again["question"], history=longer)
    output = generated(model, inputs, cache, **ANSWER)
    assert cache.heal(history=output) == 0
    assert off(model, cache, output[:, :-1]) < 1e-5


@pytest.mark.parametrize("healed", [30, None])
def test_turn_with_new_chunks_is_healed_from_first_inexact_token_on(healed):
    model = tiny("llama")
    store = memory()
    cache, ids = blended(model, store=store)
    left = cache.heal(healed, ids)
    again = random_pieces(seed=4)
    inputs = cache.inputs(None, chunks=again["chunks"], question=again["question"], history=ids)
    longer = generated(model, inputs, cache, **ANSWER)
    assert off(model, cache, longer[:, :-1]) > 1e-3
    assert cache.heal(0) > left
    assert cache.heal(history=longer) == 0
    assert off(model, cache, longer[:, :-1]) < 1e-5
    assert healed or cache.report.healed_tokens <= longer.shape[1] - ids.shape[1]


def test_prompt_that_was_computed_is_exact():
    model = tiny("llama")
    cache = BlendCache(model, memory())
    generated(model, {"input_ids": prompt(30), "attention_mask": torch.ones(1, 30)}, cache)
    assert cache.heal() == 0 == cache.report.healed_tokens


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "falcon_h1"])
@pytest.mark.parametrize("bits", [None, 8])
def test_call_that_fails_leaves_its_block_as_it_was(kind, bits):
    """Many faults in all: a module raises in the midst of a block, and every byte of the cache is as before."""
    if bits and kind == "falcon_h1":
        pytest.skip("a layer with a state beside K and V is not kept in few bits")
    model = tiny(kind)
    cache, ids = blended(model, kv_bits=bits)
    modules = [module for module in model.modules() if not list(module.children())]
    draw = random.Random(kind)
    for _ in range(12):
        whole = copy.deepcopy(cache)
        left = cache.heal(0, ids[:, :-1])
        if left < 10:
            cache, ids = blended(model, kv_bits=bits)
            continue
        handle = draw.choice(modules).register_forward_hook(broken)
        try:
            cache.heal(draw.randrange(1, 40), ids)
        except ZeroDivisionError:
            for now, before in zip(kv(cache), kv(whole), strict=True):
                assert all(map(torch.equal, now, before))
        finally:
            handle.remove()
        cache.heal(draw.randrange(1, 4), ids)
    assert cache.heal(history=ids) == 0
    assert bits or off(model, cache, ids[:, :-1]) < 1e-5


def broken(*_):
    raise ZeroDivisionError


broken._hf_blend_observer = True  # or the hook is refused before the block begins


def test_model_is_left_as_it_was(tiny_model, untouched):
    model = tiny_model()
    cache, ids = blended(model)
    with untouched(model):
        cache.heal(history=ids)


@pytest.mark.parametrize(
    ("history", "words"),
    [
        (lambda ids: ids.roll(1), "does not begin as the cache does"),
        (lambda ids: ids.repeat(2, 1), "does not begin as the cache does"),
    ],
)
def test_another_history_is_refused(history, words):
    cache, ids = blended(tiny("llama"))
    with pytest.raises(PromptError, match=words):
        cache.heal(history=history(ids))


def test_what_cannot_be_exact_is_refused_by_name(tmp_path):
    model = tiny("llama")
    padded, _ = blended(model, random_pieces(), random_pieces((9,), seed=5))
    with pytest.raises(ConfigError, match="padding"):
        padded.heal()
    away, _ = blended(model, kv_device_map="disk", offload_folder=tmp_path)
    with pytest.raises(ConfigError, match=r"OffloadedLayer.*kv_device_map"):
        away.heal()
    jamba, _ = blended(tiny("jamba"))
    with pytest.raises(ConfigError, match="only where one token comes at a time"):
        jamba.heal()
    cut, ids = blended(model, kv_bits=8)
    cut.crop(-70)
    generated(model, {"input_ids": ids[:, :-30], "attention_mask": torch.ones_like(ids[:, :-30])}, cut, **ANSWER)
    with pytest.raises(ConfigError, match="whole groups"):
        cut.heal()


def test_another_model_heals_nothing(tiny_model):
    model = tiny_model()
    cache, ids = blended(model)
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
        next(iter(model.model.layers[0].parameters())).mul_(1.5)
    with pytest.raises(ConfigError, match="computed by another model"):
        cache.heal(history=ids)


def test_idle_healing_ends_exact_or_within_step(monkeypatch):
    model = tiny("llama")
    healing = idle_healing.IdleHealing()
    cache, ids = blended(model)
    healing.start(cache, ids)
    healing._thread.join(60)
    healing.stop()
    assert off(model, cache, ids[:, :-1]) <= 1e-5
    monkeypatch.setattr(idle_healing, "STEP_TOKENS", 4)
    cache, ids = blended(model)
    healing.start(cache, ids)
    healing.stop()
    assert cache.heal(None, ids) == 0
    assert off(model, cache, ids[:, :-1]) <= 1e-5


def test_idle_healing_that_fails_loses_nothing(caplog):
    model = tiny("llama")
    healing = idle_healing.IdleHealing()
    cache, ids = blended(model)
    before = kv(cache)
    handle = model.model.layers[1].register_forward_hook(broken)
    healing.start(cache, ids)
    healing.stop()
    handle.remove()
    assert "healing ended" in caplog.text
    assert all(
        torch.equal(*pair) for layers in zip(kv(cache), before, strict=True) for pair in zip(*layers, strict=True)
    )
    assert cache.heal(None, ids) == 0
