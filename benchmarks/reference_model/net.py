# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The second reference model in plain torch, with the parameter names of `LlamaForCausalLM`, and how its weights start.

A row is one story and many questions about it. The story is read once, with plain causal attention; the questions see
the story and themselves but not each other. So no mask of story × story is needed, and a question costs six tokens.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

LAYERS, WIDTH, MLP, HEADS, KV_HEADS, HEAD_DIM, THETA = 8, 128, 256, 8, 4, 32, 10_000.0
EPS = 1e-6
_LOOKS_BACK = (3, 4, 1, 2, 0, 0, 0, 0)  # tokens, per head of layer 0; 0 looks for what resembles the current token
_CONSTANT, _PAIRS, _STD = 0.3, 6, 0.05
_KIND_STD = 0.04  # of the direction that words of one kind share


class Norm(nn.Module):
    """RMS norm."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis."""
        return rms_norm(x, (WIDTH,), self.weight, EPS)


class Attention(nn.Module):
    """Grouped-query attention over a story and its questions."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, HEADS * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(WIDTH, KV_HEADS * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(WIDTH, KV_HEADS * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, WIDTH, bias=False)

    def heads(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys (both rotated) and values: `[batch, heads, tokens, head_dim]`, all with `HEADS` heads."""
        q, k, v = (
            proj(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        groups = HEADS // KV_HEADS
        k, v = rotate(k, cos, sin).repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        return rotate(q, cos, sin), k, v

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, story: int, mask: Tensor, story_mask: Tensor | None) -> Tensor:
        """Attend.

        Args:
            x: `[batch, story + questions, width]`.
            cos: rotary table, `[batch, 1, story + questions, head_dim]`.
            sin: likewise.
            story: how many tokens the story has.
            mask: added to the scores of the questions, `[batch, 1, questions, story + questions]`.
            story_mask: added to those of the story; None is causal.
        """
        q, k, v = self.heads(x, cos, sin)
        told = scaled_dot_product_attention(
            q[:, :, :story], k[:, :, :story], v[:, :, :story], attn_mask=story_mask, is_causal=story_mask is None
        )
        asked = scaled_dot_product_attention(q[:, :, story:], k, v, attn_mask=mask)
        return self.o_proj(torch.cat((told, asked), 2).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """Gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(WIDTH, MLP, bias=False)
        self.up_proj = nn.Linear(WIDTH, MLP, bias=False)
        self.down_proj = nn.Linear(MLP, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply."""
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(), Mlp()
        self.input_layernorm, self.post_attention_layernorm = Norm(), Norm()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, story: int, mask: Tensor, story_mask: Tensor | None) -> Tensor:
        """Apply; arguments as of `Attention.forward`."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, story, mask, story_mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    """Embeddings, layers and the last norm."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(words, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = Norm()


class Net(nn.Module):
    """The whole model; its state is that of `LlamaForCausalLM` with tied embeddings."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.model = Body(words)
        for weight in self.parameters():
            if weight.ndim == 2:
                nn.init.normal_(weight, 0, _STD)

    def forward(
        self, ids: Tensor, positions: Tensor, story: int, masks: list[Tensor], story_mask: Tensor | None = None
    ) -> list[Tensor]:
        """Hidden states behind every layer; `masks` has one mask of the questions per layer."""
        x, states = self.model.embed_tokens(ids), []
        cos, sin = rotary(positions)
        for layer, mask in zip(self.model.layers, masks, strict=True):
            x = layer(x, cos, sin, story, mask, story_mask)
            states.append(x)
        return states

    def logits(self, x: Tensor) -> Tensor:
        """Scores of the next word."""
        return linear(self.model.norm(x), self.model.embed_tokens.weight)


def rotary(positions: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary tables for `[batch, tokens]`."""
    frequencies = THETA ** (-torch.arange(HEAD_DIM // 2).float() / (HEAD_DIM // 2))
    angles = positions[:, None, :, None].float() * frequencies
    angles = torch.cat((angles, angles), -1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn queries or keys to their positions."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


@torch.no_grad()
def start_reading(net: Net, kinds: list[list[int]]) -> None:
    """Give untrained weights the rough shape of reading (after mimetic initialisation, Trockman and Kolter 2023).

    In layer 0 four heads look one to four tokens back, everywhere else queries start equal to keys and outputs undo
    values, and the words of one kind share a direction.

    Args:
        net: seeded random weights.
        kinds: token ids of the words of each kind.
    """
    embedded = net.model.embed_tokens.weight
    embedded[:, 0] = _CONSTANT
    for ids in kinds:
        direction = torch.randn(WIDTH) * _KIND_STD
        direction[0] = 0
        embedded[ids] += direction
    for layer in net.model.layers:
        _match(layer.self_attn)
    _look_back(net.model.layers[0].self_attn)


def _match(attention: Attention) -> None:
    shape, groups = (KV_HEADS, HEAD_DIM, WIDTH), HEADS // KV_HEADS
    attention.k_proj.weight.mul_(2.5)[:, 0] = 0
    keys, values = attention.k_proj.weight.view(shape), attention.v_proj.weight.view(shape)
    keys[:, :_PAIRS] = keys[:, HEAD_DIM // 2 : HEAD_DIM // 2 + _PAIRS] = 0
    values.copy_(values[:1].expand(shape))
    queries = keys.repeat_interleave(groups, 0).reshape(attention.q_proj.weight.shape)
    attention.q_proj.weight.copy_(queries + torch.randn_like(queries) * 0.02)
    attention.q_proj.weight[:, 0] = 0
    attention.o_proj.weight.mul_(0.3).add_(values.repeat_interleave(groups, 0).reshape(queries.shape).mT)


def _look_back(attention: Attention) -> None:
    half, pairs, groups = HEAD_DIM // 2, torch.arange(_PAIRS), HEADS // KV_HEADS
    angles = THETA ** (-pairs / half)
    for head, back in enumerate(_LOOKS_BACK):
        if not back:
            continue
        first, kv = head * HEAD_DIM, (head // groups) * HEAD_DIM
        if head % groups == 0:
            attention.k_proj.weight[kv : kv + HEAD_DIM] *= 0.2
            attention.k_proj.weight[kv + pairs, 0] = 1.0
        attention.q_proj.weight[first : first + HEAD_DIM] *= 0.2
        attention.q_proj.weight[first + pairs, 0] = (angles * back).cos()
        attention.q_proj.weight[first + half + pairs, 0] = -(angles * back).sin()
