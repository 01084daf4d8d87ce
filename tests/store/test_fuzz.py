# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Any bytes in any file of a store: a miss or what was stored, and never an exception.

Three ways to make bytes: damage to a good file, as in `tests.faults`; a good file with other values in its header,
sealed again; and, of sessions, files made of drawn tensors, with valid digests and seals.
"""

import json
import logging
import math
import os
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_blend import SequenceCache, StoreError
from hf_blend.context.session import load_session, save_session
from hf_blend.sparse.partial.reader import keep_in_blocks
from hf_blend.store import ChunkKV, ChunkStore
from hf_blend.store.stream import LazyLayers
from hf_blend.store.tiers.base import BytesSource
from hf_blend.store.tiers.memory import MemoryTier
from tests.faults.damage import damaged
from tests.forging import CHUNK, forged, taken_apart

FAST = 25
SLOW = int(os.environ.get("HF_BLEND_FUZZ_CASES", "100000"))
ALL = list(HealthCheck)

WORDS = "F32 I64 BF16 F8_E4M3 raw int8:F32 int8:I32 [0,1e999] @1e999@ [] {} [-1,-1] [true,false] \ud800".split()
scalars = st.none() | st.booleans() | st.integers() | st.integers(-3, 9) | st.floats() | st.text(max_size=6)
scalars |= st.sampled_from([*WORDS, "[" * 3000, "9" * 5000])
trees = st.lists(scalars, max_size=4) | st.dictionaries(st.text(max_size=4), scalars, max_size=3)
paths = st.lists(st.integers(0, 40), min_size=1, max_size=5)
changes = st.lists(st.tuples(paths, scalars | trees), min_size=1, max_size=4)
floats = st.sampled_from([0.0, 1.0, -1.0, math.nan, math.inf, -math.inf, 3e38, 1e-40, 1e308, -1e308, 2.0**30, 2.0**31])


def changed(tree, drawn):
    """A JSON document in which some values were replaced, as text."""
    for path, value in drawn:
        at = tree
        *steps, last = path
        for step in steps:
            inner = list(at.values()) if isinstance(at, dict) else at
            inner = [one for one in inner if isinstance(one, dict | list) and one]
            if inner:
                at = inner[step % len(inner)]
        keys = list(at) if isinstance(at, dict) else range(len(at))
        at[keys[last % len(keys)]] = value
    return json.dumps(tree, separators=(",", ":")).replace('"@1e999@"', "1e999")


def other_header(forge, kind, good, change):
    """An entry whose header says something else, and is sealed as it should be."""
    stop = 8 + int.from_bytes(good[:8], "little")
    rows = json.loads(good[8:stop])
    del rows["__metadata__"]["format"], rows["__metadata__"]["seal"]
    text = changed(rows, change).removeprefix('{"__metadata__":{')
    return forge.header('",' + text, kind) + good[stop:]


many = pytest.mark.parametrize("cases", [FAST, pytest.param(SLOW // 10, marks=pytest.mark.slow)])


def tried(cases, check, **drawn):
    """Run a check with so many drawn cases."""
    limits = settings(max_examples=cases, deadline=None, suppress_health_check=ALL, database=None)
    limits(given(**drawn)(check))()


# Entries: planted under the name where they are looked for, and every call of a store is made.


@pytest.fixture(autouse=True)
def quiet():
    """A log of a hundred thousand warnings helps nobody."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


class Planted:
    """A store of one tier in memory; what lies there is whatever a test puts there."""

    def __init__(self, chunk):
        self.chunk = chunk
        self.tier = MemoryTier()
        self.turn = 0
        self.name = ChunkStore(None, [self.tier]).name(chunk.key.digest)

    def survives(self, content):
        """Make a third of the calls, in turn; what comes has the form of the chunk."""
        store = ChunkStore(None, [self.tier])
        key = self.chunk.key
        layout = self.chunk.layout
        self.turn += 1
        calls = (
            lambda: store.get(key, layout=layout),
            lambda: store.get(key),
            lambda: store.stream(key, layout=layout),
            lambda: list(store.check()),
            lambda: list(store.entries()),
            lambda: store.find(key.fingerprint, (1,), [5, 6, 7]),
            lambda: list(store.check(repair=True)),
            lambda: store.collect(1 << 40),
            lambda: store.put(self.chunk),
        )
        for call in calls[self.turn % 3 :: 3]:
            self.tier.objects[self.name] = BytesSource(content)
            chunk = call()
            if not isinstance(chunk, ChunkKV):
                continue
            layers = chunk.layers
            if isinstance(layers, LazyLayers):
                layers.recompute = lambda: self.chunk
                layers = [layers.load(index) for index in range(len(layers))]
            for states in layers:
                assert {one.shape[1] for one in states} == {self.chunk.tokens}


@pytest.fixture(scope="module")
def planted(chunk):
    return Planted(chunk())


@many
def test_entries_whose_headers_say_something_else(planted, forge, cases):
    good = forge(planted.chunk)
    check = lambda drawn: planted.survives(other_header(forge, CHUNK, good, drawn))  # noqa: E731
    tried(cases, check, drawn=changes)


# Entries in blocks, and sessions.


def codec_of(entry):
    return json.loads(entry[8 : 8 + int.from_bytes(entry[:8], "little")])["__metadata__"]["codec"]


@many
def test_entries_in_blocks(chunk, forge, cases):
    stored = chunk(range(9))
    layers = tuple((keys, values[..., :1].expand(keys.shape).contiguous()) for keys, values in stored.layers)
    stored = replace(stored, layers=layers)
    tier = MemoryTier()
    store = ChunkStore(None, [tier])
    keep_in_blocks(store)
    store.put(stored)
    ((name, source),) = tier.objects.items()
    good = source.content
    assert other_header(forge, "hf_blend.blocks/4", good, []) == good

    def check(seed, other):
        _, content = damaged(random.Random(seed), good, good[::-1])
        if other is not None:
            content = other_header(forge, "hf_blend.blocks/4", good, other)
        for layout in (stored.layout, None):
            tier.objects[name] = BytesSource(content)
            got = store.stream(stored.key, layout=layout)
            if got is None:
                continue
            if isinstance(got.layers, LazyLayers):
                got.layers.recompute = lambda: stored
            for mine, theirs in zip(got.layers, stored.layers, strict=other is None):
                if other is None:
                    assert all(map(torch.equal, mine, theirs))
                else:
                    assert mine[0].shape[1] == stored.tokens
        store.put(stored)
        kept = tier.objects[name].content  # an entry of a codec that others may know stays theirs
        assert kept == good or (kept == content and codec_of(kept) != codec_of(good))

    tried(cases // 2, check, seed=st.integers(0), other=st.none())
    tried(cases - cases // 2, check, seed=st.just(0), other=changes)


@pytest.fixture(scope="module")
def conversation(tiny_model):
    model = tiny_model(num_hidden_layers=1, hidden_size=8, num_attention_heads=1, num_key_value_heads=1, head_dim=8)
    cache = SequenceCache(model)
    with torch.no_grad():
        model(torch.arange(3, 12)[None], past_key_values=cache)
        cache.copy(0, 3, 0, 5)
    return cache


@many
def test_sessions(tmp_path, forge, cases, conversation):
    path = tmp_path / "chat"
    kind = "hf_blend.session/3"
    save_session(conversation, path)
    good = path.read_bytes()
    about, before = taken_apart(good)

    def check(seed, way, change, rows):
        _, content = damaged(random.Random(seed), good, good[::-1])
        if way == "header":
            content = other_header(forge, kind, good, change)
        if way == "tensors":
            drawn = {name: torch.full(size, value, dtype=torch.float64).to(dtype) for name, size, dtype, value in rows}
            content = forged(kind, about, {**before, **drawn})
        path.write_bytes(content)
        cache = SequenceCache(conversation.model)
        try:
            load_session(cache, path)
        except StoreError:
            assert cache.get_seq_length() == 0
            return
        cache.shift(cache.active, 0, None, 3)  # whatever was accepted can be used
        cache.tokens()
        with torch.no_grad():
            logits = conversation.model(torch.tensor([[5, 6]]), past_key_values=cache).logits
        assert torch.isfinite(logits).all()
        assert way != "raw" or content == good

    names = [*before, "sequence.1", "sequence.-1", "sequence.x", "layer.1.k", "other"]
    shapes = st.sampled_from([(), (9,), (2, 9), (2, 5), (1, 9, 8)]) | st.lists(st.integers(0, 9), max_size=4)
    dtypes = st.sampled_from([torch.float32, torch.int64, torch.int32, torch.bfloat16, torch.uint8])
    row = st.tuples(st.sampled_from(names), shapes, dtypes, floats)
    ways = st.sampled_from("raw header tensors".split())
    tried(cases, check, seed=st.integers(0), way=ways, change=changes, rows=st.lists(row, min_size=1, max_size=3))
