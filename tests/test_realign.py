# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Stored chunks at their place in a prompt: keys as the model computes them there, values untouched."""

import pytest
import torch
from transformers import DynamicCache

from hf_blend.model.calibrate import rotary_styles
from hf_blend.model.capture import capture, capture_chunk
from hf_blend.model.checks import relative_error
from hf_blend.prefill import realign
from hf_blend.prefill.plan import PlacedChunk
from hf_blend.prefill.realign import Realigner
from hf_blend.prefill.report import BlendReport
from hf_blend.rotary.half import Half
from tests.asking import longrope

CHUNK = tuple(range(10, 40))
MODELS = {
    "llama": ("llama", {}),
    "partial": ("phi", {"partial_rotary_factor": 0.5}),
    "interleaved": ("cohere", {}),
    "longrope": ("llama", {"rope_parameters": longrope(64, factor=8.0)}),
    "without positions": ("smollm3", {"no_rope_layers": [0, 1, 0, 1]}),
}


def realigned(model, total, *chunks):
    """The realigner of `(chunk, start)` in a prompt of `total` tokens, where it put them, and (K, V) of each layer."""
    tables = capture(model, torch.full((1, total), 5)).tables
    realigner = Realigner(rotary_styles(model), BlendReport())
    placed = []
    for number, (chunk, start) in enumerate(chunks):
        placed.append(PlacedChunk(0, start, chunk, False, number))
    states = []
    for layer, (stored, _) in enumerate(chunks[0][0].layers):
        realigner.tables[layer] = tables[layer]
        keys, values = torch.full((2, 1, stored.shape[0], total, stored.shape[2]), 7.0)
        realigner.write(layer, placed, keys, values)
        states.append((keys, values))
    return realigner, placed, states


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("start", [3, 450])
def test_layer_zero_of_realigned_chunk_is_that_of_full_prefill(tiny_model, name, start):
    model_type, config = MODELS[name]
    model = tiny_model(model_type, max_position_embeddings=4096, **config)
    plain = DynamicCache()
    ids = torch.tensor([[*[5] * start, *CHUNK, 6, 7, 8, 9]])
    model(ids, past_key_values=plain)
    chunk = capture_chunk(model, CHUNK, (1,), "f")
    _, _, states = realigned(model, ids.shape[1], (chunk, start))
    here = slice(start, start + len(CHUNK))
    expected = plain.layers[0]
    for got, stock in zip(states[0], (expected.keys, expected.values), strict=True):
        assert relative_error(got[:, :, here], stock[:, :, here]) < 2e-6


@torch.no_grad()
@pytest.mark.parametrize("first", [0, 1])
def test_layers_that_share_table_turn_by_their_own_styles(tiny_model, first):
    model = tiny_model("smollm3", no_rope_layers=[first, 1 - first] * 2)
    chunk = capture_chunk(model, CHUNK, (1,), "f")
    moved = DynamicCache()
    places = torch.arange(49, 80)[None]
    model(torch.tensor([[1, *CHUNK]]), position_ids=places, past_key_values=moved)
    _, _, states = realigned(model, 90, (chunk, 50))
    for (keys, _), plain in zip(states, moved.layers, strict=True):
        assert relative_error(keys[:, :, 50:80], plain.keys[:, :, 1:]) < 5e-6


def test_chunk_may_stand_in_several_places(shared_model):
    chunk = capture_chunk(shared_model(), CHUNK, (1,), "f")
    _, _, together = realigned(shared_model(), 90, (chunk, 5), (chunk, 50))
    keys, _ = together[1]
    for start in (5, 50):
        _, _, alone = realigned(shared_model(), 90, (chunk, start))
        expected, _ = alone[1]
        here = slice(start, start + 30)
        assert torch.equal(keys[:, :, here], expected[:, :, here])


def test_mismatches_are_relative_and_take_worse_of_keys_and_values_of_each_chunk(shared_model):
    model = shared_model()
    one = capture_chunk(model, CHUNK, (1,), "f")
    other = capture_chunk(model, CHUNK[:7], (1,), "f")
    realigner, placed, states = realigned(model, 90, (one, 5), (other, 50))
    keys, values = states[1]
    doubled = keys.clone()
    doubled[:, :, :40] *= 2
    assert realigner.mismatches(1, placed, keys, values) == pytest.approx([0, 0], abs=1e-6)
    assert realigner.mismatches(1, placed, doubled, values) == pytest.approx([0.5, 0], abs=1e-6)
    assert realigner.mismatches(1, placed, doubled, 4 * values) == pytest.approx([0.75, 0.75])
    nan = values * float("nan")
    assert realigner.mismatches(1, placed[1:], keys, nan) == [float("inf")]
    wrong = keys.clone()
    wrong[:, :, 17] *= -1
    found = realigner.mismatches(1, placed, wrong, values)
    assert found[0] > 1, "one token among all others"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("piece_bytes", [1, 5000, 1 << 30])
def test_rotation_by_heads_is_float32_cast_once(dtype, piece_bytes, monkeypatch):
    monkeypatch.setattr(realign, "PIECE_BYTES", (piece_bytes, piece_bytes))
    keys = torch.randn(2, 3, 46, 20).to(dtype)
    parts = list(keys.split([5, 1, 40], 2))
    angles = torch.rand(46, 8) * 100
    cos = angles.cos()
    sin = angles.sin()
    out = torch.full((2, 3, 60, 20), 7.0, dtype=dtype)
    moved = out[:, :, 4:50]
    realign.rotate(Half, (cos, sin), parts, moved)
    first, second, rest = keys.float().split([8, 8, 4], -1)
    expected = torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)
    rounding = torch.finfo(dtype).eps
    torch.testing.assert_close(moved, expected.to(dtype), rtol=2 * rounding, atol=1e-6)
    moved.fill_(7)
    assert (out == 7).all(), "nothing else is written"
