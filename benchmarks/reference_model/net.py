# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The chain model in plain torch, with the parameter names of `LlamaForCausalLM`, and how its weights start.

A row is one story and many questions about it. The story is read once, with plain causal attention; the questions see
the story and themselves but not each other. So no mask of story × story is needed, and a question costs six tokens.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

LAYERS, WIDTH, MLP, HEADS, KV_HEADS, HEAD_DIM, THETA = 8, 128, 256, 8, 4, 32, 1_000_000.0  # KV heads at the start
EPS = 1e-6
_LOOKS_BACK = (3, 4, 1, 2, 0, 0, 0, 0)  # tokens, per head of layer 0; 0 looks for what resembles the current token
LOOKERS = slice(4, None)  # heads of layer 0 that look for what a token names by its kind
READS = 5  # first layer in which questions read the story while training
_CONSTANT, _STD, _SHARPNESS = 0.3, 0.05, 1.7
_PAIRS, _SLOW = 6, 7  # pairs of a head's dimensions that tell neighbours apart; from here on, those that hardly turn
_NORM, _KIND_NORM, _KIND_GAIN, _MATCH_GAIN, _HELPER_GAIN = 0.6, 0.3, 2.0, 3.0, 1.0
_WRITES, _HANDS_ON, _LOUDNESS, _OWNERS = 1.0, 0.4, 1.5, 2.0


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

    def __init__(self, kv_heads: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, HEADS * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(WIDTH, kv_heads * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(WIDTH, kv_heads * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, WIDTH, bias=False)

    @torch.no_grad()
    def untie(self, noise: float) -> None:
        """Give every query head keys and values of its own, which start as its group's with a little noise.

        Args:
            noise: standard deviation, as a share of that of the weights.
        """
        for proj in (self.k_proj, self.v_proj):
            own = proj.weight.unflatten(0, (-1, HEAD_DIM))
            own = own.repeat_interleave(HEADS // len(own), 0).flatten(0, 1)
            proj.weight = nn.Parameter(own + noise * own.std() * torch.randn_like(own))
            proj.out_features = len(own)

    def heads(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys (both rotated) and values: `[batch, heads, tokens, head_dim]`, all with `HEADS` heads."""
        q, k, v = (
            proj(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        groups = HEADS // k.shape[1]
        k, v = rotate(k, cos, sin).repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        return rotate(q, cos, sin), k, v

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, story: int, mask: Tensor, story_mask: Tensor | None
    ) -> Tensor:
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

    def __init__(self, kv_heads: int) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(kv_heads), Mlp()
        self.input_layernorm, self.post_attention_layernorm = Norm(), Norm()

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, story: int, mask: Tensor, story_mask: Tensor | None
    ) -> Tensor:
        """Apply; arguments as of `Attention.forward`."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, story, mask, story_mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    """Embeddings, layers and the last norm."""

    def __init__(self, words: int, kv_heads: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(words, WIDTH)
        self.layers = nn.ModuleList(Layer(kv_heads) for _ in range(LAYERS))
        self.norm = Norm()


class Net(nn.Module):
    """The whole model; its state is that of `LlamaForCausalLM` with tied embeddings."""

    def __init__(self, words: int, kv_heads: int = KV_HEADS) -> None:
        super().__init__()
        self.model = Body(words, kv_heads)
        for weight in self.parameters():
            if weight.ndim == 2:
                nn.init.normal_(weight, 0, _STD)

    @classmethod
    def of(cls, state: dict[str, Tensor]) -> "Net":
        """The model with these weights, of as many KV heads as they have."""
        words, kv_heads = len(state["model.embed_tokens.weight"]), len(state["model.layers.0.self_attn.k_proj.weight"])
        net = cls(words, kv_heads // HEAD_DIM).eval()
        net.load_state_dict(state)
        return net

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
def start_reading(
    net: Net, helpers: nn.ModuleList, members: list[list[int]], names: list[int], owners: list[int]
) -> None:
    """Give untrained weights the rough shape of reading (after mimetic initialisation, Trockman and Kolter 2023).

    Layer 0 writes what stood one to four tokens back, and the last member of the kind that a token names, each into a
    part of the residual stream of its own. The layers below `READS` look for the token that has as its own what this
    one leans on, the others for what is asked, and all hand on what they find. So the first steps of the training
    already have something to sharpen; without this, binding takes millions of tokens to emerge.

    Args:
        net: seeded random weights.
        helpers: linear heads behind the layers below `READS`; they start by reading what the layers start by writing.
        members: token ids of the words of each kind.
        names: token id of the word that names each kind.
        owners: token ids of what is told.
    """
    told = 1 + 3 * HEAD_DIM  # from this dimension on stands what is told; the first one is constant
    own, leant, asked, rest = torch.eye(WIDTH)[:, 1:].split((HEAD_DIM, HEAD_DIM, HEAD_DIM, WIDTH - told), 1)
    embedded = net.model.embed_tokens.weight
    kinds, titles = torch.zeros(2, len(names), WIDTH - 1)
    directions = torch.linalg.qr(torch.randn(told - 1, 2 * len(names)))[0].mT
    kinds[:, : told - 1], titles[:, : told - 1] = directions.split(len(names))
    for direction, title, ids, name in zip(kinds, titles, members, names, strict=True):
        embedded[ids, 1:] += _KIND_NORM * direction
        embedded[name, 1:] += _KIND_NORM * title
    answers = embedded[owners, told:]
    embedded[:, told:] = 0
    embedded[owners] = 0
    embedded[owners, told:] = answers
    embedded[:, 0] = _CONSTANT
    net.model.norm.weight[:] = 0.2
    net.model.norm.weight[told:] = _LOUDNESS
    embedded[:, 1:] *= _NORM / embedded[:, 1:].norm(dim=1, keepdim=True)  # or some constants would be louder
    embedded[owners, 1:] *= _OWNERS
    for layer in net.model.layers:
        layer.mlp.down_proj.weight *= 0.1
    first, *others = (layer.self_attn for layer in net.model.layers)
    code = _gather(first, (own, asked, leant), kinds, titles)
    for index, helper in enumerate(helpers):
        read = embedded[:, 1:] @ code.mT @ leant.mT if index == 0 else embedded @ rest @ rest.mT
        helper.weight.copy_(_HELPER_GAIN * read / read.norm(dim=1, keepdim=True).clamp_min(1e-3))
    for index, attention in enumerate(others, start=1):
        _follow(attention, own, leant if index < READS else asked, rest)


def _gather(attention: Attention, parts: tuple[Tensor, Tensor, Tensor], kinds: Tensor, titles: Tensor) -> Tensor:
    """Layer 0: two groups of heads look a fixed number of tokens back, the others for the last member of a kind."""
    half, groups = HEAD_DIM // 2, HEADS // KV_HEADS
    pairs = torch.arange(_PAIRS)
    angles = THETA ** (-pairs / half)
    code = torch.randn(HEAD_DIM, WIDTH - 1) * _STD
    code -= code @ kinds.mT @ kinds  # what kind it is tells nobody which it is
    attention.v_proj.weight.view(KV_HEADS, HEAD_DIM, WIDTH).zero_()[:, :, 1:] = code
    attention.q_proj.weight.mul_(0.1), attention.k_proj.weight.mul_(0.1)
    for kv in range(KV_HEADS):
        keys = attention.k_proj.weight[kv * HEAD_DIM : (kv + 1) * HEAD_DIM]
        seen = torch.zeros(HEAD_DIM, len(kinds))
        seen[_slow()] = torch.randn(len(_slow()), len(kinds))
        seen *= _KIND_GAIN / seen.norm(dim=0)
        for head in range(kv * groups, (kv + 1) * groups):
            back, queries = _LOOKS_BACK[head], attention.q_proj.weight[head * HEAD_DIM : (head + 1) * HEAD_DIM]
            attention.o_proj.weight[:, head * HEAD_DIM : (head + 1) * HEAD_DIM] = _WRITES * parts[min(kv, 2)]
            if back:
                keys[pairs, 0] = _SHARPNESS
                queries[pairs, 0] = _SHARPNESS * (angles * back).cos()
                queries[pairs + half, 0] = -_SHARPNESS * (angles * back).sin()
            else:
                attention.o_proj.weight[:, head * HEAD_DIM : (head + 1) * HEAD_DIM] /= _LOOKS_BACK.count(0)
                keys[:, 1:] += (seen @ kinds) / groups
                queries[:, 1:] += seen @ titles
    return code


def _follow(attention: Attention, own: Tensor, sought: Tensor, rest: Tensor) -> None:
    """A later layer: queries read what is sought, keys what is a token's own, values the rest, which is handed on."""
    groups, places = HEADS // KV_HEADS, _slow()
    for weight in (attention.q_proj.weight, attention.k_proj.weight):
        weight.mul_(0.1)[:, 0] = 0
    attention.v_proj.weight.mul_(0.1)
    attention.o_proj.weight.mul_(0.1)
    width = rest.shape[1]
    for kv in range(KV_HEADS):
        mixed = torch.randn(len(places), HEAD_DIM) * _MATCH_GAIN / HEAD_DIM**0.5
        attention.k_proj.weight[kv * HEAD_DIM + places] += mixed @ own.mT
        attention.v_proj.weight[kv * HEAD_DIM : kv * HEAD_DIM + width] += rest.mT
        for head in range(kv * groups, (kv + 1) * groups):
            attention.q_proj.weight[head * HEAD_DIM + places] += mixed @ sought.mT
            attention.o_proj.weight[:, head * HEAD_DIM : head * HEAD_DIM + width] += _HANDS_ON / HEADS * rest


def _slow() -> Tensor:
    """The dimensions of a head that hardly turn, so that what matches there may be far."""
    pairs = torch.arange(_SLOW, HEAD_DIM // 2)
    return torch.cat((pairs, pairs + HEAD_DIM // 2))
