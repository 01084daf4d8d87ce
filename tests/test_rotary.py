# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Keys turn exactly: every style, any distance, any scaling; and the probe finds each layer's style."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_blend import observer
from hf_blend.errors import UnsupportedModelError
from hf_blend.model.anatomy import decoder_layers
from hf_blend.model.calibrate import rotary_styles
from hf_blend.model.checks import relative_error
from hf_blend.rotary.base import compose, rotary_table
from hf_blend.rotary.half import Half
from hf_blend.rotary.interleaved import Interleaved
from hf_blend.rotary.interleaved_halves import InterleavedHalves
from hf_blend.rotary.unrotated import Unrotated

HEAD_DIM = 16
TOKENS = 5
TURNING = (Half, Interleaved, InterleavedHalves)
styles = st.sampled_from(TURNING)
positions = st.integers(0, 100_000)
widths = st.sampled_from((8, HEAD_DIM))  # 8: half of each head turns


def table(style, start, *, width=HEAD_DIM, theta=10_000.0, factor=1.0, dtype=torch.float32):
    """(cos, sin) as a model of that style makes them, in float32, for `start … start + TOKENS - 1`."""
    frequencies = theta ** -(torch.arange(0, width, 2, dtype=torch.float32) / width)
    angles = torch.arange(start, start + TOKENS, dtype=torch.float32)[:, None] * frequencies
    wide = angles.repeat_interleave(2, -1) if style is Interleaved else torch.cat((angles, angles), -1)
    return (wide.cos() * factor).to(dtype), (wide.sin() * factor).to(dtype)


def rotated(style, keys, turn):
    """What a model does to fresh keys, written down once more, in float64."""
    cos, sin = turn
    width = cos.shape[-1]
    half = width // 2
    if style is InterleavedHalves:
        cos = cos[..., :half].repeat_interleave(2, -1)
        sin = sin[..., :half].repeat_interleave(2, -1)
    keys = keys.double().clone()
    turning = keys[..., :width]
    swapped = torch.empty_like(turning)
    if style is Half:
        swapped[..., :half] = -turning[..., half:]
        swapped[..., half:] = turning[..., :half]
    else:
        swapped[..., ::2] = -turning[..., 1::2]
        swapped[..., 1::2] = turning[..., ::2]
    keys[..., :width] = turning * cos.double() + swapped * sin.double()
    return keys


def fresh_keys(seed=0, dtype=torch.float32):
    return torch.randn(3, TOKENS, HEAD_DIM, generator=torch.Generator().manual_seed(seed)).to(dtype)


def moved(style, keys, old, new):
    out = torch.full_like(keys, float("nan"))
    style.move(keys, compose(style, old, new), out=out)
    return out


def assert_close(got, expected, relative):
    error = relative_error(got.double(), expected.double())
    assert error <= relative, f"off by {error:.3g} of the size, {relative:g} allowed"


@given(styles, positions, positions, widths, st.sampled_from((1.0, 0.5, 1.3)))
def test_move_gives_what_model_computes_there_at_any_distance(style, here, there, width, factor):
    """With an attention factor, which is in a moved key once."""
    old = table(style, here, width=width, factor=factor)
    new = table(style, there, width=width, factor=factor)
    stored = rotated(style, fresh_keys(), old).float()
    kept = stored.clone()
    got = moved(style, stored, old, new)
    assert torch.equal(stored, kept), "what is stored is not written"
    assert_close(got, rotated(style, fresh_keys(), new), 6e-7)
    assert torch.equal(got[..., width:], fresh_keys()[..., width:]), "what does not turn is copied bit for bit"


def test_move_is_exact_where_turning_by_difference_of_angles_is_not():
    here = 7
    there = 100_003
    old = table(Half, here)
    new = table(Half, there)
    cos, sin = table(Half, there - here)
    stored = rotated(Half, fresh_keys(), old).float()
    expected = rotated(Half, fresh_keys(), new)
    by_difference = rotated(Half, stored, (cos[:1], sin[:1]))
    assert relative_error(by_difference, expected) > 1e-4
    assert_close(moved(Half, stored, old, new), expected, 6e-7)
    assert relative_error(moved(Interleaved, stored, old, new), expected) > 0.1, "styles are not each other"


@pytest.mark.parametrize("style", TURNING)
def test_move_from_short_to_long_factors_in_coarse_keys_and_by_views(style):
    old = table(style, 1)
    new = table(style, 5000, theta=500_000.0, factor=1.19)
    got = moved(style, rotated(style, fresh_keys(), old).float(), old, new)
    assert_close(got, rotated(style, fresh_keys(), new), 6e-7)
    keys = fresh_keys(dtype=torch.bfloat16)
    assert torch.equal(moved(style, keys, old, new), moved(style, keys.float(), old, new).bfloat16())
    keys = torch.zeros(1, TOKENS, HEAD_DIM)
    for part in style.split(keys, HEAD_DIM // 2):
        part += 1
    assert torch.equal(keys, torch.ones_like(keys))


def test_rotary_table_takes_only_form_that_is_understood():
    one = torch.ones(1, 4, 8)
    narrow = torch.ones(1, 4, 16)
    assert rotary_table({"position_embeddings": (one, one)}) is not None
    assert rotary_table({}) is None
    for wrong in (None, (one,), (one, "sin"), (one, narrow), (one.cfloat(), one.cfloat())):
        assert rotary_table({"position_embeddings": wrong}) is None, wrong
    angles = torch.ones(1, 3, 4)
    turns = torch.polar(angles, angles)
    cos, sin = rotary_table({"position_embeddings": turns})
    assert torch.equal(sin, turns.imag)
    again, _ = rotary_table({"position_embeddings": turns})
    assert cos is again, "layers that share a table are known by it"


@pytest.mark.parametrize(
    ("model_type", "config", "expected"),
    [
        ("llama", {}, [Half] * 4),
        ("cohere", {}, [Interleaved] * 4),
        ("ernie4_5", {"head_dim": 16}, [InterleavedHalves] * 4),
        ("smollm3", {"no_rope_layers": [1, 0, 1, 0]}, [Half, Unrotated, Half, Unrotated]),
    ],
)
def test_rotary_styles_of_each_layer_are_found_once_per_model(tiny_model, untouched, model_type, config, expected):
    model = tiny_model(model_type, **config)
    calls = []
    decoder_layers(model)[0].register_forward_pre_hook(observer(lambda *_: calls.append(1)))
    with untouched(model):
        assert rotary_styles(model) == tuple(expected)
    assert rotary_styles(model) is rotary_styles(model)
    assert len(calls) == 4, "two for the styles, two for `untouched`"
    assert rotary_styles(tiny_model(model_type, **config).bfloat16()) == tuple(expected), "with a coarse tolerance"


def test_rotary_styles_refuses_values_that_depend_on_position(tiny_model):
    model = tiny_model()
    attention = decoder_layers(model)[2].self_attn

    def add_place(module, args, kwargs):
        place = kwargs["position_embeddings"][0].mean(-1, keepdim=True)
        return args, {**kwargs, "hidden_states": kwargs["hidden_states"] + place}

    attention.register_forward_pre_hook(observer(add_place), with_kwargs=True)  # a lie
    with pytest.raises(UnsupportedModelError, match="layer 2 of LlamaForCausalLM"):
        rotary_styles(model)
