# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Chunks as they are among the others of their set, for prompts that have the same set in any order.

A set is prefilled twice, in an order and in the reverse of it, so that each chunk looks at every other once. What is
kept of a chunk is the mean of its K, as at position 0, and V. One order alone leaves three times as much: in it the
first chunks look at little, and the last ones all.

Source: ours; Kamera and Cache-Craft keep what one prompt left.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import nn

from ..errors import UnsupportedModelError
from ..store.chunk import ChunkKey, ChunkKV
from .calibrate import rotary_styles
from .canary import signed
from .capture import capture, check_chunk, cut_chunk, keeps_tokens_alone
from .correction import features_of, states_of
from .fingerprint import fingerprint


def set_identity(keys: Iterable[ChunkKey]) -> str:
    """Name a set of chunks, whatever their order: the fingerprint in the keys of what is computed together."""
    return hashlib.sha256("\0".join(["together", *sorted({key.digest for key in keys})]).encode()).hexdigest()


def set_keys(keys: Sequence[ChunkKey], separator: Sequence[int]) -> list[ChunkKey]:
    """The keys of chunks among each other, which the separator keeps apart; given are those of chunks alone."""
    identity = set_identity(keys)
    return [ChunkKey(identity, tuple(separator), key.token_ids, key.namespace) for key in keys]


def compute_together(
    model: nn.Module, keys: Sequence[ChunkKey], separator: Sequence[int], tokenizer: str = ""
) -> list[ChunkKV]:
    """Compute chunks, given by their keys when alone, among each other: the mean over an order and its reverse.

    The order is that of their digests, so that every process stores the same.
    """
    listed, sink = sorted({*keys}, key=lambda key: key.digest), keys[0].chunk_prefix_ids
    if not keeps_tokens_alone(model):
        raise UnsupportedModelError(
            f"{type(model).__name__} keeps a state beside K and V, expected K and V of each token alone: they are "
            "what chunks that were computed together can be cut into. Store its chunks with `add`."
        )
    check_chunk(model, [token for key in listed for token in (*separator, *key.token_ids)], sink, "a set of chunks")
    found, identity = {key: list[ChunkKV]() for key in listed}, fingerprint(model)
    for order in (listed, listed[::-1]):
        tokens = [*sink, *(token for key in order for token in (*key.token_ids, *separator))]
        captured, start = capture(model, torch.tensor([tokens])), len(sink)
        for key in order:
            end = start + len(key.token_ids)
            found[key].append(cut_chunk(captured, ChunkKey(identity, (), key.token_ids), start, end))
            start = end + len(separator)
    means = signed(model, [_mean(model, *pair) for pair in found.values()], tokenizer)
    return [replace(one, key=key) for key, one in zip(set_keys(listed, separator), means, strict=True)]


def _mean(model: nn.Module, one: ChunkKV, other: ChunkKV) -> ChunkKV:
    """The mean of a chunk that was computed at two positions, at the first of them."""
    layers = list(one.layers)
    for layer, style in enumerate(rotary_styles(model)):
        if len(layers[layer]) >= 2:
            mean = (features_of(one, layer, style) + features_of(other, layer, style)) / 2
            layers[layer] = (*states_of(mean, one, layer, style), *layers[layer][2:])
    return replace(one, layers=tuple(layers))
