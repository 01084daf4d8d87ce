# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What every codec promises, how far int8 rounds, and that an entry says how it was packed."""

import re
import sys
from dataclasses import replace

import pytest
import torch
from worlds import REFERENCE, reference_questions

from hf_blend import ChunkStore, plugins
from hf_blend.errors import PluginNotFoundError, StoreError
from hf_blend.evaluation.bundled import load_model
from hf_blend.model.capture import capture_chunk
from hf_blend.prompt.pieces import tokenize
from hf_blend.store.entry import KIND, EntryReader, Header, PackedChunk
from hf_blend.store.tiers.base import BytesSource, EntryFault
from hf_blend.store.tiers.memory import MemoryTier
from tests.asking import logits, memory

from .conftest import header_of, reheaded, with_plan, with_text

CODECS = plugins.describe("store.codecs")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)
WIDE = {"layers": 3}


def encoded(chunk, codec):
    return b"".join(PackedChunk(chunk, codec).parts)


def stored_as(chunk, codec):
    return PackedChunk(chunk, codec).chunk


def decoded(content, key):
    return EntryReader(BytesSource(content), key).read()


def model_chunk(dtype=torch.bfloat16):
    model, tokenizer = load_model(REFERENCE)
    text = " ".join(text.strip() for one in reference_questions() for text in one["chunks"])
    ids = list(tokenize(tokenizer, text))[:200]
    return capture_chunk(model, ids, (0,), "ab" * 32).map(lambda tensor: tensor.to(dtype))


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_codec_gives_dtype_and_shape_back(codec, dtype, chunk, same):
    stored = chunk(range(20), dtype=dtype, **WIDE)
    content = encoded(stored, codec)
    assert content == encoded(stored, codec)
    got = decoded(content, stored.key)
    same(got, stored_as(stored, codec))
    if plugins.load("store.codecs", codec).is_exact:
        same(got, stored)
    for (_, one), (_, two) in zip(got.named_tensors(), stored.named_tensors(), strict=True):
        assert one.float().isfinite().all()
        assert one.dtype == two.dtype
        assert one.shape == two.shape


def test_int8_rounds_within_stated_bound(chunk):
    stored = chunk(range(300), **WIDE)
    for layer, rounded in zip(stored.layers, stored_as(stored, "int8").layers, strict=True):
        for states, got, axis in zip(layer, rounded, (1, 2), strict=True):
            assert got.dtype == states.dtype == torch.float32
            error = (states - got).abs()
            assert (error <= states.abs().amax(axis, keepdim=True) / 254 * (1 + 1e-5)).all()
            assert error.any()


def test_int8_relative_error_on_real_model_is_what_docstring_says():
    docstring = sys.modules[plugins.load("store.codecs", "int8").__module__].__doc__
    stated = re.search(r"([0-9.]+) % of their\s+norm", docstring)
    stored = model_chunk(torch.float32)
    errors = []
    for pair, rounded in zip(stored.layers, stored_as(stored, "int8").layers, strict=True):
        for one, two in zip(pair, rounded, strict=True):
            errors.append(float((one - two).norm() / one.norm()))
    assert stated is not None
    assert max(errors) == pytest.approx(float(stated[1]) / 100, rel=0.15)


def test_zeros_stay_zeros(chunk):
    zero = chunk(range(4)).map(torch.zeros_like)
    for codec in CODECS:
        assert all(not tensor.any() for _, tensor in stored_as(zero, codec).named_tensors())


def test_rounded_chunk_is_same_from_memory_and_every_tier(tmp_path, chunk, same):
    stored = chunk(range(30))
    tier = MemoryTier()
    store = ChunkStore.open(tmp_path, codec="int8")
    kept = store.put(stored)
    same(store.get(stored.key), kept)
    assert not kept.layers[0][0].equal(stored.layers[0][0])
    with ChunkStore.open(tmp_path) as reader:
        same(reader.get(stored.key), kept)
        assert [one.reason for one in reader.check()] == [""]
    ChunkStore(None, [tier], codec="int8").put(stored)
    far = ChunkStore(None, [near := MemoryTier(), _far(tier)])
    same(far.get(stored.key), kept)
    assert [one.content for one in near.objects.values()] == [one.content for one in tier.objects.values()]


def _far(tier):
    tier.is_local = False
    tier.name = "far"
    return tier


def test_states_of_two_dtypes_are_refused_by_lossy_codec(chunk, same):
    stored = chunk(range(5))
    mixed = replace(stored, layers=tuple((keys, values.half()) for keys, values in stored.layers))
    tier = MemoryTier()
    with pytest.raises(StoreError, match="packs one dtype"):
        ChunkStore(None, [tier], codec="int8").put(mixed)
    assert not tier.objects
    raw = ChunkStore(None, [tier])
    raw.put(mixed)
    same(raw.get(mixed.key), mixed)


def test_entry_of_unknown_codec_stays_and_is_miss(chunk):
    stored = chunk()
    tier = MemoryTier()
    store = ChunkStore(None, [tier])
    for name in ("zip", "int8", "int8:F99", "raw:F32", "../raw"):
        tier.objects.clear()
        renamed = reheaded(encoded(stored, "raw"), lambda header: with_text(header, codec=name))  # noqa: B023
        tier.put(store.name(stored.key.digest), [memoryview(renamed)])
        assert store.get(stored.key) is None
        assert len(tier.objects) == 1
    assert set(store.stats()["load_failures"]) == {"bytes:codec"}


def test_scales_that_do_not_fit_steps_are_fault(chunk):
    stored = chunk(range(5))
    content = encoded(stored, "int8")
    plans = Header.decode(header_of(content), KIND).tensors
    names = [plan.name for plan in plans]
    place = names.index("layer.0.k.scale")
    for change in ({"shape": plans[place].shape[::-1]}, {"dtype": "I32"}):
        bad = reheaded(content, lambda header: with_plan(header, place, **change))  # noqa: B023
        with pytest.raises(EntryFault, match="format: layer 0"):
            decoded(bad, stored.key)


def test_codec_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(PluginNotFoundError, match=r"int7.*int8"):
        ChunkStore.open(tmp_path, codec="int7")


def test_request_gives_same_bits_from_computed_and_loaded_chunks(tmp_path, shared_model, pieces):
    def asked(store):
        return logits(shared_model(), pieces(), store=store, recompute_ratio=0.3)[0]

    with ChunkStore.open(tmp_path, codec="int8") as store:
        computed = asked(store)
        held = asked(store)
    with ChunkStore.open(tmp_path, codec="int8", memory_bytes=0) as store:
        loaded = asked(store)
    assert computed.equal(held)
    assert computed.equal(loaded)
    assert not computed.equal(asked(memory()))
