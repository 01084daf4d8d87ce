# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""`BlendCache.heal`: a blended cache becomes that of a full prefill.

The oracle is stock transformers: a plain cache that is given all ids of prompt and answer at once.
"""

import copy
import random

import pytest
import torch
from transformers import DynamicCache

from hf_blend import BlendCache, observer
from hf_blend.cache import healing
from hf_blend.context.self_extend import self_extend
from hf_blend.errors import ConfigError, UnsupportedModelError
from tests.asking import apart, failing, generated, longrope, memory, prepared, prompt
from tests.chat_templates import DOCUMENTS, assistant, user
from tests.conftest import random_pieces, skip_in_the_oldest, slow_but
from tests.conftest import shared_zoo_model as zoo_model
from tests.test_turns import small

KINDS = {
    "llama": {}, "mistral": {"sliding_window": 16}, "gemma3_text": {}, "llama4_text": {}, "gemma3n_text": {},
    "deepseek_v3": {}, "deepseek_v32": {"index_topk": 512}, "qwen3_next": {}, "falcon_h1": {}, "minimax": {},
    "lfm2": {},
}  # fmt: skip
FAST = "llama gemma3_text gemma3n_text deepseek_v3 deepseek_v32 falcon_h1".split()
REUSED = {"recompute_ratio": 0.0, "selector": "none", "allow_unverified": True}
ANSWER = {"max_new_tokens": 8, "min_new_tokens": 8}
TURN = prompt(8, seed=9)
PAIR = random_pieces(), random_pieces(seed=3)


def tiny(kind):
    if kind == "gemma3n_text":
        skip_in_the_oldest("layers that share K and V leave none, which is refused")
    if kind == "deepseek_v32":
        skip_in_the_oldest("models with an indexer turn their keys in a way that is refused")
    return zoo_model(kind, **KINDS[kind])


def blended(model, *requests, **settings):
    """A cache behind a prompt that was blended without recomputing anything, and an answer; all ids but the last."""
    cache, inputs = prepared(model, *(requests or [random_pieces()]), **{**REUSED, **settings})
    return cache, generated(model, inputs, cache, **ANSWER)[:, :-1]


@torch.no_grad()
def stock(model, ids):
    """The plain cache of these tokens."""
    cache = DynamicCache(config=model.config)
    model(ids, past_key_values=cache)
    return cache


@torch.no_grad()
def next_turn(model, cache):
    """The logits of a further turn; the cache stays as it is."""
    rows = next(layer.keys.shape[0] for layer in cache.layers if getattr(layer, "keys", None) is not None)
    return model(TURN.expand(rows, -1), past_key_values=copy.deepcopy(cache)).logits


def off(model, cache, ids):
    """How far the next turn is from stock's."""
    expected = next_turn(model, stock(model, ids))
    return apart(next_turn(model, cache), expected) / float(expected.abs().max())


def tensors(cache):
    """Copies of all that the layers hold."""
    copies = []
    for layer in cache.layers:
        if hasattr(layer, "state") and cache.get_seq_length():
            for tensor in layer.state().values():
                copies.append(tensor.clone())
    return copies


@pytest.mark.parametrize("kind", slow_but(*FAST, among=KINDS))
def test_healed_cache_is_that_of_full_prefill(kind):
    model = tiny(kind)
    cache, ids = blended(model)
    assert off(model, cache, ids) > 1e-3
    left = [cache.heal(0), cache.heal(1), cache.heal(20)]
    assert left == [left[0], left[0] - 1, left[0] - 21]
    assert cache.heal() == 0 == cache.heal()
    assert off(model, cache, ids) < 1e-5
    assert cache.report.healed_tokens == cache.get_seq_length() - 5  # all but what stands before the first chunk


def test_left_is_exact_and_right_untouched_where_all_tokens_are_kept():
    model = tiny("llama")
    cache, ids = blended(model)
    exact = stock(model, ids)
    before = copy.deepcopy(cache)
    length = cache.get_seq_length()
    while left := cache.heal(11):
        done = length - left
        for now, full, blend in zip(cache.layers, exact.layers, before.layers, strict=True):
            for name in ("keys", "values"):
                states = getattr(now, name)
                exact_states = getattr(full, name)
                blended_states = getattr(blend, name)
                assert apart(states[:, :, :done], exact_states[:, :, :done]) <= 1e-4
                assert torch.equal(states[:, :, done:], blended_states[:, :, done:])


@pytest.mark.parametrize(("kind", "bits"), [("gemma3_text", None), ("falcon_h1", None), ("llama", 8)])
def test_windows_states_and_groups_stay_until_all_is_computed(kind, bits):
    cache, _ = blended(tiny(kind), kv_bits=bits)
    before = tensors(cache)
    while cache.heal(30):
        assert all(map(torch.equal, tensors(cache), before))
        assert cache.report.healed_tokens == 0
    assert not all(map(torch.equal, tensors(cache), before))


@pytest.mark.parametrize("bits", [8, 4])
def test_few_bits_are_those_of_plain_prefill(bits):
    model = tiny("llama")
    cache, ids = blended(model, kv_bits=bits)
    cache.crop(-3)  # cuts no group, or one: no matter
    assert cache.heal() == 0
    plain = BlendCache(model, memory(), kv_bits=bits, **REUSED)
    with torch.no_grad():
        model(ids[:, :-3], past_key_values=plain)
    assert all(map(torch.equal, tensors(cache), tensors(plain)))


def test_batch_and_beams_are_healed_together():
    model = tiny("gemma3_text")
    cache, ids = blended(model, *PAIR)
    assert cache.heal() == 0
    assert off(model, cache, ids) < 1e-5
    model = tiny("llama")
    cache, inputs = prepared(model, random_pieces(), **REUSED)
    generated(model, inputs, cache, num_beams=3, **ANSWER)
    assert cache.heal() == 0
    assert off(model, cache, torch.tensor(cache.state.tokens.rows())) < 1e-5


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "qwen3_next"])
def test_decoding_goes_on_between_two_calls(kind):
    model = tiny(kind)
    cache, ids = blended(model)
    cache.heal(30)
    with torch.no_grad():
        for token in prompt(5, seed=2)[0]:
            model(token[None, None], past_key_values=cache)
    assert cache.heal() == 0
    assert off(model, cache, torch.cat([ids, prompt(5, seed=2)], 1)) < 1e-5


@pytest.mark.parametrize("more", [-1, 0, 7])
def test_crop_keeps_what_is_exact(more):
    """Behind what is healed, at it and before it; what is computed behind an exact beginning is exact."""
    model = tiny("llama")
    cache, ids = blended(model)
    cache.crop(-cache.heal(40) - more)
    cut = ids[:, : cache.get_seq_length()]
    assert cache.heal(0) == max(0, -more)
    longer = torch.cat([cut, prompt(20, seed=8)], 1)
    pieces = random_pieces(seed=4)
    with torch.no_grad():
        model(longer[:, cut.shape[1] :], past_key_values=cache)
    inputs = cache.inputs(None, chunks=pieces["chunks"], question=pieces["question"], prefix=longer[0])
    output = generated(model, inputs, cache, **ANSWER)
    assert cache.heal() == 0
    assert off(model, cache, output[:, :-1]) < 1e-5


@pytest.mark.parametrize(("kind", "healed"), [("llama", 30), ("llama", None), ("falcon_h1", None)])
def test_turn_with_new_chunks_is_healed_from_first_inexact_token_on(kind, healed):
    model = tiny(kind)
    store = memory()
    cache, ids = blended(model, store=store)
    left = cache.heal(healed)
    pieces = random_pieces(seed=4)
    output = torch.cat([ids, prompt(1)], 1)
    inputs = cache.inputs(None, chunks=pieces["chunks"], question=pieces["question"], prefix=output[0])
    longer = generated(model, inputs, cache, **ANSWER)[:, :-1]
    assert off(model, cache, longer) > 1e-3
    assert cache.heal(0) > left
    assert cache.heal() == 0
    assert off(model, cache, longer) < 1e-5
    assert healed or cache.report.healed_tokens <= longer.shape[1] - ids.shape[1]


def test_next_prompt_of_messages_keeps_healed_answer():
    model, tokenizer = small(model_type="gemma3_text", template="chatml", num_hidden_layers=4)
    cache = BlendCache(model, memory(), **REUSED)
    messages = [user("".join([*DOCUMENTS, "Who keeps a dog?"]))]
    inputs = cache.inputs_from_messages(tokenizer, messages, DOCUMENTS)
    answer = "Tomas keeps it."
    ids = inputs["input_ids"]
    with torch.no_grad():
        model(**inputs, past_key_values=cache, logits_to_keep=1)
        for token in tokenizer(answer, add_special_tokens=False).input_ids:
            ids = torch.cat([ids, torch.tensor([[token]])], 1)
            model(ids[:, -1:], past_key_values=cache)
    assert cache.heal() == 0
    messages += [assistant(answer), user("And a goat?")]
    longer = cache.inputs_from_messages(tokenizer, messages)["input_ids"]
    assert torch.equal(longer[:, : ids.shape[1]], ids)
    assert cache.get_seq_length() == ids.shape[1]


def test_cache_of_two_modes_of_autograd_is_healed():
    cache, inputs = prepared(tiny("llama"), random_pieces(), **REUSED)
    cache.model(**inputs, past_key_values=cache, logits_to_keep=1)
    with torch.no_grad():
        cache.model(prompt(1), past_key_values=cache)
    assert cache.heal() == 0


def test_prompt_that_was_computed_is_exact():
    model = tiny("llama")
    cache = BlendCache(model, memory())
    generated(model, {"input_ids": prompt(30)}, cache)
    assert cache.heal() == 0 == cache.report.healed_tokens


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "falcon_h1", "deepseek_v32"])
@pytest.mark.parametrize("bits", [None, 8])
def test_call_that_fails_leaves_every_byte_as_it_was(kind, bits, monkeypatch):
    """Many faults in all: a module raises in the midst of a block, and healing resumes behind it."""
    if bits and kind == "falcon_h1":
        pytest.skip("a layer with a state beside K and V is not kept in few bits")
    monkeypatch.setattr(healing, "BLOCK_TOKENS", 16)
    model = tiny(kind)
    cache, ids = blended(model, kv_bits=bits)
    modules = [module for module in model.modules() if not list(module.children())]
    draw = random.Random(kind)
    for _ in range(8):
        before = tensors(cache)
        left = cache.heal(0)
        with failing(draw.choice(modules)):
            try:
                cache.heal(5)
            except ZeroDivisionError:
                assert all(map(torch.equal, tensors(cache), before))
                assert cache.heal(0) == left
        cache.heal(draw.randrange(1, 9))
    assert cache.heal() == 0
    assert bits or off(model, cache, ids) < 1e-5


def test_state_that_records_its_past_is_healed_with_it():
    model = tiny("lfm2")
    cache, ids = blended(model)
    cache.heal(30)
    cache.activate_past_recording()
    assert cache.heal() == 0
    cache.crop(-3)
    assert off(model, cache, ids[:, :-3]) < 1e-5


def test_model_is_left_as_it_was(tiny_model, untouched):
    model = tiny_model()
    cache, _ = blended(model)
    with untouched(model):
        cache.heal()


def refused(cache, words, error=ConfigError):
    """Let healing be refused, with these words, and nothing be written."""
    before = tensors(cache)
    with pytest.raises(error, match=words):
        cache.heal()
    assert all(map(torch.equal, tensors(cache), before))


@torch.no_grad()
def test_padding_is_refused_of_prompt_and_of_later_turn():
    model = tiny("llama")
    padded, _ = blended(model, random_pieces(), random_pieces((9,), seed=5))
    refused(padded, "hold padding")
    for logits_to_keep in (0, 1):
        cache, _ = blended(model, *PAIR)
        mask = torch.ones(2, cache.get_seq_length() + 6)
        mask[1, -6:-3] = 0
        model(prompt(6, rows=2), attention_mask=mask, past_key_values=cache, logits_to_keep=logits_to_keep)
        refused(cache, "hold padding")


def test_offloaded_cache_and_code_that_ignores_states_are_refused(tmp_path):
    away, _ = blended(tiny("llama"), kv_device_map="disk", offload_folder=tmp_path)
    with pytest.raises(ConfigError, match="kv_device_map"):
        away.heal()
    jamba, _ = blended(zoo_model("jamba"))
    refused(jamba, "only where one token comes at a time")


@torch.no_grad()
def test_tokens_at_grouped_positions_are_refused():
    model = tiny("llama")
    cache, ids = blended(model)
    with self_extend(model, trained_tokens=16, max_tokens=400):
        refused(cache, "inside self_extend", UnsupportedModelError)
        model(ids[:, -1:], past_key_values=cache)
    refused(cache, "have seen self_extend")
    cache.inputs(None, prefix=ids[0], chunks=[], question=[7])
    assert not cache.state.tokens.is_extended


@pytest.mark.parametrize(("rope", "longest"), [("longrope", 512), ("dynamic", 64)])
def test_frequencies_that_depend_on_length_are_refused_beyond_trained_one(rope, longest, tmp_path):
    parameters = longrope(64, rope_type=rope, factor=2.0)
    model = zoo_model("llama", rope_parameters=parameters, max_position_embeddings=longest)
    cache, _ = blended(model)
    refused(cache, "rotary frequencies")
    cache.crop(-60)
    refused(copy.deepcopy(cache), "rotary frequencies")
    cache.save(tmp_path / "chat")
    again = BlendCache.load(model, memory(), tmp_path / "chat", **REUSED)
    assert again.state.tokens.rows() == [[]]  # no prompt can begin with them
    short, ids = blended(model, random_pieces((20,)))
    assert short.heal() == 0
    assert off(model, short, ids) < 1e-5


def test_second_cache_without_memory_is_refused_by_name(monkeypatch):
    cache, _ = blended(tiny("gemma3_text"))
    monkeypatch.setattr(healing, "available_bytes", lambda: 1000)
    refused(cache, r"heal\(\) needs [\d,]+ bytes on cpu .*1,000 are free")


@pytest.mark.parametrize("change", ["weights", "mode"])
def test_model_that_becomes_another_one_in_block_leaves_no_half_of_it(change, monkeypatch, tiny_model):
    monkeypatch.setattr(healing, "BLOCK_TOKENS", 32)
    model = tiny_model()
    cache, _ = blended(model)
    calls = []

    @observer
    def switch(module, *_):
        calls.append(tensors(cache))
        if len(calls) == 2 and change == "weights":
            with torch.no_grad():
                module.mlp.down_proj.weight.mul_(1.5)
        elif len(calls) == 2:
            model.train()

    handle = model.model.layers[0].register_forward_hook(switch)
    with pytest.raises(ConfigError, match="other weights" if change == "weights" else "training mode"):
        cache.heal()
    handle.remove()
    assert cache.state.inexact_from == 37
    assert all(map(torch.equal, tensors(cache), calls[1]))


@torch.no_grad()
def test_images_and_embeddings_stay_blended_with_all_behind_them():
    model = tiny("llama")
    cache, ids = blended(model)
    row = ids[0].tolist()
    cache.state.info.placeholders = {row[60]}
    first = row.index(row[60])
    left = cache.heal()
    assert left == cache.get_seq_length() - first == cache.heal()
