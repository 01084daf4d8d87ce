# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""K and V that a cache holds belong to who computed them: a model that is another one at its next turn uses none.

The oracle is stock transformers on the model as it is at that turn: one forward of the whole conversation.
"""

import pytest
import torch
from tiny_models import tiny_model

from hf_blend import (
    BlendCache,
    ConfigError,
    PromptError,
    SequenceCache,
    StoreError,
    observer,
)
from hf_blend.context.session import load_session, save_session
from hf_blend.errors import UnsupportedModelError
from hf_blend.model.identity import author_of
from tests.adapters import (
    adapted,
    doubled,
    eager,
    held_as_stock,
    merged,
    off,
    switched,
    through_data,
    trained,
    unchanged,
    written,
)
from tests.asking import GREEDY, PIECES, apart, check_equal, generated, memory, prompt, states_of
from tests.chat_templates import small_tokenizer
from tests.sequences import fed

TOLERANCE = 1e-6
STEPS = {**GREEDY, "max_new_tokens": 3, "output_logits": True, "return_dict_in_generate": True}
FEW = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None}
LOUD = "The market opens at noon."
TOKENIZER = small_tokenizer("spaces")


@torch.no_grad()
def stock(model, ids):
    """The last logits of one forward of all tokens."""
    return model(torch.as_tensor(ids)[None], use_cache=False).logits[0, -1]


def prefix_turn(model, cache, output):
    """A turn of a blend cache, whose first new logits are those of stock."""
    inputs = cache.inputs(None, chunks=[], question=[9, 8, 7], prefix=output[0])
    got = generated(model, inputs, cache, **STEPS)
    expected = stock(model, inputs["input_ids"][0])
    assert apart(got.logits[0][0], expected) <= TOLERANCE


def blend_with_prefix(change, tmp_path):
    model = adapted()
    cache = BlendCache(model, memory(), recompute_ratio=1.0)
    output = generated(model, cache.inputs(None, **PIECES), cache, **STEPS).sequences
    held = cache.get_seq_length()
    assert cache.heal() == 0
    with change(model):
        if change is not unchanged:
            with pytest.raises(ConfigError, match="computed by another model"):
                cache.heal()
        prefix_turn(model, cache, output)
    if change is unchanged:
        assert cache.report.past_tokens == held
        assert not cache.report.notice
    else:
        assert cache.report.past_tokens == 0
        assert cache.report.notice


def blend_with_messages(change, tmp_path):
    model = adapted(len(TOKENIZER))
    cache = BlendCache(model, memory(), recompute_ratio=1.0)

    def turn(text):
        inputs = cache.inputs_from_text(TOKENIZER, text)
        got = generated(model, inputs, cache, **STEPS)
        expected = stock(model, inputs["input_ids"][0])
        assert apart(got.logits[0][0], expected) <= TOLERANCE
        return cache.report.past_tokens

    assert turn(LOUD) == 0
    with change(model):
        past_tokens = turn(f"{LOUD} Where?")
        assert bool(past_tokens) == (change is unchanged)
        assert bool(cache.report.notice) != bool(past_tokens)


def sequence(change, tmp_path):
    model = adapted()
    ids = prompt(20)
    more = prompt(4, 1)
    cache = SequenceCache(model)
    fed(cache, ids)
    with change(model):
        if change is not unchanged:
            with pytest.raises(ConfigError, match="were computed by another model"):
                fed(cache, more)
            with pytest.raises(ConfigError, match="were computed by another model"):
                model.generate(**cache.inputs(more[0]), past_key_values=cache, **FEW)
            cache.use(1)
            with pytest.raises(ConfigError, match=r"were computed by another model.*reset\(\) the cache"):
                fed(cache, more)
            cache.use(0)
            assert cache.tokens() == ids[0].tolist()
            cache.reset()
            fed(cache, ids)
        got = fed(cache, more)
        expected = stock(model, torch.cat([ids, more], 1)[0])
        assert apart(got[0, -1], expected) <= TOLERANCE
        assert held_as_stock(cache)


def session(change, tmp_path):
    model = adapted()
    ids = prompt(20)
    more = prompt(4, 1)
    cache = SequenceCache(model)
    again = SequenceCache(model)
    fed(cache, ids)
    with change(model):
        save_session(cache, tmp_path / "chat")
        if change is not unchanged:
            with pytest.raises(StoreError, match="another model"):
                load_session(again, tmp_path / "chat")
            assert again.get_seq_length() == 0
    if change not in (written, merged):
        load_session(again, tmp_path / "chat")
        got = fed(again, more)
        expected = stock(model, torch.cat([ids, more], 1)[0])
        assert apart(got[0, -1], expected) <= TOLERANCE
        if change is not unchanged:
            with change(model), pytest.raises(ConfigError, match="were computed by another model"):
                fed(again, more)


@pytest.mark.parametrize(
    ("holder", "change"),
    [
        (blend_with_prefix, unchanged),
        (blend_with_prefix, switched),
        (blend_with_prefix, through_data),
        (blend_with_prefix, doubled),
        (blend_with_prefix, trained),
        (blend_with_messages, unchanged),
        (blend_with_messages, off),
        (sequence, unchanged),
        (sequence, written),
        (sequence, through_data),
        (sequence, eager),
        (session, unchanged),
        (session, switched),
        (session, merged),
    ],
)
def test_kv_of_model_that_was_another_one_is_computed_again_or_refused(holder, change, tmp_path):
    holder(change, tmp_path)


def test_blend_cache_refuses_what_it_does_not_know_to_compute_again():
    model = adapted()
    cache = BlendCache(model, memory(), recompute_ratio=1.0)
    output = generated(model, cache.inputs(None, **PIECES), cache)
    before = [states.clone() for states in states_of(cache)]
    refused = pytest.raises(ConfigError, match=r"were computed by another model.*adapter")
    with switched(model), refused, torch.no_grad():
        model(prompt(3, 5), past_key_values=cache)
    check_equal(states_of(cache), before)
    inputs = cache.inputs(None, prefix=output[0].tolist(), chunks=[], question=[5, 6])
    assert cache.get_seq_length() == output.shape[1] - 1
    assert torch.equal(generated(model, inputs, cache), generated(model, inputs)), "it is as before"


@pytest.mark.parametrize("change", [switched, through_data])
def test_model_that_changes_between_inputs_and_generate_is_refused_then(change):
    model = adapted()
    cache = BlendCache(model, memory(), recompute_ratio=1.0)
    output = generated(model, cache.inputs(None, **PIECES), cache)
    inputs = cache.inputs(None, chunks=[], question=[5, 6], prefix=output[0])
    before = [layer.keys.clone() for layer in cache.layers]
    with change(model), pytest.raises(ConfigError, match="were computed by another model"):
        generated(model, inputs, cache)
    for layer, keys in zip(cache.layers, before, strict=True):
        assert torch.equal(layer.keys, keys)
    assert torch.equal(generated(model, inputs, cache), generated(model, inputs))


@torch.no_grad()
@pytest.mark.parametrize("chunks", [PIECES["chunks"], [*PIECES["chunks"], [7, 8, 9, 10]]], ids=["stored", "one new"])
def test_prefill_of_model_whose_values_changed_unseen_is_that_of_known_change(chunks):
    model = adapted()
    store = memory()

    def prefill(chunks):
        cache = BlendCache(model, store, recompute_ratio=0.1, selector="ramp")
        inputs = cache.inputs(None, **{**PIECES, "chunks": chunks})
        return model.get_base_model()(**inputs, past_key_values=cache, logits_to_keep=1).logits, cache

    before, _ = prefill(PIECES["chunks"])
    with through_data(model):
        got, cache = prefill(chunks)
        assert cache.state.author == author_of(model)
        assert cache.report.computed_chunks == len(chunks) + 1, "nothing that the other model computed"
        expected, known = prefill(chunks)
        assert known.report.computed_chunks == 0
        assert torch.equal(got, expected)
    again, cache = prefill(PIECES["chunks"])
    assert cache.report.computed_chunks == 0, "entries of both are stored, each under its own name"
    assert torch.equal(again, before)


def keep_output(*_):
    """A hook that changes nothing."""


def test_hooks_and_modes_of_others_are_refused_by_name():
    model = tiny_model("llama")
    cache = SequenceCache(model)
    layer = model.model.layers[1]
    fed(cache, prompt(20))
    handle = layer.register_forward_hook(keep_output)
    with pytest.raises(UnsupportedModelError, match=r"a LlamaDecoderLayer has the forward hook tests\.test_authors"):
        fed(cache, prompt(4, 1))
    handle.remove()
    handle = layer.register_forward_hook(observer(keep_output))
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(ConfigError, match="the autocast 'bfloat16' inst"):
        fed(cache, prompt(4, 1))
    fed(cache, prompt(4, 1))
    handle.remove()


@pytest.mark.parametrize("state", [trained, lambda _: torch.autocast("cpu", dtype=torch.bfloat16)])
def test_what_was_computed_in_state_without_fingerprint_is_not_saved(tmp_path, state):
    cache = SequenceCache(tiny_model("llama"))
    with state(cache.model):
        fed(cache, prompt(20))
    with pytest.raises(ConfigError, match=r"under torch\.autocast or in training mode"):
        save_session(cache, tmp_path / "chat")
    assert not (tmp_path / "chat").exists()


def test_assisted_decoding_of_later_turn_is_refused():
    model = tiny_model("llama")
    cache = SequenceCache(model)
    output = model.generate(prompt(12).repeat(1, 3), past_key_values=cache, prompt_lookup_num_tokens=3, **FEW)
    before = cache.tokens()
    more = torch.cat([output[0, -1:], output[0]])
    inputs = cache.inputs(more.tolist())
    with pytest.raises(PromptError, match=r"passes all of them again \(assisted decoding"):
        model.generate(**inputs, past_key_values=cache, prompt_lookup_num_tokens=3, **FEW)
    assert cache.tokens() == before


def test_chunks_of_peft_models_are_found_inside_its_generate():
    model = adapted()
    store = memory()
    store.add(model, None, PIECES["chunks"])
    for _ in range(2):
        cache = BlendCache(model, store)
        generated(model, cache.inputs(None, **PIECES), cache)
        assert cache.report.loaded_chunks >= 2
        assert cache.report.computed_chunks <= 1, "what a prompt begins with"
    store.add(model, None, PIECES["chunks"])
    assert len({one.fingerprint for one in store.entries()}) == 1


def held_by(kind):
    """A cache that has answered a prompt, and all of its ids."""
    model = tiny_model("llama")
    cache = BlendCache(model, memory(), recompute_ratio=1.0)
    if kind == "blend with inputs":
        inputs = cache.inputs(None, **PIECES)
        return cache, generated(model, inputs, cache)
    output = model.generate(prompt(30), past_key_values=cache, **FEW)
    return cache, output


@pytest.mark.parametrize("kind", ["blend", "blend with inputs"])
def test_blend_cache_refuses_prompts_of_generate_that_it_did_not_build(kind):
    """Whatever they begin with: `generate` has left that out. A single token behind what is held is a step."""
    cache, output = held_by(kind)
    model = cache.model
    held = cache.get_seq_length()
    wrong = {
        "as it began": torch.cat([output, prompt(9, 2)], 1),
        "shorter": prompt(5, 3),
        "one token more": output,
        "another answer of as many tokens": torch.cat([output[:, :-3], prompt(3, 7)], 1),
    }
    for name, ids in wrong.items():
        with pytest.raises(PromptError, match="tokens of a prompt came behind the"):
            model.generate(ids, past_key_values=cache, **FEW)
        assert cache.get_seq_length() == held, name


def test_sequence_cache_refuses_prompts_that_it_did_not_make(tmp_path):
    model = tiny_model("llama")
    cache = SequenceCache(model)
    again = SequenceCache(model)
    output = model.generate(prompt(30), past_key_values=cache, **FEW)
    save_session(cache, tmp_path / "chat")
    load_session(again, tmp_path / "chat")
    for one in (cache, again):
        held = one.tokens()
        for ids in (torch.cat([output, prompt(6, 4)], 1), prompt(len(held) + 5, 9)):
            with pytest.raises(PromptError, match=r"tokens of a prompt came.*cache\.inputs\(new_ids\)"):
                model.generate(ids, past_key_values=one, **FEW)
        (new,) = prompt(6, 4)
        inputs = one.inputs(new)
        with pytest.raises(PromptError, match="tokens of a prompt came behind the 32"):
            model.generate(torch.cat([output, prompt(6, 5)], 1), past_key_values=one, **FEW)
        one.inputs(new)
        one.shift(0, 0, None, 0)  # as much as another sequence: what was built before is not its prompt
        with pytest.raises(PromptError, match="tokens of a prompt came behind the 32"):
            model.generate(**inputs, past_key_values=one, **FEW)
        assert one.tokens() == held
        got = model.generate(**one.inputs(new), past_key_values=one, **FEW)
        assert torch.equal(got, model.generate(inputs["input_ids"], **FEW))
