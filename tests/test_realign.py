# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Stored chunks at their place in a prompt: keys as the model computes them there, values untouched."""

import pytest
import torch
from transformers import DynamicCache

from hf_blend.model.calibrate import rotary_styles
from hf_blend.model.capture import capture, capture_chunk
from hf_blend.model.checks import relative_error
from hf_blend.prefill.plan import PlacedChunk
from hf_blend.prefill.realign import Realigner
from hf_blend.prefill.report import BlendReport

CHUNK = tuple(range(10, 40))
LONG = {"max_position_embeddings": 4096}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [1.0 + 0.7 * i for i in range(8)], "factor": 8.0, "original_max_position_embeddings": 64,
}  # fmt: skip
MODELS = {
    "llama": ("llama", {}),
    "partial": ("phi", {"partial_rotary_factor": 0.5}),
    "interleaved": ("cohere", {}),
    "longrope": ("llama", {"rope_parameters": LONGROPE}),
    "without positions": ("smollm3", {"no_rope_layers": [0, 1, 0, 1]}),
}


def laid(model, chunk, start, total, slots=None):
    """Realign a chunk to `start` in a prompt of `total` tokens; gives the realigner and (K, V) of each layer."""
    tables = capture(model, torch.full((1, total), 5)).tables
    realigner = Realigner(rotary_styles(model), BlendReport())
    states = []
    slots = slots or [PlacedChunk(0, start, chunk, False, 0)]
    for layer, (stored, _) in enumerate(chunk.layers):
        realigner.tables[layer] = tables[layer]
        keys = torch.full((1, stored.shape[0], total, stored.shape[2]), 7.0)
        values = keys.clone()
        realigner.write(layer, slots, keys, values)
        states.append((keys, values))
    return realigner, states


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("start", [3, 450])
def test_layer_zero_of_realigned_chunk_is_that_of_full_prefill(tiny_model, name, start):
    model_type, config = MODELS[name]
    model = tiny_model(model_type, **{**LONG, **config})
    plain = DynamicCache()
    ids = torch.tensor([[*[5] * start, *CHUNK, 6, 7, 8, 9]])
    model(ids, past_key_values=plain)
    chunk = capture_chunk(model, CHUNK, (1,), "f")
    _, states = laid(model, chunk, start, ids.shape[1])
    here = slice(start, start + len(CHUNK))
    keys, values = states[0]
    expected = plain.layers[0]
    assert relative_error(keys[:, :, here], expected.keys[:, :, here]) < 2e-6
    assert relative_error(values[:, :, here], expected.values[:, :, here]) < 2e-6


@torch.no_grad()
@pytest.mark.parametrize("first", [0, 1])
def test_layers_that_share_table_turn_by_their_own_styles(tiny_model, first):
    model = tiny_model("smollm3", no_rope_layers=[first, 1 - first] * 2)
    chunk = capture_chunk(model, CHUNK, (1,), "f")
    moved = DynamicCache()
    ids = torch.tensor([[1, *CHUNK]])
    places = torch.arange(49, 80)[None]
    model(ids, position_ids=places, past_key_values=moved)
    _, states = laid(model, chunk, 50, 90)
    for (keys, _), plain in zip(states, moved.layers, strict=True):
        assert relative_error(keys[:, :, 50:80], plain.keys[:, :, 1:]) < 5e-6


def test_chunk_may_stand_in_several_places(shared_model):
    chunk = capture_chunk(shared_model(), CHUNK, (1,), "f")
    both = [PlacedChunk(0, 5, chunk, False, 0), PlacedChunk(0, 50, chunk, False, 1)]
    _, together = laid(shared_model(), chunk, 0, 90, both)
    keys, _ = together[1]
    for start in (5, 50):
        _, alone = laid(shared_model(), chunk, start, 90)
        here = slice(start, start + 30)
        expected, _ = alone[1]
        assert torch.equal(keys[:, :, here], expected[:, :, here])


def test_mismatches_are_relative_and_take_worse_of_keys_and_values_of_each_chunk(shared_model):
    model = shared_model()
    nan = float("nan")
    one = capture_chunk(model, CHUNK, (1,), "f")
    other = capture_chunk(model, CHUNK[:7], (1,), "f")
    slots = [PlacedChunk(0, 5, one, False, 0), PlacedChunk(0, 50, other, False, 1)]
    realigner, states = laid(model, one, 0, 90, slots)
    keys, values = states[1]
    doubled = keys.clone()
    doubled[:, :, :40] *= 2
    cases = ((keys, values, [0, 0]), (doubled, values, [0.5, 0]), (doubled, 4 * values, [0.75, 0.75]))
    for found_keys, found_values, expected in cases:
        found = realigner.mismatches(1, slots, found_keys, found_values)
        assert found == pytest.approx(expected, abs=1e-6)
    assert realigner.mismatches(1, slots[1:], keys, nan * values) == [float("inf")]
    wrong = keys.clone()
    wrong[:, :, 17] *= -1
    found = realigner.mismatches(1, slots, wrong, values)
    assert found[0] > 1, "one token among all others"
