# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Sequences that move and far tokens in groups equal the stock model, and what does not is refused by its layer."""

import contextlib

import pytest
import torch
from families import EXTEND, broken, verify_types
from tiny_models import tiny_model

from hf_blend import BlendCache, SequenceCache, UnsupportedModelError, self_extend
from hf_blend.context import checks, sequence_layer, tables
from hf_blend.context import self_extend as extending
from hf_blend.context.session import save_session
from hf_blend.errors import ConfigError
from hf_blend.verify.model_under_test import ModelUnderTest
from hf_blend.verify.runner import verify
from tests.asking import memory, prompt
from tests.conftest import shared_zoo_model, skip_in_the_oldest, slow_but
from tests.sequences import fed, filled

TOLERANCE = 2e-5
MOVED = "llama deepseek_v3 gptj falcon gemma3_text gpt_neox cohere_compass_text".split()
EXTENDED = ("llama", "deepseek_v2", "deepseek_v3", "minicpm3", "gpt_neox")
KEPT = {  # what is not extended, and why
    "falcon": "layer 0 of FalconForCausalLM computes its attention without asking",
    "gpt_neox_japanese": "layer 0 of GPTNeoXJapaneseForCausalLM computes its attention without asking",
    "doge": r"layer 0, a DogeAttention, attends with a mask of shape \(1, 4,",
    "bloom": "layer 0 of BloomForCausalLM does not rotate its keys",
    "cwm": "layer 3 of CwmForCausalLM attends within a window",
}


@pytest.mark.parametrize("name", slow_but("llama", "deepseek_v3", "gptj", "gemma3_text", among=MOVED))
def test_moved_sequence_is_what_stock_model_computes_there(name):
    if name == "cohere_compass_text":
        skip_in_the_oldest("no tiny model of this type can be built")
    subject = ModelUnderTest(shared_zoo_model(name))
    for result in (checks.whole_shift(subject), checks.closed_hole(subject)):
        assert result.passed
        assert result.error <= TOLERANCE


@pytest.mark.parametrize("name", slow_but("llama", "deepseek_v3", among=EXTENDED))
def test_every_layer_extended_is_stock_layer_at_grouped_positions(name):
    result = checks.self_extend(ModelUnderTest(shared_zoo_model(name)))  # fails where the distances change nothing
    assert result.passed
    assert result.error <= TOLERANCE


def test_self_extend_refuses_what_cannot_be_extended_by_its_layer_before_anything_is_computed(untouched):
    for at, (name, why) in enumerate(KEPT.items()):
        model = shared_zoo_model(name)
        with untouched(model), pytest.raises(UnsupportedModelError, match=why):
            self_extend(model, allow_unverified=bool(at % 2)).__enter__()


def test_check_of_what_is_refused_neither_holds_nor_fails():
    verdict = verify("tiny:falcon", dtypes=["float32"], attention=["eager"], checks=EXTEND)
    assert [(one.passed, one.max_abs_error) for one in verdict.checks] == [(None, None)]
    assert verdict.supported
    assert "layer 0 of FalconForCausalLM" in verdict.refused[0].detail


# What goes wrong in practice, made on purpose: the oracle sees it, and so does the self-test of a fresh model.


def only_keys(monkeypatch):
    """Keys are rotated, whichever of K and V carries the positions."""
    arrange = sequence_layer.SequenceLayer.arrange

    def wrong(self, cells, in_order, style, by):
        arrange(self, cells, in_order, style.__mro__[1] if style.slot else style, by)

    monkeypatch.setattr(sequence_layer.SequenceLayer, "arrange", wrong)


def left_unrotated(monkeypatch):
    """A layer that makes its table itself is taken for one that does not rotate."""
    monkeypatch.setattr(tables, "_known_maker", lambda *_: None)
    monkeypatch.setattr(tables, "_refuse_without_table", lambda *_: None)


def one_too_far(monkeypatch):
    """Every key moves to the position behind its own."""
    made = tables._made
    monkeypatch.setattr(tables, "_made", lambda maker, positions: made(maker, positions + (positions > 20)))


@pytest.mark.parametrize(
    ("name", "mutation"), [("deepseek_v3", only_keys), ("gptj", left_unrotated), ("llama", one_too_far)]
)
def test_keys_that_move_wrongly_are_seen_and_refused_by_their_layer(name, mutation, monkeypatch):
    model = tiny_model(name)
    mutation(monkeypatch)
    with pytest.raises(UnsupportedModelError, match=r"of layer 0 are off by .* allow_unverified=True"):
        SequenceCache(model)
    SequenceCache(model, allow_unverified=True)


def nothing_moves(source, layer, states, old, new):
    return states


def first_dimensions(source, layer, states, old, new):
    """Latent attention rotated where others are."""
    moved = torch.empty_like(states)
    style = source.styles[layer]
    for row in range(states.shape[0]):
        style.move(states[row], source.rotation(layer, old[row], new[row]), out=moved[row])
    return moved


@pytest.mark.parametrize(("name", "mutation"), [("llama", nothing_moves), ("deepseek_v3", first_dimensions)])
def test_self_extend_that_does_nothing_or_wrong_thing_is_seen_and_refused(name, mutation, monkeypatch):
    model = tiny_model(name)
    monkeypatch.setattr(extending, "_moved", mutation)
    with pytest.raises(UnsupportedModelError, match=r"cannot be extended: .* the output of layer \d is off by"):
        self_extend(model).__enter__()


# Trust: as of blending, in tests/test_trust.py.


def test_self_tests_of_sequences_pass_in_sixteen_bits():
    for name, dtype in (("llama", torch.float16), ("deepseek_v3", torch.bfloat16)):
        model = tiny_model(name).to(dtype)
        SequenceCache(model)
        with self_extend(model):
            pass


# What is built on sequences.


COUNTED = {  # models that measure distances in tokens
    "bloom": r"measures in tokens, not positions.*shift\(\)",
    "gemma3_text": "holes.* within windows",
    "llama": "Self-Extend is active",
}


@pytest.mark.parametrize("name", COUNTED)
def test_holes_are_refused_where_attention_counts_tokens(name):
    cache = filled(shared_zoo_model(name), 40)
    cache.remove(0, 5, 9)
    with self_extend(cache.model) if name == "llama" else contextlib.nullcontext():
        for look in (cache.compact, lambda: fed(cache, prompt(2))):
            with pytest.raises(ConfigError, match=COUNTED[name]):
                look()
        cache.shift(0, 9, None, -4)
        fed(cache, prompt(2))
    assert cache.positions() == [*range(38)]


def test_nothing_is_stored_or_blended_that_model_computes_inside_self_extend(tmp_path):
    model = shared_zoo_model("llama")
    store = memory()
    ids = prompt(40)
    blend = BlendCache(model, store)
    inputs = blend.inputs(None, chunks=[ids[0, :30].tolist()], question=ids[0, 30:].tolist())
    cache = SequenceCache(model)
    with self_extend(model, trained_tokens=16):
        for refused in (
            lambda: BlendCache(model, store),
            lambda: model.generate(**inputs, past_key_values=blend, max_new_tokens=2),
            lambda: store.add(model, None, [ids[0].tolist()]),
        ):
            with pytest.raises(UnsupportedModelError, match="inside self_extend"):
                refused()
        model.generate(ids, past_key_values=cache, max_new_tokens=2)
    with pytest.raises(UnsupportedModelError, match="computed inside self_extend"):
        save_session(cache, tmp_path / "session")
    assert list(tmp_path.iterdir()) == []
    answered = model.generate(**inputs, past_key_values=blend, max_new_tokens=2)
    assert answered.shape[1] == inputs["input_ids"].shape[1] + 2


@pytest.mark.slow
def test_every_type_is_blended_moved_and_extended_exactly_or_refused():
    rows = list(verify_types())
    assert [row["model"] for row in rows if broken(row)] == []
    assert [row["model"] for row in rows if row["supported"] and row["move"] != "exact"] == []
    assert all("layer" in row["extend"] for row in rows if row["supported"] and row["extend"] != "exact")
