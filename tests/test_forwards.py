# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What becomes of each forward that carries a cache: blended or plain, failed or interrupted."""

import copy
import gc
import weakref
from contextlib import contextmanager, nullcontext, suppress

import pytest
import torch
from transformers import DynamicCache

from hf_blend import BlendCache, ConfigError, PromptError, StoreError, observer
from tests.asking import PIECES, apart, as_stock, failing, generated, hooks, memory, prepared, prompt, raising
from tests.conftest import shared_zoo_model


@pytest.fixture
def model(tiny_model):
    return tiny_model(num_hidden_layers=3)


@torch.no_grad()
def test_prefill_enters_layers_and_steps_behind_it_do_not(model):
    seen = []
    count = observer(lambda *_: seen.append(hooks(model.model.layers[1])))
    handle = model.model.layers[0].register_forward_pre_hook(count)
    cache, inputs = prepared(model, PIECES, recompute_ratio=1.0)
    generated(model, inputs, cache, max_new_tokens=3)
    handle.remove()
    assert seen[-3:] == [1, 0, 0]
    assert hooks(model) == 0


@torch.no_grad()
@pytest.mark.parametrize("is_announced", [True, False])
def test_ids_are_known_of_prompts_and_answers_alike(model, is_announced):
    cache, inputs = prepared(model, PIECES)
    if not is_announced:
        cache = BlendCache(model, cache.store)
    output = generated(model, inputs, cache)
    (ids,) = output.tolist()
    assert cache.state.tokens.rows() == [ids[:-1]]
    cache.crop(-3)
    assert cache.state.tokens.rows() == [ids[:-4]]
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices([1])
    assert cache.state.tokens.rows() == [ids[:-4]]


@torch.no_grad()
def test_ids_of_padded_batch_and_of_beams_are_those_of_each_row(model):
    short = {**PIECES, "question": [5, 6]}
    cache, inputs = prepared(model, PIECES, short)
    generated(model, inputs, cache, num_beams=3)
    known = cache.state.tokens.rows()
    assert [*map(len, known)] == [69, 69, 69, 67, 67, 67]
    for row, values in zip(known, cache.layers[0].values, strict=True):
        stock = DynamicCache()
        model(torch.tensor([row]), past_key_values=stock)
        torch.testing.assert_close(values[:, -len(row) :], stock.layers[0].values[0])  # of the token alone
    assert cache.state.tokens.is_padded()


@torch.no_grad()
def test_ids_end_before_token_out_of_order(model):
    cache = BlendCache(model, memory())
    ids = prompt(20)
    positions = torch.arange(20)[None].clone()
    positions[0, 12:] += 5
    model(ids, position_ids=positions, past_key_values=cache, logits_to_keep=1)
    assert cache.state.tokens.rows() == [ids[0, :12].tolist()]
    cache.crop(-8)
    model(
        ids[:, 12:],
        attention_mask=(torch.arange(20) != 4)[None].long(),  # hides a token that is cached
        position_ids=torch.arange(12, 20)[None],
        past_key_values=cache,
    )
    assert cache.state.tokens.rows() == [ids[0, :12].tolist()]
    embeddings = model.get_input_embeddings()(ids)
    cache.reset()
    model(inputs_embeds=embeddings, past_key_values=cache)
    assert cache.state.tokens.rows() == [[]]


@contextmanager
def interrupted(module, error=KeyboardInterrupt):
    """Let a forward end behind a module, by Ctrl+C where nothing else is said: torch calls no hook behind it then."""
    handle = module.register_forward_hook(observer(raising(error)))
    with pytest.raises(error):
        yield
    handle.remove()


@torch.no_grad()
@pytest.mark.parametrize("use", ["generate", "model", "inputs"])
@pytest.mark.parametrize("past", [0, 20, 36])
def test_interrupted_forward_is_taken_back_by_next_use(model, use, past):
    cache = BlendCache(model, memory())
    stock = DynamicCache(config=model.config)
    ids = prompt(37)
    held, new = ids.tensor_split([past], 1)
    if past:
        model(held, past_key_values=cache)
        model(held, past_key_values=stock)
    with interrupted(model.model.layers[1].mlp):
        model(new, past_key_values=cache)
    assert len({layer.get_seq_length() for layer in cache.layers}) == 2, "nothing is tested"
    assert cache.get_seq_length() == past
    if use == "generate":
        refused = pytest.raises(PromptError, match=f"came behind the {past} that the cache holds")
        with refused if past else nullcontext():
            as_stock(model, {"input_ids": ids}, cache)
        return
    if use == "inputs":
        inputs = cache.inputs(None, **{**PIECES, "prefix": [*held[0], *PIECES["prefix"]]})
        assert inputs["input_ids"].shape[1] == past + 62
    got = model(new, past_key_values=cache).logits
    expected = model(new, past_key_values=stock).logits
    rounding = 1e-5 if new.shape[1] == 1 else 0.0  # a step gets a mask where stock gets none
    torch.testing.assert_close(got, expected, rtol=0, atol=rounding)


USES = {
    "crop": (-1,),
    "heal": (),
    "__deepcopy__": ({},),
    "save": ("/dev/null/no folder",),
    "batch_select_indices": ([0],),
    "batch_repeat_interleave": (1,),
    "reorder_cache": (torch.tensor([0]),),
}


@torch.no_grad()
@pytest.mark.parametrize("kv_bits", [None, 8])
@pytest.mark.parametrize("use", USES)
def test_interrupted_blended_forward_is_taken_back_by_next_use(model, use, kv_bits):
    store = memory()
    ids = prompt(80)
    pieces = {**PIECES, "prefix": [*ids[0].tolist(), 5, 6]}
    caches = [BlendCache(model, store, recompute_ratio=0.2, kv_bits=kv_bits) for _ in range(3)]
    for cache in caches:
        model(ids, past_key_values=cache)
    model.generate(**caches[2].inputs(None, **pieces), past_key_values=caches[2], max_new_tokens=1)  # stores chunks
    inputs = caches[0].inputs(None, **pieces)
    with interrupted(model.model.layers[-1].mlp):
        model.generate(**inputs, past_key_values=caches[0], max_new_tokens=1)
    assert caches[0].layers[0].length > 80, "nothing is tested"
    logits = []
    for cache in caches[:2]:
        with suppress(StoreError):
            got = getattr(cache, use)(*USES[use])
            cache = got if use == "__deepcopy__" else cache
        logits.append(model(prompt(1, 5), past_key_values=cache).logits)
        assert {layer.length for layer in cache.layers} == {80 if use == "crop" else 81}
    assert torch.equal(*logits)


@torch.no_grad()
@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
@pytest.mark.parametrize("name", ["lfm2", "qwen3_next"])
def test_step_of_hybrid_that_ended_in_any_layer_is_undone_or_refused(name, error):
    """The first layers have a state, and so has the last: none of them counts tokens."""
    model = shared_zoo_model(name)
    ids = prompt(12)
    step = prompt(1, 3)
    stock = DynamicCache(config=model.config)
    model(ids, past_key_values=stock)
    expected = model(step, past_key_values=stock).logits
    for layer in model.model.layers:
        cache = BlendCache(model, memory(), recompute_ratio=1.0)
        with interrupted(layer, error):
            model(ids, past_key_values=cache)
        model(ids, past_key_values=cache)
        with interrupted(layer, error):
            model(step, past_key_values=cache)
        with pytest.raises(ConfigError, match=r"ended between two layers.*reset\(\)"):
            model(step, past_key_values=cache)
        cache.reset()
        model(ids, past_key_values=cache)
        got = model(step, past_key_values=cache).logits
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


@torch.no_grad()
def test_deepcopy_refuses_prompts_that_its_cache_refuses(model):
    cache = BlendCache(model, memory())
    generated(model, {"inputs": prompt(30)}, cache)
    for one in (cache, copy.deepcopy(cache)):
        with pytest.raises(PromptError, match="tokens of a prompt came behind"):
            generated(model, {"inputs": prompt(60, 3)}, one)


def test_cache_is_freed_with_its_last_reference(model):
    """A cycle would keep K and V until the garbage is collected."""
    cache, inputs = prepared(model, PIECES)
    gc.collect()
    gc.disable()
    try:
        generated(model, inputs, cache)
        references = weakref.ref(cache), weakref.ref(cache.state), weakref.ref(cache.layers[0])
        del cache
        for reference in references:
            assert reference() is None
    finally:
        gc.enable()


@torch.no_grad()
@pytest.mark.parametrize("is_blended", [True, False])
def test_forward_that_fails_is_taken_back_at_once_and_marks_nothing_inexact(model, is_blended):
    cache = BlendCache(model, memory(), recompute_ratio=0.0, selector="none")
    ids = prompt(20)
    model(ids, past_key_values=cache, logits_to_keep=1)
    inputs = cache.inputs(None, **{**PIECES, "prefix": [*ids[0], *PIECES["prefix"]]})
    with failing(model.model.layers[1].mlp), pytest.raises(ZeroDivisionError):
        model(inputs["input_ids"][:, 20:], past_key_values=cache, logits_to_keep=int(is_blended))
    assert [layer.get_seq_length() for layer in cache.layers] == [20] * 3
    assert cache.state.tokens.rows() == ids.tolist()
    assert cache.heal(0) == 0


MODES = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}


@pytest.mark.parametrize("later", MODES)
@pytest.mark.parametrize("first", MODES)
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_next"])
def test_cache_goes_on_in_another_mode_of_autograd(name, first, later):
    model = shared_zoo_model(name)
    store = memory()
    for _ in range(2):  # the second time chunks are loaded
        cache, inputs = prepared(model, PIECES, store=store, recompute_ratio=1.0)
        with MODES[first]():
            model(**inputs, past_key_values=cache, logits_to_keep=1)
    ids = inputs["input_ids"]
    with MODES[later]():
        for step in (prompt(1, 1), prompt(3, 3)):
            model(step, past_key_values=cache)
            ids = torch.cat([ids, step], 1)
        cache.batch_select_indices([0])
        pieces = {**PIECES, "prefix": [*ids[0].tolist(), 5, 6]}
        whole = cache.inputs(None, **pieces)
        new = {**whole, "input_ids": whole["input_ids"][:, ids.shape[1] :]}
        got = model(**new, past_key_values=cache, logits_to_keep=1).logits
        assert cache.report.reusable_tokens > 0
        assert cache.report.past_tokens == ids.shape[1]
        assert cache.heal(9) > 0
    token = prompt(1, 7)
    with MODES[first]():
        assert cache.heal() == 0
        step = model(token, past_key_values=cache).logits
    with torch.no_grad():
        ids = torch.cat([whole["input_ids"], token], 1)
        expected = model(ids, logits_to_keep=2).logits
        assert apart(got, expected[:, :1]) <= 2e-5
        assert apart(step, expected[:, 1:]) <= 2e-5
