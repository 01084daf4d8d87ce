# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Which chunks are computed together: products of weights and tokens cost less per token, the more tokens there are.

The chunks are one row of a batch, each at positions of its own, and their masks keep them apart. What is stored of one
must not depend on the others. So a model's chunks are packed only where a probe shows that: the same tokens, packed
with others that differ, keep the same bits, and behind others they have the K and V that they have first.
"""

from collections.abc import Iterable

import torch
from torch import nn

from ..rotary.regime import frequency_regime
from ..store.chunk import ChunkKey
from .anatomy import stock_layers, text_config
from .attention import STOCK
from .calibrate import COARSE_TOLERANCE, TOLERANCE, relative_error
from .capture import capture
from .fingerprint import PerStructure
from .modality import text_ids

__all__ = ["PACK_TOKENS", "packs"]

PACK_TOKENS = 2048  # more tokens are no faster
PROBE_TOKENS = 8
_OF_TOKENS_ALONE = ("DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer")  # cache layers without another state


def packs(model: nn.Module, keys: Iterable[ChunkKey]) -> list[list[ChunkKey]]:
    """Share chunks out among forwards."""
    listed, config = list(keys), text_config(model)
    if len(listed) < 2 or not _may_pack(model):
        return [[key] for key in listed]
    most = min(PACK_TOKENS, getattr(config, "attention_chunk_size", None) or PACK_TOKENS)
    found: list[list[ChunkKey]] = []
    last: dict[tuple[int, ...], tuple[int, list[ChunkKey]]] = {}  # by regime, the pack that is filled, and its tokens
    for key in listed:
        tokens = len(key.chunk_prefix_ids) + len(key.token_ids)
        regime = frequency_regime(config, tokens)
        before, pack = last.get(regime, (most, []))
        if before + tokens > most:
            before, pack = 0, []
            found.append(pack)
        pack.append(key)
        last[regime] = before + tokens, pack
    return found


def _may_pack(model: nn.Module) -> bool:
    config = text_config(model)
    return getattr(config, "_attn_implementation", None) == STOCK and _keeps_apart(model)


@PerStructure
def _keeps_apart(model: nn.Module) -> bool:
    """Whether what a model keeps of a chunk does not depend on the chunks that are packed with it."""
    config = text_config(model)
    if any(type(layer).__name__ not in _OF_TOKENS_ALONE for layer in stock_layers(config)):
        return False
    own, one, other = text_ids(model, 3 * PROBE_TOKENS).split(PROBE_TOKENS)
    places = torch.arange(PROBE_TOKENS).repeat(3)[None]
    starts = [0, PROBE_TOKENS, 2 * PROBE_TOKENS]
    first, second = (
        capture(model, torch.cat((own, between, own))[None], places, starts=starts).layers for between in (one, other)
    )
    return all(
        torch.equal(states[..., part, :], again[..., part, :]) and _is_same(states)
        for layer, layer_again in zip(first, second, strict=True)
        for states, again in zip(layer, layer_again, strict=True)
        for part in (slice(0, PROBE_TOKENS), slice(2 * PROBE_TOKENS, None))
    )


def _is_same(states: torch.Tensor) -> bool:
    """Whether K or V of the first and of the last chunk of the probe are the same up to rounding."""
    error = relative_error(states[..., -PROBE_TOKENS:, :], states[..., :PROBE_TOKENS, :])
    return error <= TOLERANCE.get(states.dtype, COARSE_TOLERANCE)
