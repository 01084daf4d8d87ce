# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Keys turn exactly: every style, any distance, any scaling; and the probe finds each layer's style."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_blend import observer, plugins
from hf_blend.errors import UnsupportedModelError
from hf_blend.model.anatomy import decoder_layers
from hf_blend.model.calibrate import relative_error, rotary_styles
from hf_blend.rotary.base import compose
from hf_blend.rotary.half import Half
from hf_blend.rotary.interleaved import Interleaved
from hf_blend.rotary.interleaved_halves import InterleavedHalves
from hf_blend.rotary.tables import rotary_table
from hf_blend.rotary.unrotated import Unrotated

HEAD_DIM, TOKENS = 16, 5
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
    (cos, sin), width = turn, turn[0].shape[-1]
    keys, turning = keys.double().clone(), keys[..., :width].double()
    if style is InterleavedHalves:
        cos, sin = (part[..., : width // 2].repeat_interleave(2, -1) for part in turn)
    if style is Half:
        swapped = torch.cat((-turning[..., width // 2 :], turning[..., : width // 2]), -1)
    else:
        swapped = torch.stack((-turning[..., 1::2], turning[..., ::2]), -1).flatten(-2)
    keys[..., :width] = turning * cos.double() + swapped * sin.double()
    return keys


def fresh_keys(seed=0, dtype=torch.float32):
    return torch.randn(3, TOKENS, HEAD_DIM, generator=torch.Generator().manual_seed(seed)).to(dtype)


def moved(style, keys, old, new):
    out = torch.full_like(keys, float("nan"))
    style.move(keys, compose(style, old, new), out=out)
    return out


def assert_close(got, wanted, relative):
    error = relative_error(got.double(), wanted.double())
    assert error <= relative, f"off by {error:.3g} of the size, {relative:g} allowed"


@given(styles, positions, widths, st.sampled_from((torch.float32, torch.bfloat16, torch.float16)))
def test_moving_by_nothing_changes_no_bit(style, start, width, dtype):
    keys, here = fresh_keys(dtype=dtype), table(style, start, width=width, factor=1.3)
    assert torch.equal(moved(style, keys, here, here), keys)


@given(styles, positions, positions, widths)
def test_there_and_back_is_where_it_was(style, here, there, width):
    keys, old, new = fresh_keys(), table(style, here, width=width), table(style, there, width=width)
    assert_close(moved(style, moved(style, keys, old, new), new, old), keys, 1e-6)


@given(styles, st.tuples(positions, positions, positions), widths)
def test_two_moves_are_one(style, places, width):
    first, second, third = (table(style, place, width=width) for place in places)
    twice = moved(style, moved(style, fresh_keys(), first, second), second, third)
    assert_close(twice, moved(style, fresh_keys(), first, third), 1e-6)


@given(styles, positions, positions, widths)
def test_a_move_keeps_lengths(style, here, there, width):
    got = moved(style, fresh_keys(), table(style, here, width=width), table(style, there, width=width))
    assert_close(got.norm(dim=-1), fresh_keys().norm(dim=-1), 1e-6)


@given(styles, positions, positions, widths)
def test_a_moved_key_is_what_the_model_computes_there_at_any_distance(style, here, there, width):
    old, new = table(style, here, width=width), table(style, there, width=width)
    stored = rotated(style, fresh_keys(), old).float()
    assert_close(moved(style, stored, old, new), rotated(style, fresh_keys(), new), 6e-7)


def test_turning_by_a_difference_of_angles_fails_where_composing_does_not():
    here, there = 7, 100_003
    old, new, difference = table(Half, here), table(Half, there), table(Half, there - here)
    stored, wanted = rotated(Half, fresh_keys(), old).float(), rotated(Half, fresh_keys(), new)
    by_difference = rotated(Half, stored, tuple(part[:1].expand_as(part) for part in difference))
    assert relative_error(by_difference, wanted) > 1e-4
    assert_close(moved(Half, stored, old, new), wanted, 6e-7)


@pytest.mark.parametrize("style", TURNING)
@pytest.mark.parametrize("factor", [0.5, 1.3])
def test_an_attention_factor_is_in_a_moved_key_once(style, factor):
    old, new = table(style, 1, factor=factor), table(style, 977, factor=factor)
    got = moved(style, rotated(style, fresh_keys(), old).float(), old, new)
    assert_close(got, rotated(style, fresh_keys(), new), 6e-7)
    assert_close(got.norm(dim=-1), factor * fresh_keys().norm(dim=-1), 1e-6)


@pytest.mark.parametrize("style", TURNING)
def test_a_key_may_change_from_short_to_long_factors_on_the_way(style):
    old, new = table(style, 1), table(style, 5000, theta=500_000.0, factor=1.19)
    got = moved(style, rotated(style, fresh_keys(), old).float(), old, new)
    assert_close(got, rotated(style, fresh_keys(), new), 6e-7)


@pytest.mark.parametrize("style", TURNING)
def test_what_does_not_turn_is_copied_bit_for_bit(style):
    keys = fresh_keys()
    got = moved(style, keys, table(style, 1, width=8), table(style, 300, width=8))
    assert torch.equal(got[..., 8:], keys[..., 8:])
    assert not torch.equal(got[..., :8], keys[..., :8])


@pytest.mark.parametrize("style", TURNING)
def test_bfloat16_keys_are_turned_in_float32_and_cast_once(style):
    keys, old, new = fresh_keys(dtype=torch.bfloat16), table(style, 3), table(style, 4001)
    assert torch.equal(moved(style, keys, old, new), moved(style, keys.float(), old, new).bfloat16())


@pytest.mark.parametrize("style", TURNING)
def test_the_stored_keys_are_not_written(style):
    keys = fresh_keys()
    moved(style, keys, table(style, 3), table(style, 40))
    assert torch.equal(keys, fresh_keys())


def test_the_styles_are_not_each_other():
    old, new = table(Half, 0), table(Half, 50)
    stored = rotated(Half, fresh_keys(), old).float()
    assert relative_error(moved(Interleaved, stored, old, new), rotated(Half, fresh_keys(), new)) > 0.1


def test_keys_without_position_stay():
    assert torch.equal(moved(Unrotated, fresh_keys(), table(Half, 3), table(Half, 50)), fresh_keys())
    assert compose(Unrotated, table(Half, 3), table(Half, 50))[0].shape[-1] == 0


@pytest.mark.parametrize("style", TURNING)
def test_the_members_of_a_pair_are_views(style):
    keys = torch.zeros(1, TOKENS, HEAD_DIM)
    for part in style.split(keys, HEAD_DIM // 2):
        part += 1
    assert torch.equal(keys, torch.ones_like(keys))


def wide(*shape):
    return torch.ones(shape)


@pytest.mark.parametrize(
    ("arguments", "is_found"),
    [
        ({"position_embeddings": (wide(1, 4, 8), wide(1, 4, 8))}, True),
        ({"position_embeddings": [wide(2, 4, 8), wide(2, 4, 8)]}, True),
        ({}, False),
        ({"position_embeddings": None}, False),
        ({"position_embeddings": wide(2, 4, 8)}, False),
        ({"position_embeddings": (wide(1, 4, 8),)}, False),
        ({"position_embeddings": (wide(1, 4, 8), "sin")}, False),
        ({"position_embeddings": (wide(1, 4, 8), wide(1, 4, 16))}, False),
        ({"position_embeddings": (wide(4, 8), wide(4, 8))}, False),
        ({"position_embeddings": (wide(1, 4, 8).cfloat(), wide(1, 4, 8).cfloat())}, False),
    ],
)
def test_a_table_is_taken_only_in_the_form_that_is_understood(arguments, is_found):
    assert (rotary_table(arguments) is not None) is is_found


@pytest.mark.parametrize(
    ("model_type", "config", "wanted"),
    [
        ("llama", {}, [Half] * 4),
        ("mistral", {"sliding_window": 16}, [Half] * 4),
        ("qwen3", {"head_dim": 16}, [Half] * 4),
        ("phi", {"partial_rotary_factor": 0.5}, [Half] * 4),
        ("cohere", {}, [Interleaved] * 4),
        ("glm", {"partial_rotary_factor": 0.5, "head_dim": 16}, [InterleavedHalves] * 4),
        ("ernie4_5", {"head_dim": 16}, [InterleavedHalves] * 4),
        ("helium", {"head_dim": 16}, [InterleavedHalves] * 4),
        ("smollm3", {"no_rope_layers": [1, 0, 1, 0]}, [Half, Unrotated, Half, Unrotated]),
    ],
)
def test_the_probe_finds_the_style_of_each_layer(tiny_model, untouched, model_type, config, wanted):
    model = tiny_model(model_type, **config)
    with untouched(model):
        assert rotary_styles(model) == tuple(wanted)


def test_the_probe_runs_once_per_model(tiny_model):
    model, calls = tiny_model(num_hidden_layers=2), []
    decoder_layers(model)[0].register_forward_pre_hook(observer(lambda *_: calls.append(1)))
    assert rotary_styles(model) is rotary_styles(model)
    assert len(calls) == 2


def test_a_coarse_dtype_is_probed_with_a_coarse_tolerance(tiny_model):
    assert rotary_styles(tiny_model().bfloat16()) == (Half,) * 4


def test_a_model_with_absolute_positions_is_refused_by_the_name_of_the_layer(tiny_model):
    model = tiny_model("gpt2", n_positions=512, n_embd=64, n_layer=2, n_head=4, num_hidden_layers=2)
    with pytest.raises(UnsupportedModelError, match=r"layer 0 of GPT2LMHeadModel cannot be moved.*full prefill"):
        rotary_styles(model)


def test_a_layer_whose_values_depend_on_the_position_is_named(tiny_model):
    model = tiny_model()
    attention = decoder_layers(model)[2].self_attn

    def add_place(module, args, kwargs):
        place = kwargs["position_embeddings"][0].mean(-1, keepdim=True)
        return args, {**kwargs, "hidden_states": kwargs["hidden_states"] + place}

    attention.register_forward_pre_hook(observer(add_place), with_kwargs=True)  # a lie
    with pytest.raises(UnsupportedModelError, match="layer 2 of LlamaForCausalLM"):
        rotary_styles(model)


def test_every_style_found_is_probed():
    assert {plugins.load("rotary", name) for name in plugins.describe("rotary")} >= {*TURNING, Unrotated}
