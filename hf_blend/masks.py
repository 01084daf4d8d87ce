# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Exact masks for scattered rows, and attention that does not pay for what they hide.

When only some tokens flow through a layer, no kernel's built-in causal mask fits: aligned at the bottom right it lets a
row see tokens behind it. So each row carries its own line of the mask, cut out of the mask that the model made for all
rows (padding and windows included), or built from the rows' columns where the model left it out.

`RowMask` is such a mask, a boolean tensor that any code may use. Handed to `scaled_dot_product_attention` it also does the
work: sorted rows are taken in blocks, and a block reads keys only where one of its rows may look.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

BLOCK_ROWS = 96  # rows per block; smaller wastes less of the triangle, larger fills the kernels better


def row_mask(model_mask: Tensor | None, rows: Tensor, past: int, keys: int, implementation: str) -> Tensor:
    """The mask of some rows, for the attention implementation that the model uses.

    Args:
        model_mask: what the model passes to the layer for all its rows, `[batch, heads or 1, rows, keys]`, boolean
            (True: may look) or additive; None where the model relies on a causal kernel.
        rows: `[batch, kept]`, sorted places of the kept rows among the new tokens.
        past: keys in the cache before the new tokens.
        keys: all keys, past and new.
        implementation: the model's attention implementation, such as `"sdpa"`.

    Returns:
        `[batch, heads or 1, kept, keys]`: a `RowMask` for sdpa, an additive mask for eager, a boolean one otherwise.
    """
    if model_mask is None:
        columns = torch.arange(keys, device=rows.device)
        mask = (columns <= (rows + past).unsqueeze(-1)).unsqueeze(1)
    else:
        mask = _cut(model_mask, rows)
    if implementation == "sdpa":
        return RowMask.of(mask)
    if implementation == "eager" and mask.dtype == torch.bool:
        return torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, torch.finfo(torch.float32).min)
    return mask


def _cut(model_mask: Tensor, rows: Tensor) -> Tensor:
    rows = rows.to(model_mask.device)
    if rows.shape[0] == 1:
        return model_mask.index_select(2, rows[0])
    model_mask = model_mask.expand(rows.shape[0], *model_mask.shape[1:])
    return torch.take_along_dim(model_mask, rows[:, None, :, None], dim=2)


@dataclass(frozen=True)
class RowBlock:
    """Neighbouring rows and the keys that one of them may look at.

    Attributes:
        rows: where the block lies among the kept rows.
        keys: the keys it reads.
        bias: additive mask `[batch, 1, rows, keys]` in float32; None where every row sees every key.
    """

    rows: slice
    keys: slice
    bias: Tensor | None


class RowMask(Tensor):
    """A boolean or additive mask `[batch, heads or 1, rows, keys]` that attends by blocks of rows.

    Every operation but `scaled_dot_product_attention` sees a plain tensor.
    """

    _blocks: list[RowBlock] | None

    @classmethod
    def of(cls, mask: Tensor) -> "RowMask":
        """Wrap a mask, `[batch, heads or 1, rows, keys]`; no copy."""
        wrapped = mask.as_subclass(cls)
        wrapped._blocks = None
        return wrapped

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Take over attention; hand everything else to plain tensors."""
        kwargs = dict(kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            if func is scaled_dot_product_attention:
                return _attend(*args, **kwargs)
            return func(*args, **kwargs)

    def blocks(self) -> list[RowBlock]:
        """The blocks of this mask, found once and kept."""
        if self._blocks is None:
            with torch._C.DisableTorchFunctionSubclass():
                self._blocks = _blocks_of(self.as_subclass(Tensor))
        return self._blocks


def _blocks_of(mask: Tensor) -> list[RowBlock]:
    """Cut a mask `[batch, heads or 1, rows, keys]` into blocks of rows with the keys that they need."""
    visible = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    blocks = []
    for start in range(0, mask.shape[2], BLOCK_ROWS):
        rows = slice(start, min(start + BLOCK_ROWS, mask.shape[2]))
        seen = visible[:, :, rows].flatten(0, 2).any(0).nonzero().flatten()
        keys = slice(int(seen[0]), int(seen[-1]) + 1) if len(seen) else slice(0, mask.shape[3])
        part = visible[:, :, rows, keys]
        bias = None if part.all() else _additive(mask[:, :, rows, keys])
        blocks.append(RowBlock(rows, keys, bias))
    return blocks


def _additive(mask: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.contiguous()
    return torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, float("-inf"))


def _attend(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: RowMask, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:
    """Attention of scattered rows, `[batch, heads, rows, head_dim]`, block by block."""
    if attn_mask.shape[2] == 1:  # one line for all queries: transformers folds the heads of a group into rows
        return scaled_dot_product_attention(
            query, key, value, attn_mask.as_subclass(Tensor), dropout_p, scale=scale, enable_gqa=enable_gqa
        )
    output = query.new_empty((*query.shape[:3], value.shape[-1]))
    for block in attn_mask.blocks():
        bias = None if block.bias is None else block.bias.to(query.dtype)
        output[:, :, block.rows] = scaled_dot_product_attention(
            query[:, :, block.rows], key[:, :, block.keys], value[:, :, block.keys],
            attn_mask=bias, dropout_p=dropout_p, scale=scale, enable_gqa=enable_gqa,
        )
    return output
