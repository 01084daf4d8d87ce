# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A saved session comes back bit for bit, and nothing else ever comes back."""

import os

import pytest
import torch
from tiny_models import tiny_model

from hf_blend import SequenceCache, StoreError
from hf_blend.context.session import load_session, save_session
from tests.asking import prompt
from tests.forging import SESSIONS, forged, sealed_header, taken_apart
from tests.sequences import fed, filled

KIND = "hf_blend.session/3"
MODEL = tiny_model("llama")


def conversation(model=MODEL, tokens=20, **settings):
    cache = filled(model, tokens, **settings)
    cache.copy(0, 3, 0, tokens // 2)
    cache.remove(0, 5, 8)
    cache.shift(0, 8, None, -3)
    fed(cache, prompt(4, 1))
    return cache


def bits_of(cache):
    return {name: part.clone() for name, part in cache.state().items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def check_refused(cache, path, changes):
    """A cache refuses a file with each of some changes, and stays as it is."""
    content = path.read_bytes()
    before = bits_of(cache)
    assert forged(KIND, *taken_apart(content)) == content
    for change in changes:
        about, state = taken_apart(content)
        change(state)
        path.write_bytes(forged(KIND, about, state))
        with pytest.raises(StoreError, match="holds what no session of this model holds"):
            load_session(cache, path)
        assert same(bits_of(cache), before), change


def test_round_trip_is_bit_exact_and_goes_on_same(tmp_path):
    cache = conversation(tokens=80)
    again = SequenceCache(MODEL)
    cache.use(3)
    size = save_session(cache, tmp_path / "chat")
    assert size == os.path.getsize(tmp_path / "chat")
    load_session(again, tmp_path / "chat")
    assert same(bits_of(cache), bits_of(again))
    assert again.active == 3
    assert again.tokens() == cache.tokens()
    assert again.positions(3) == cache.positions(3)
    assert torch.equal(fed(again, prompt(5, 2)), fed(cache, prompt(5, 2)))


def test_empty_cache_is_session_too(tmp_path):
    save_session(SequenceCache(MODEL), tmp_path / "empty")
    cache = conversation()
    load_session(cache, tmp_path / "empty")
    assert cache.get_seq_length() == 0
    fed(cache, prompt(5))
    assert cache.tokens() == prompt(5)[0].tolist()


def test_session_of_another_model_or_rope_is_refused_by_name(tmp_path):
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    save_session(conversation(), tmp_path / "chat")
    for name, model in (("model", tiny_model("llama", seed=1)), ("rope", tiny_model("llama", rope_parameters=rope))):
        cache = conversation(model)
        before = bits_of(cache)
        with pytest.raises(StoreError, match=f"another {name}"):
            load_session(cache, tmp_path / "chat")
        assert same(bits_of(cache), before)


def cell_that_is_not_there(state):
    state["sequence.0"][0, 0] = 10**6


def token_twice(state):
    state["sequence.0"][0] = 1


def position_beyond_all(state):
    state["sequence.0"][1] = 1 << 40


def sequence_of_one_row(state):
    state["sequence.0"] = state["sequence.0"][:1]


def active_sequence_below_nothing(state):
    state["active"].fill_(-1)


def keys_of_sixteen_bits(state):
    state["layer.0.k"] = state["layer.0.k"].half()


CRAFTED = (
    *SESSIONS, cell_that_is_not_there, token_twice, position_beyond_all, sequence_of_one_row,
    active_sequence_below_nothing, keys_of_sixteen_bits,
)  # fmt: skip


def test_crafted_session_is_refused_and_leaves_cache_alone(tmp_path):
    path = tmp_path / "chat"
    cache = conversation(tokens=12)
    save_session(conversation(), path)
    check_refused(cache, path, CRAFTED)
    for header in (b"{", b"[]", b"[" * 100_000, b'{"__metadata__":5}', b"\xff"):
        path.write_bytes(sealed_header(KIND, b'",' + header))
        with pytest.raises(StoreError, match="Save it again"):
            load_session(cache, path)
