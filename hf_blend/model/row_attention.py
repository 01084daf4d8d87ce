# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Attention of scattered rows, block by block, that does not pay for what their mask hides.

On a CPU a long block is attended in two steps: without a mask over the keys that all its rows see, then over those at
which they differ. The fused kernel gives the logarithm of each row's sum of weights, by which the two are put
together. So no mask is wider than the columns that a block spans, and most of the work needs none.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .row_lines import CausalLines, RowBlock, RowLines

_fused: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)


def attend(
    query: Tensor, key: Tensor, value: Tensor, lines: RowLines, dropout: float = 0.0, scale: float | None = None
) -> Tensor:
    """Attention of scattered rows.

    Shapes: query `[batch, heads, rows, head_dim]`, key `[batch, kv_heads, keys, head_dim]`, value `[batch, kv_heads,
    keys, value_dim]` → `[batch, heads, rows, value_dim]`.
    """
    if len(lines.blocks) == 1:
        return _joined(_at_once(query, key, value, lines, lines.blocks[0], dropout, scale)).transpose(1, 2)
    out = query.new_empty((query.shape[0], query.shape[2], query.shape[1], value.shape[-1]))
    spans = lines.spans if isinstance(lines, CausalLines) and _gives_sums(query, key, value, dropout) else []
    for block in spans or lines.blocks:
        given = query[:, :, block.rows], key, value, lines, block
        out[:, block.rows] = _joined(_in_two(*given, scale) if spans else _at_once(*given, dropout, scale))
    return out.transpose(1, 2)


def _joined(done: Tensor) -> Tensor:
    """`[batch, kv_heads, group, rows, value_dim]` as `[batch, rows, heads, value_dim]`."""
    batch, kv_heads, group, rows, width = done.shape
    return done.permute(0, 3, 1, 2, 4).reshape(batch, rows, kv_heads * group, width)


def _gives_sums(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> bool:
    """Whether the fused kernel can be asked for its sums of weights: not where gradients go through them."""
    is_plain = query.device.type == "cpu" and not dropout and not query.requires_grad and not key.requires_grad
    return _fused is not None and is_plain and query.shape[-1] == value.shape[-1]


def _at_once(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lines: RowLines,
    block: RowBlock,
    dropout: float,
    scale: float | None,
) -> Tensor:
    """Attention of one block, `[batch, kv_heads, group, rows, value_dim]`; keys are not repeated for a group."""
    if (block.keys.start, block.keys.stop) != (0, key.shape[2]):
        key, value = key[:, :, block.keys], value[:, :, block.keys]
    batch, heads, rows, width = query.shape
    kv_heads = key.shape[1]
    group = heads // kv_heads
    if is_shared(key) and is_shared(value) and lines.shape[1] == 1:
        return _over_one(query, key[:1], value[:1], lines.bias(block, query.dtype, group), dropout, scale)
    if group == 1 or lines.shape[1] > 1:
        bias = lines.bias(block, query.dtype)
        done = scaled_dot_product_attention(query, key, value, bias, dropout, scale=scale, enable_gqa=group > 1)
        return done.view(batch, kv_heads, group, rows, -1)
    if batch == 1:  # one entry for each key head; nothing is copied
        bias = lines.bias(block, query.dtype)
        return scaled_dot_product_attention(*_by_key_head(query, key, value), bias, dropout, scale=scale)[None]
    query = query.reshape(batch, kv_heads, group * rows, width)  # the heads of a group one behind the other, as rows
    bias = lines.bias(block, query.dtype, group)
    done = scaled_dot_product_attention(query, key, value, bias, dropout, scale=scale)
    return done.view(batch, kv_heads, group, rows, -1)


def is_shared(states: Tensor) -> bool:
    """Whether the entries of a batch, `[batch, kv_heads, keys, width]`, are the same memory."""
    return states.shape[0] > 1 and states.stride(0) == 0


def _over_one(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, dropout: float, scale: float | None) -> Tensor:
    """A batch over one entry's keys: all its queries are rows of that entry, so that a key is read once for all.

    Attention over a shared prefix as in Hydragen (https://arxiv.org/abs/2402.05099), section 3.2.
    Differs: what only one sequence has is among the same keys and hidden from the others, so nothing is put together.
    """
    (batch, heads, rows, width), kv_heads = query.shape, key.shape[1]
    folded = query.reshape(batch, kv_heads, -1, width).transpose(0, 1).reshape(1, kv_heads, -1, width)
    bias = bias.reshape(1, 1, folded.shape[2], key.shape[2])
    done = scaled_dot_product_attention(folded, key, value, bias, dropout, scale=scale)
    return done.view(kv_heads, batch, heads // kv_heads, rows, -1).transpose(0, 1)


def _in_two(
    query: Tensor, key: Tensor, value: Tensor, lines: RowLines, block: RowBlock, scale: float | None
) -> Tensor:
    """As `_at_once`, for one batch entry: the keys that all rows see, and the rest, from the first row's column on."""
    shared, own = slice(0, block.shared), slice(block.shared, block.keys.stop)
    bias = None if block.is_run else lines.bias(block, query.dtype)
    given = _by_key_head(query, key[:, :, own], value[:, :, own])
    done, sums = _fused(*given, 0.0, block.is_run, attn_mask=bias, scale=scale)
    if block.shared:
        group, rows = done.shape[1:3]
        folded = query.reshape(1, key.shape[1], group * rows, query.shape[3])
        before, sums_before = _fused(folded, key[:, :, shared], value[:, :, shared], scale=scale)
        share = torch.sigmoid(sums_before.view(-1, group, rows) - sums)[..., None]
        done = torch.lerp(done.float(), before.view(done.shape).float(), share.float())
    return done[None]


def _by_key_head(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One batch entry as one entry for each key head, its queries as heads that share it; views."""
    heads, (kv_heads, keys) = query.shape[1], key.shape[1:3]
    query = query.view(kv_heads, heads // kv_heads, *query.shape[2:])
    spread = (states.transpose(0, 1).expand(-1, heads // kv_heads, keys, -1) for states in (key, value))
    return (query, *spread)
