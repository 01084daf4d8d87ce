# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What is true, by stock transformers alone: nothing of hf_blend is imported here.

The KV of a chunk is what a `DynamicCache` holds after a forward of sink and chunk through the model as it is at that
moment: in eval mode and outside of autocast, since that is what a chunk's KV is by definition.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

KV = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Truth:
    """The states of one chunk."""

    layers: tuple[KV, ...]
    table: KV


@torch.no_grad()
def stock_kv(model: nn.Module, chunk_prefix_ids: Sequence[int], token_ids: Sequence[int]) -> Truth:
    """Compute a chunk behind its sink, and cut the sink off."""
    ids = torch.tensor([[*chunk_prefix_ids, *token_ids]])
    start = len(chunk_prefix_ids)
    training = {module: module.training for module in model.modules()}
    cache: Any = DynamicCache()
    try:
        model.eval()
        with torch.autocast("cpu", enabled=False):
            model(ids, past_key_values=cache, use_cache=True)
            cos, sin = model.model.rotary_emb(model.model.embed_tokens(ids), torch.arange(ids.shape[1])[None])
    finally:
        for module, mode in training.items():
            module.training = mode
    layers = tuple((one.keys[0, :, start:].clone(), one.values[0, :, start:].clone()) for one in cache.layers)
    return Truth(layers, (cos[0, start:].float().clone(), sin[0, start:].float().clone()))


def is_equal(got: Tensor, expected: Tensor) -> bool:
    """Bit for bit, with NaN equal to itself."""
    if got.dtype != expected.dtype or got.shape != expected.shape:
        return False
    return got.equal(expected) or _bytes(got).equal(_bytes(expected))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
