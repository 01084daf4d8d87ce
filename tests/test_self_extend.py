# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Self-Extend computes what the paper's equations say, and nothing of it is left behind."""

import math

import pytest
import torch

from hf_blend import self_extend
from tests.asking import apart, prompt, rotated
from tests.conftest import shared_zoo_model

WINDOW = 9  # no multiple of the group, so that both scales differ at its edge
GROUP = 4
TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def model():
    return shared_zoo_model("llama", num_hidden_layers=1)


def heads_of(states, config):
    """`[query heads, tokens, width]`; K and V are repeated."""
    split = states.unflatten(-1, (-1, config.head_dim)).transpose(0, 1)
    return split.repeat_interleave(config.num_attention_heads // len(split), 0)


def by_hand(model, ids):
    """Logits of a model of one layer, with distances as in equations 3 and 4 of the paper."""
    (block,) = model.model.layers
    config = model.config
    attention = block.self_attn
    tokens = ids.shape[1]
    places = torch.arange(tokens)
    embedded = model.model.embed_tokens(ids)[0]
    normed = block.input_layernorm(embedded)
    query = heads_of(attention.q_proj(normed), config)
    key = heads_of(attention.k_proj(normed), config)
    value = heads_of(attention.v_proj(normed), config)
    near = rotated(query, places) @ rotated(key, places).mT
    groups = places // GROUP
    far_places = groups + WINDOW - WINDOW // GROUP
    far = rotated(query, far_places) @ rotated(key, groups).mT
    distance = places[:, None] - places[None]
    scores = torch.where(distance < WINDOW, near, far) / math.sqrt(config.head_dim)
    weights = scores.masked_fill(distance < 0, -math.inf).softmax(-1)
    mixed = (weights @ value.double()).float()
    mixed = mixed.transpose(0, 1).reshape(tokens, -1)
    hidden = embedded + attention.o_proj(mixed)
    hidden = hidden + block.mlp(block.post_attention_layernorm(hidden))
    return model.lm_head(model.model.norm(hidden))


@torch.no_grad()
def test_attention_is_that_of_equations(model):
    ids = prompt(40)
    with self_extend(model, trained_tokens=16, window_tokens=WINDOW, group_tokens=GROUP):
        got = model(ids).logits[0]
    assert apart(got, by_hand(model, ids)) <= TOLERANCE
    assert apart(got, model(ids).logits[0]) > 100 * TOLERANCE


@torch.no_grad()
def test_model_is_as_before_after_block_and_after_exception(model):
    ids = prompt(40)
    before = model(ids).logits
    implementation = model.config._attn_implementation
    with pytest.raises(IndexError), self_extend(model, trained_tokens=16):
        model(ids + 1000)
    assert model.config._attn_implementation == implementation
    assert torch.equal(model(ids).logits, before)


@torch.no_grad()
def test_decoding_and_padding_give_what_one_forward_gives(model):
    ids = prompt(48)
    padded = torch.nn.functional.pad(ids, (5, 0))
    mask = torch.nn.functional.pad(torch.ones_like(ids), (5, 0))
    with self_extend(model, trained_tokens=16, window_tokens=WINDOW, group_tokens=GROUP):
        whole = model(ids).logits[0, 40:]
        first = model(ids[:, :40], use_cache=True)
        rest = model(ids[:, 40:], past_key_values=first.past_key_values).logits[0]
        places = (mask.cumsum(-1) - 1).clamp_min(0)
        beside = model(padded, attention_mask=mask, position_ids=places).logits[0, 45:]
    assert apart(rest, whole) <= TOLERANCE
    assert apart(beside, whole) <= TOLERANCE


@pytest.mark.parametrize(
    ("trained", "longest", "window", "group"), [(64, 256, 32, 7), (64, 64, 32, 1), (100, 290, 50, 5)]
)
def test_least_group_that_keeps_far_tokens_within_trained_length(trained, longest, window, group, model):
    with self_extend(model, trained_tokens=trained, max_tokens=longest) as extension:
        assert extension.window_tokens == window
        assert extension.group_tokens == group
    assert (longest - 1) // group + window - window // group < trained + 1
