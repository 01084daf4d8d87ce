# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The reference model: a small stock Llama with grouped queries, and how it grows deeper."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from .tokens import BOS, EOS, vocabulary


def build_model(layers: int) -> LlamaForCausalLM:
    """Build an untrained model; seed torch first."""
    ids = vocabulary()
    config = LlamaConfig(
        vocab_size=len(ids),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=ids[BOS],
        eos_token_id=ids[EOS],
        pad_token_id=ids[EOS],
    )
    model = LlamaForCausalLM(config)
    for layer in model.model.layers:
        _start_matching(layer.self_attn, config)
    return model


@torch.no_grad()
def _start_matching(attention: torch.nn.Module, config: LlamaConfig) -> None:
    """Let every head begin by looking for its own token and copying it (after mimetic initialisation, 2023).

    Queries equal keys and outputs undo values, up to noise; without this, binding names to facts takes far longer.
    """
    groups = config.num_attention_heads // config.num_key_value_heads
    noise = torch.randn_like(attention.q_proj.weight) * 0.03
    shared = attention.k_proj.weight.view(config.num_key_value_heads, config.head_dim, -1).mul_(1.6)
    attention.q_proj.weight.copy_(shared.repeat_interleave(groups, 0).reshape(noise.shape) + noise)
    values = attention.v_proj.weight.view(config.num_key_value_heads, config.head_dim, -1)
    attention.o_proj.weight.add_(values.repeat_interleave(groups, 0).reshape(noise.shape).mT)


def deepen(model: LlamaForCausalLM, layers: int) -> LlamaForCausalLM:
    """Return a deeper model that computes the same: a new layer, silent at first, after each of the last old ones.

    Args:
        model: the trained model.
        layers: decoder layers wanted, at most twice as many as there are.
    """
    old = len(model.model.layers)
    if layers == old:
        return model
    if not old < layers <= 2 * old:
        raise ValueError(f"layers is {layers}, but a model of {old} layers grows to {old} … {2 * old}. Choose one.")
    deeper = build_model(layers)
    deeper.model.embed_tokens.load_state_dict(model.model.embed_tokens.state_dict())
    deeper.model.norm.load_state_dict(model.model.norm.state_dict())
    place = 0
    for index, layer in enumerate(model.model.layers):
        deeper.model.layers[place].load_state_dict(layer.state_dict())
        place += 1
        if index >= 2 * old - layers:
            _silence(deeper.model.layers[place])
            place += 1
    return deeper


def _silence(layer: torch.nn.Module) -> None:
    torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
    torch.nn.init.zeros_(layer.mlp.down_proj.weight)
