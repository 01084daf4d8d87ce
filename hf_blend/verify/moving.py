# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Chunks taken to other places by the realigner, for the rungs that look at it alone."""

from dataclasses import replace

import torch
from torch import Tensor

from ..prefill.plan import PlacedChunk
from ..prefill.realign import Realigner
from ..prefill.report import BlendReport
from ..store.chunk import ChunkKV
from .subject import ModelUnderTest

CHUNK_TOKENS = 24
NEAR, FAR = 41, 130  # places in the prompt, in tokens; neither is a multiple of the other


def probe_chunk(subject: ModelUnderTest) -> ChunkKV:
    """A chunk that stands behind the sink, `CHUNK_TOKENS` long."""
    return subject.chunk(subject.ids(CHUNK_TOKENS, seed=7))


def sequence_of(subject: ModelUnderTest, tokens: int) -> Tensor:
    """Random ids for a sequence of its own, `[1, tokens]`."""
    return torch.tensor([subject.ids(tokens, seed=8)])


def home(subject: ModelUnderTest) -> int:
    """The first position of a probe chunk as it is stored."""
    return len(subject.chunk_prefix_ids)


def moved(subject: ModelUnderTest, chunk: ChunkKV, start: int) -> ChunkKV:
    """Realign a chunk as a request does."""
    realigner, slot = Realigner(subject.styles, BlendReport()), PlacedChunk(0, 0, chunk, False, 0)
    tables, layers = list(chunk.tables), []
    for index, table in enumerate(subject.tables_at(start, chunk.tokens)):
        realigner.set_table(index, table)
        laid = [torch.full_like(states, float("nan"))[None] for states in chunk.layers[index]]
        if len(laid) > 1:
            realigner.write(index, [slot], *laid[:2])
        if len(laid) % 2:
            realigner.write_beside(index, [slot], laid[-1])
        layers.append(tuple(states[0] for states in laid))
        if table is not None and chunk.layer_table[index] >= 0:
            tables[chunk.layer_table[index]] = tuple(part[0].float() for part in table)
    return replace(chunk, layers=tuple(layers), tables=tuple(tables))


def turning(subject: ModelUnderTest, chunk: ChunkKV) -> list[Tensor]:
    """Of each layer's (K, V) the tensor that turns with the position, `[kv_heads, tokens, head_dim]`."""
    pairs = zip(chunk.layers, subject.styles, strict=True)
    return [layer[style.slot] for layer, style in pairs if len(layer) > 1]


def still(subject: ModelUnderTest, chunk: ChunkKV) -> list[Tensor]:
    """Of each layer's (K, V) the tensor that carries no position."""
    pairs = zip(chunk.layers, subject.styles, strict=True)
    return [layer[1 - style.slot] for layer, style in pairs if len(layer) > 1]


def keys_apart(subject: ModelUnderTest, one: ChunkKV, other: ChunkKV) -> float:
    """Largest difference of two chunks' keys, as a share of each layer's largest key; NaN counts as infinite."""
    shares = [
        float((a.float() - b.float()).abs().amax() / b.float().abs().amax())
        for a, b in zip(turning(subject, one), turning(subject, other), strict=True)
    ]
    worst = max(shares)
    return worst if all(share == share for share in shares) else float("inf")
