# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Reuse and recompute of chunks in plain torch, by hand: nothing of the library takes part, so that it can be checked.

Every chunk is computed alone behind BOS, at positions 1 on, and its keys are turned to their places in the prompt.
Then the tokens that stay fresh are run over stored K and V, layer by layer. BOS and question are always fresh.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from net import EPS, HEAD_DIM, HEADS, WIDTH, Net, rotary, rotate
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention
from worlds.chains.sampling import Example
from worlds.chains.story import question
from worlds.chains.tokens import BOS, vocabulary


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    Attributes:
        ids: `[1, tokens]`.
        told: `[tokens]`, True for the tokens of chunks.
        links: `[tokens]`, True for those that refer back.
        pieces: first and last place of each chunk.
        answer: id of the right word.
        depth: of the question.
        crossings: of the question.
    """

    ids: Tensor
    told: Tensor
    links: Tensor
    pieces: tuple[tuple[int, int], ...]
    answer: int
    depth: int
    crossings: int

    @property
    def reusable(self) -> Tensor:
        """`[tokens]`, True for the tokens of all chunks but the first, which is behind BOS alone here, too."""
        return self.told & (torch.arange(len(self.told)) >= self.pieces[0][1])


def encode(example: Example) -> Prompt:
    """An example as ids, without the tokenizer."""
    ids_of, words, pieces, links = vocabulary(), [BOS], [], []
    for chunk, places in zip(example.chunks, example.links, strict=True):
        start = len(words)
        words += [*chunk.split(), "\n"]
        pieces.append((start, len(words)))
        links += [start + place for place in places]
    told = len(words)
    words += question(example.question.split()[3])
    seen = torch.arange(len(words))
    refers = torch.zeros(len(words), dtype=torch.bool)
    refers[links] = True
    ids = torch.tensor([[ids_of[word] for word in words]])
    return Prompt(
        ids,
        (seen > 0) & (seen < told),
        refers,
        tuple(pieces),
        ids_of[example.answer],
        example.depth,
        example.crossings,
    )


class Emulation:
    """One prompt with its stored K and V, and what a full prefill sees in every layer."""

    @torch.no_grad()
    def __init__(self, net: Net, prompt: Prompt) -> None:
        """Compute each chunk alone, and the whole prompt once."""
        self.net, self.prompt = net, prompt
        tokens = prompt.ids.shape[1]
        self.tables = rotary(torch.arange(tokens)[None])
        kv_heads = net.model.layers[0].self_attn.k_proj.out_features // HEAD_DIM
        shape = (1, kv_heads, tokens, HEAD_DIM)
        self.stored = [(torch.zeros(shape), torch.zeros(shape)) for _ in net.model.layers]
        for start, end in prompt.pieces:
            self._store(start, end)
        self.inputs: list[Tensor] = []  # of every layer
        self.fresh: list[tuple[Tensor, Tensor]] = []  # K and V of every layer
        x = net.model.embed_tokens(prompt.ids)
        for layer in net.model.layers:
            q, k, v = _projected(layer, x, self.tables)
            self.inputs.append(x)
            self.fresh.append((k, v))
            x = _layer(layer, x, q, k, v, None)
        self.full = net.logits(x[:, -1])[0]

    def _store(self, start: int, end: int) -> None:
        ids = torch.cat((self.prompt.ids[:, :1], self.prompt.ids[:, start:end]), 1)
        x, tables = self.net.model.embed_tokens(ids), rotary(torch.arange(ids.shape[1])[None])
        there = tuple(table[:, :, start:end] for table in self.tables)
        for layer, (keys, values) in zip(self.net.model.layers, self.stored, strict=True):
            q, k, v = _projected(layer, x, tables)
            keys[:, :, start:end] = rotate(_projected(layer, x[:, 1:], None)[1], *there)
            values[:, :, start:end] = v[:, :, 1:]
            x = _layer(layer, x, q, k, v, None)

    @torch.no_grad()
    def kept(self, tokens: Tensor, start: int = 0) -> Tensor:
        """Scores of the next word, `[words]`, where all is fresh below a layer and only some tokens are from it on.

        Args:
            tokens: `[tokens]`, True for those that stay fresh; BOS and question always do.
            start: the layer.
        """
        if start == len(self.stored):
            return self.full
        rows = (tokens | ~self.prompt.told).nonzero().flatten()
        seen = rows[:, None] >= torch.arange(len(tokens))
        tables = tuple(table[:, :, rows] for table in self.tables)
        x = self.inputs[start][:, rows]
        for layer, stored in list(zip(self.net.model.layers, self.stored, strict=True))[start:]:
            q, *fresh = _projected(layer, x, tables)
            k, v = (old.index_copy(2, rows, new) for old, new in zip(stored, fresh, strict=True))
            x = _layer(layer, x, q, k, v, seen)
        return self.net.logits(x[:, -1])[0]

    def reuse(self) -> Tensor:
        """Everything stored."""
        return self.kept(torch.zeros_like(self.prompt.told))

    def fresh_up_to(self, last: int) -> Tensor:
        """Fresh in layers 0 to `last`, stored behind."""
        return self.kept(torch.zeros_like(self.prompt.told), last + 1)

    def chosen(self, score: Callable[[Tensor, Tensor], Tensor], ratio: float, check: int = 1) -> Tensor:
        """All fresh up to the check layer, its K and V included; behind it only the best of a score.

        Args:
            score: given K and V of the check layer minus the stored ones, `[1, heads, tokens, head_dim]`; gives
                `[tokens]`.
            ratio: share of the reusable tokens.
            check: the layer at which is chosen.
        """
        reusable = self.prompt.reusable
        keys, values = (new - old for new, old in zip(self.fresh[check], self.stored[check], strict=True))
        scores = score(keys, values).masked_fill(~reusable, float("-inf"))
        count = math.ceil(int(reusable.sum()) * ratio)
        return self.kept(torch.zeros_like(reusable).index_fill(0, scores.topk(count).indices, True), check + 1)

    def links_only(self) -> Tensor:
        """Only the tokens that refer back are fresh, in every layer."""
        return self.kept(self.prompt.links & self.prompt.reusable)


def by_value(keys: Tensor, values: Tensor) -> Tensor:
    """Squared distance of values."""
    return values.square().sum((0, 1, 3))


def by_key(keys: Tensor, values: Tensor) -> Tensor:
    """Squared distance of keys."""
    return keys.square().sum((0, 1, 3))


def at_random(seed: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Luck."""
    return lambda keys, values: torch.rand(keys.shape[2], generator=torch.Generator().manual_seed(seed))


def is_right(logits: Tensor, prompt: Prompt) -> bool:
    """Whether the likeliest word is the answer."""
    return int(logits.argmax()) == prompt.answer


def _projected(layer: torch.nn.Module, x: Tensor, tables: tuple[Tensor, Tensor] | None) -> list[Tensor]:
    """Q, K, V, `[1, heads, tokens, head_dim]`; Q and K rotated if there are tables."""
    seen, attention = layer.input_layernorm(x), layer.self_attn
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    q, k, v = (proj(seen).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for proj in projections)
    return [q, k, v] if tables is None else [rotate(q, *tables), rotate(k, *tables), v]


def _layer(layer: torch.nn.Module, x: Tensor, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None) -> Tensor:
    """What a layer gives; `seen` is `[rows, keys]`, None is causal."""
    k, v = (one.repeat_interleave(HEADS // k.shape[1], 1) for one in (k, v))
    read = scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=seen is None)
    x = x + layer.self_attn.o_proj(read.transpose(1, 2).flatten(2))
    return x + layer.mlp(rms_norm(x, (WIDTH,), layer.post_attention_layernorm.weight, EPS))
