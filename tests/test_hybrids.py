# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Layers that keep more than K and V: mixers (linear attention, state spaces, convolutions), and indexers with keys.

An indexer chooses the few tokens that its layer looks at, by keys of its own.
"""

import re
from functools import cache, partial

import pytest
import torch
from families import CHECKS
from tiny_models import tiny_model

from hf_blend import BlendCache, ChunkStore, ConfigError, UnsupportedModelError, sparse_decoding
from hf_blend.context.sequence_cache import SequenceCache
from hf_blend.model import anatomy
from hf_blend.store.chunk import ChunkKey
from hf_blend.verify.model_under_test import ModelUnderTest
from hf_blend.verify.runner import measure
from tests import asking
from tests.asking import memory, poisoned_memory, prepared
from tests.conftest import random_pieces, skip_in_the_oldest
from tests.faults.damage import tensors_of

# one for each way in which a mixer stands in a layer: before its MLP, beside attention, behind it, alone
FAST = ("qwen3_next", "lfm2", "minimax")  # the last takes no cache but one of its own class
SLOW = (
    "bailing_hybrid bamba falcon_h1 granitemoehybrid jamba kimi_linear lfm2_moe lfm3 nemotron_h olmo_hybrid "
    "qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text zamba zamba2"
).split()
INDEXED = "axk2 deepseek_v32 dots3_note dots3_note_text glm_moe_dsa hy_v4 qwen4_exp qwen4_exp_text".split()
VARIANTS = {
    "lfm2-deep": ("lfm2", {"num_hidden_layers": 6, "layer_types": 2 * ["conv", "conv", "full_attention"]}),
    # every other layer looks where the one before did; and an indexer that hides nothing of a prompt
    "glm_moe_dsa-shared": ("glm_moe_dsa", {"indexer_types": ["full", "shared", "full", "shared"]}),
    # a mixer and an indexer, which rotates its keys when it looks
    "qwen4-both": ("qwen4_exp_text", {"layer_types": ["linear_attention", "indexed_attention"] * 2}),
}
generated = partial(asking.generated, max_new_tokens=5)
as_stock = partial(asking.as_stock, max_new_tokens=5)
TELLING = ("ratio_1", "fused_ratio")


@cache
def subject_of(name):
    kind, fields = VARIANTS.get(name, (name, {}))
    if kind in INDEXED:
        skip_in_the_oldest("models with an indexer turn their keys in a way that is refused")
    model = tiny_model(kind, **fields)
    if not getattr(model, "_supports_sdpa", True):
        model.set_attn_implementation("eager")
    return ModelUnderTest(model)


def pieces(seed=0):
    return random_pieces((12, 9, 14), prefix=3, question=6, seed=seed)


@pytest.mark.parametrize(
    ("name", "rungs"),
    [
        ("lfm2-deep", TELLING),
        ("falcon_h1", ("ratio_1",)),  # whose layers give the mixer what they cut to the rows
        ("deepseek_v32", ("fused_ratio",)),
        ("hy_v4", ("fused_ratio",)),  # several streams of rows, and layers that look where an earlier one did
        *(pytest.param(name, None, marks=pytest.mark.slow) for name in (*FAST, *SLOW, *INDEXED, *VARIANTS)),
    ],
)
def test_ladder_of_hybrid_holds(name, rungs):
    """Also in a padded batch, and against the dense forward with stale tokens."""
    if rungs is None:
        rungs = (*CHECKS, "prefix_cache")
    with poisoned_memory():
        subject = subject_of(name)
        for rung in rungs:
            found = measure(rung, subject, "float32", subject.model.config._attn_implementation)
            assert found.passed, found


def test_beams_behind_blend_go_on_as_stock():
    model = subject_of("minimax").model
    blended, inputs = prepared(model, pieces(), recompute_ratio=1.0)
    as_stock(model, inputs, blended, num_beams=3)
    assert blended.report.reusable_tokens >= 35


def test_further_prompt_is_refused_where_model_would_ignore_state():
    model = tiny_model("jamba")
    cache, inputs = prepared(model, pieces(), recompute_ratio=1.0)
    first = generated(model, inputs, cache)
    new = torch.tensor([[7, 9, 11]])
    more = torch.cat((first, new), dim=1)
    with pytest.raises(ConfigError, match="the code of jamba models takes the states"):
        model(new, past_key_values=cache)
    again = cache.inputs(None, prefix=first[0], chunks=[], question=[7, 9, 11])
    assert torch.equal(again["input_ids"], more)
    as_stock(model, again, cache)


@pytest.mark.parametrize(("name", "states"), [("lfm2", [1, 1, 2, 1]), ("glm_moe_dsa-shared", [3, 2, 3, 2])])
def test_store_gives_projections_and_indexer_keys_back_as_they_were(name, states, tmp_path):
    subject = subject_of(name)
    ids = tuple(range(20, 33))
    chunk = subject.chunk(ids)
    with ChunkStore.open(tmp_path, memory_bytes=0, durability="none") as store:
        store.put(chunk)
        back = store.get(ChunkKey(chunk.key.fingerprint, subject.chunk_prefix_ids, ids))
    assert [*map(len, back.layers)] == states
    assert back.layout == chunk.layout
    for (name, tensor), (stored_name, stored) in zip(chunk.named_tensors(), back.named_tensors(), strict=True):
        assert stored_name == name
        assert torch.equal(stored, tensor)


def test_chunk_found_damaged_inside_mixer_is_computed_and_changes_nothing(tmp_path, monkeypatch):
    """A chunk is then computed by a forward of the same modules, in the middle of the one that asks for it."""
    monkeypatch.setattr("hf_blend.store.stream.READ_BYTES", 0)  # a layer at a time, each when it is used
    model = subject_of("lfm2-deep").model

    def logits():
        with ChunkStore.open(tmp_path, memory_bytes=0, durability="none") as store, torch.no_grad():
            cache = BlendCache(model, store, recompute_ratio=0.3)
            given = cache.inputs(None, **pieces())
            return model(**given, past_key_values=cache, logits_to_keep=1).logits, cache.report.computed_chunks

    logits()
    expected, computed = logits()
    assert computed == 0
    sound = {path: path.read_bytes() for path in tmp_path.rglob("*.safetensors")}
    for layer in range(6):
        for path, content in sound.items():
            damaged = bytearray(content)
            for name, (_, end) in tensors_of(content).items():
                if re.search(rf"\b{layer}\b", name):
                    damaged[end - 1] ^= 1
            path.write_bytes(damaged)
        got, computed = logits()
        assert torch.equal(got, expected), layer
        assert computed == len(sound), layer


def test_what_mixer_or_indexer_does_not_allow_is_refused_by_name():
    subject = subject_of("deepseek_v32")
    with pytest.raises(UnsupportedModelError, match=r"layer 0 keeps a state of another kind \(LinearAttention\)"):
        SequenceCache(subject_of("qwen3_next").model)
    with pytest.raises(UnsupportedModelError, match=r"layer 0 keeps a state of another kind \(Indexed\)"):
        SequenceCache(subject.model)
    with pytest.raises(ConfigError, match="layers are all of the kind LinearAttentionAndFullAttentionLayer"):
        BlendCache(subject_of("falcon_h1").model, memory(), kv_bits=8)
    blended = BlendCache(subject.model, memory())
    with pytest.raises(UnsupportedModelError, match="by an indexer"), sparse_decoding(subject.model, blended):
        pass


def test_without_room_other_models_are_blended_and_hybrids_are_refused(monkeypatch):
    monkeypatch.setattr(anatomy, "layer_extensions", list)
    with pytest.raises(UnsupportedModelError, match="state of another kind"):
        BlendCache(tiny_model("lfm2"), memory())
    subject = subject_of("llama")
    blended = subject.blend(subject.prompts[:1], 0.3)
    assert blended.cache.report.reusable_tokens
