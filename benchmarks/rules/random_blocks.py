# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Blocks drawn at random: the control that every method must beat at the same share."""

from typing import Any

import torch
from torch import Tensor

from hf_blend.sparse.methods.base import BlockMethod

_ODD = 0x9E3779B1  # Knuth's multiplicative hash
_BITS = 24


class Random(BlockMethod):
    """Hashes the bits of a query and of a block's first key, so the same two always get the same score."""

    def represent(self, keys: Tensor, prepared: Any) -> Tensor:
        """First key, `[batch, kv_heads, blocks, head_dim]`."""
        return keys[:, :, :, 0]

    def score(self, queries: Tensor, blocks: Tensor, prepared: Any) -> Tensor:
        """Uniform over 0 to 1."""
        mixed = _hashed(_hashed(_bits(queries[:, 0, 0])[:, :, None]) ^ _bits(blocks[:, 0])[:, None])
        return (mixed & (2**_BITS - 1)).float() / 2**_BITS


def _bits(states: Tensor) -> Tensor:
    """The bits of `[batch, any, head_dim]` as one number each."""
    return states.float().contiguous().view(torch.int32).long().sum(-1)


def _hashed(numbers: Tensor) -> Tensor:
    mixed = (numbers & 0xFFFFFFFF) * _ODD
    return (mixed ^ (mixed >> 29)) & 0xFFFFFFFF
