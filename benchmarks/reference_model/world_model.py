# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The reference model: a small stock Llama with grouped queries, and how its weights start."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from worlds.world.tokens import BOS, EOS, vocabulary

_LAYERS, _WIDTH, _HEADS, _KV_HEADS, _HEAD_DIM, _THETA = 8, 128, 4, 2, 32, 10_000.0
_CONSTANT = 0.3
_PAIRS = 6
_SHARPNESS = 1.0


def build_model() -> LlamaForCausalLM:
    """Build an untrained model; seed torch first."""
    ids = vocabulary()
    config = LlamaConfig(
        vocab_size=len(ids),
        hidden_size=_WIDTH,
        intermediate_size=256,
        num_hidden_layers=_LAYERS,
        num_attention_heads=_HEADS,
        num_key_value_heads=_KV_HEADS,
        head_dim=_HEAD_DIM,
        rope_parameters={"rope_type": "default", "rope_theta": _THETA},
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=ids[BOS],
        eos_token_id=ids[EOS],
        pad_token_id=ids[EOS],
    )
    model = LlamaForCausalLM(config)
    start_reading(model)
    return model


@torch.no_grad()
def start_reading(model: LlamaForCausalLM) -> None:
    """Give untrained weights the rough shape of reading: gather the last few words, then look for the like.

    In the first layer each head starts out looking a fixed number of tokens back; in the others queries start equal
    to keys, and everywhere outputs undo values, up to noise (after mimetic initialisation, Trockman and Kolter 2023).
    Without this, training stays for many millions of tokens at a model that knows what is asked but not of whom.

    Args:
        model: seeded random weights, of any sizes.
    """
    model.model.embed_tokens.weight[:, 0] = _CONSTANT
    for layer in model.model.layers:
        _match(layer.self_attn, model.config)
    _look_back(model.model.layers[0].self_attn, model.config)


def _match(attention: torch.nn.Module, config: Any) -> None:
    groups, half = config.num_attention_heads // config.num_key_value_heads, config.head_dim // 2
    shape = (config.num_key_value_heads, config.head_dim, config.hidden_size)
    attention.k_proj.weight.mul_(2.5)[:, 0] = 0
    keys, values = attention.k_proj.weight.view(shape), attention.v_proj.weight.view(shape)
    keys[:, :_PAIRS] = keys[:, half : half + _PAIRS] = 0
    values.copy_(values[:1].expand(shape))
    queries = keys.repeat_interleave(groups, 0).reshape(attention.q_proj.weight.shape)
    attention.q_proj.weight.copy_(queries + torch.randn_like(queries) * 0.02)
    attention.q_proj.weight[:, 0] = 0
    attention.o_proj.weight.mul_(0.3).add_(values.repeat_interleave(groups, 0).reshape(queries.shape).mT)


def _look_back(attention: torch.nn.Module, config: Any) -> None:
    half = config.head_dim // 2
    pairs = torch.arange(_PAIRS)
    angles = config.rope_parameters["rope_theta"] ** (-pairs / half)
    attention.q_proj.weight.mul_(0.2)
    attention.k_proj.weight.mul_(0.2)
    for head in range(config.num_key_value_heads):
        attention.k_proj.weight[head * config.head_dim + pairs, 0] = _SHARPNESS
    for head in range(config.num_attention_heads):
        first, turn = head * config.head_dim, angles * (head + 1)
        attention.q_proj.weight[first + pairs, 0] = _SHARPNESS * turn.cos()
        attention.q_proj.weight[first + half + pairs, 0] = -_SHARPNESS * turn.sin()
