# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Exact masks for scattered rows, and attention that does not pay for what they hide.

When only some tokens flow through a layer, no kernel's built-in causal mask fits: aligned at the bottom right it lets
a row see tokens behind it. So each row carries its own line of the mask, cut out of the mask that the model made for
all rows (padding and windows included), or built from the rows' columns where the model left it out.

`RowMask` is such a mask, a boolean tensor that any code may use. Handed to `scaled_dot_product_attention` it also does
the work: sorted rows are taken in blocks, and a block reads keys only where one of its rows may look.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.nn.functional import scaled_dot_product_attention

BLOCK_QUERIES = 256  # queries per block, heads of a group counted; fewer waste less, more fill the kernels better


def row_mask(
    model_mask: Tensor | BlockMask | None, rows: Tensor, past: int, keys: int, implementation: str
) -> Tensor | BlockMask:
    """The mask of some rows, for the attention implementation that the model uses.

    Args:
        model_mask: what the model passes to the layer for all its rows, `[batch, heads or 1, rows, keys]`, boolean
            (True: may look) or additive; a block mask for flex; None where the model relies on a causal kernel.
        rows: `[batch, kept]`, sorted places of the kept rows among the new tokens.
        past: keys in the cache before the new tokens.
        keys: all keys, past and new.
        implementation: the model's attention implementation, such as `"sdpa"`.

    Returns:
        `[batch, heads or 1, kept, keys]`: a `RowMask` for sdpa, an additive mask for eager, a block mask for flex, a
        boolean one otherwise.
    """
    if isinstance(model_mask, BlockMask):
        return _cut_blocks(model_mask, rows, keys)
    mask = local_mask(rows, past, keys, None) if model_mask is None else _cut(model_mask, rows)
    if implementation == "sdpa":
        return RowMask.of(mask, rows[0] + past if model_mask is None and rows.shape[0] == 1 else None)
    if implementation == "eager" and model_mask is None:  # a boolean mask that a model made is what it wants
        return torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, torch.finfo(torch.float32).min)
    return mask


def local_mask(rows: Tensor, past: int, keys: int, window: int | None) -> Tensor:
    """Which keys each row sees where nothing is padding.

    Args:
        rows: `[batch, kept]`, places among the new tokens.
        past: keys before the new tokens.
        keys: all keys.
        window: how many keys a row sees at most, its own included; None: all before it.

    Returns:
        `[batch, 1, kept, keys]` boolean.
    """
    columns, places = torch.arange(keys, device=rows.device), (rows + past)[:, None, :, None]
    return columns <= places if window is None else (columns <= places) & (columns > places - window)


def looks_ahead(model_mask: Any, row: int, columns: slice, tokens: int) -> bool:
    """Whether some of the new tokens see one that stands behind them.

    Args:
        model_mask: what the model passes to a layer for all its rows, see `row_mask`.
        row: the batch entry.
        columns: which tokens.
        tokens: how many new ones there are.

    Returns:
        True for a block mask too, of which it is not known; False where the model relies on a causal kernel.
    """
    if isinstance(model_mask, BlockMask):
        return True
    if not isinstance(model_mask, Tensor) or model_mask.dim() != 4:
        return False
    lines = model_mask[row if model_mask.shape[0] > 1 else 0, :, columns, -tokens:]
    visible = lines if lines.dtype == torch.bool else lines > torch.finfo(lines.dtype).min / 2
    return bool(visible.triu(columns.start + 1).any())


def _cut_blocks(model_mask: BlockMask, rows: Tensor, keys: int) -> BlockMask:
    """The same mask, asked at the rows' places."""
    places = rows.to(model_mask.kv_num_blocks.device)

    def at_rows(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return model_mask.mask_mod(batch, head, places[batch, row], key)

    return create_block_mask(at_rows, rows.shape[0], None, rows.shape[1], keys, device=places.device)


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
        bias: additive mask `[batch or 1, heads or 1, queries, keys]` in float32; None where every row sees every key.
    """

    rows: slice
    keys: slice
    bias: Tensor | None


class RowMask(Tensor):
    """A boolean or additive mask `[batch, heads or 1, rows, keys]` that attends by blocks of rows.

    Every operation but `scaled_dot_product_attention` sees a plain tensor.

    Attributes:
        group: how many query heads share a key head, where transformers repeats the keys for them; 1 if it does not.
            The heads of a group are folded into rows, so that a block reads each key once.
    """

    group: int
    _columns: list[int] | None
    _blocks: dict[int, list[RowBlock]]

    @classmethod
    def of(cls, mask: Tensor, columns: Tensor | None = None) -> "RowMask":
        """Wrap a mask; no copy.

        Args:
            mask: `[batch, heads or 1, rows, keys]`.
            columns: `[rows]`, if each row sees exactly the keys up to its own column: saves reading the mask.

        Returns:
            The same mask, which attends by blocks.
        """
        wrapped = mask.as_subclass(cls)
        wrapped.group, wrapped._blocks = 1, {}
        wrapped._columns = None if columns is None else columns.tolist()
        return wrapped

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Take over attention; hand everything else to plain tensors."""
        with torch._C.DisableTorchFunctionSubclass():
            if func is scaled_dot_product_attention:
                return _attend(*args, **(kwargs or {}))
            if func is Tensor.to:
                return args[0]._to(*args[1:], **(kwargs or {}))
            return func(*args, **(kwargs or {}))

    def _to(self, *args: Any, **kwargs: Any) -> Tensor:
        """The same mask elsewhere: accelerate brings the arguments of a layer to where its weights are."""
        moved = self.as_subclass(Tensor).to(*args, **kwargs)
        if moved.device == self.device and moved.dtype == self.dtype:
            return self
        mask = RowMask.of(moved)
        mask.group, mask._columns = self.group, self._columns
        return mask

    def blocks(self, group: int) -> list[RowBlock]:
        """The blocks of this mask, found once and kept.

        Args:
            group: query heads that are folded into rows, so that each row of the mask stands for that many queries.

        Returns:
            The blocks, in order; together they hold every row once.
        """
        if group not in self._blocks:
            step = max(1, BLOCK_QUERIES // group)
            with torch._C.DisableTorchFunctionSubclass():
                plain = self.as_subclass(Tensor)
                cut = _read_blocks(plain, step, group) if self._columns is None else self._causal_blocks(step, group)
            self._blocks[group] = cut
        return self._blocks[group]

    def _causal_blocks(self, step: int, group: int) -> list[RowBlock]:
        """Blocks of rows that see all keys up to their own column; runs of neighbours share one bias."""
        columns, blocks, diagonal = self._columns or [], [], None
        for start in range(0, len(columns), step):
            block = columns[start : start + step]
            rows, keys = slice(start, start + len(block)), slice(0, block[-1] + 1)
            if len(block) == step and block[-1] - block[0] == step - 1:
                diagonal = _diagonal(step, group, columns[-1] + 1, self.device) if diagonal is None else diagonal
                bias = diagonal[..., diagonal.shape[-1] - keys.stop :]
            else:
                places = torch.tensor(block, device=self.device)
                seen = torch.arange(keys.stop, device=self.device) <= places[:, None]
                bias = _folded(_additive(seen)[None, None], group)
            blocks.append(RowBlock(rows, keys, bias))
        return blocks


def _diagonal(rows: int, group: int, keys: int, device: torch.device) -> Tensor:
    """Bias of neighbouring rows of which the last sees all keys: `[1, 1, group * rows, keys]`."""
    behind = torch.arange(keys, device=device) - torch.arange(keys - rows, keys, device=device)[:, None]
    return _folded(_additive(behind <= 0)[None, None], group)


def _read_blocks(mask: Tensor, step: int, group: int) -> list[RowBlock]:
    """Cut a mask `[batch, heads or 1, rows, keys]` into blocks with the keys that one of their rows sees."""
    visible = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    blocks = []
    for start in range(0, mask.shape[2], step):
        rows = slice(start, min(start + step, mask.shape[2]))
        seen = visible[:, :, rows].flatten(0, 2).any(0).nonzero().flatten()
        keys = slice(int(seen[0]), int(seen[-1]) + 1) if len(seen) else slice(0, mask.shape[3])
        part = mask[:, :, rows, keys]
        bias = None if visible[:, :, rows, keys].all() else _folded(_additive(part), group)
        blocks.append(RowBlock(rows, keys, bias))
    return blocks


def _additive(mask: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, float("-inf"))


def _folded(bias: Tensor, group: int) -> Tensor:
    """One line of the bias for each query of a group: `[batch, 1, group * rows, keys]`."""
    return bias.repeat(1, 1, group, 1) if group > 1 else bias.contiguous()


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: RowMask, dropout: float = 0.0, scale: float | None = None
) -> Tensor:
    """Attention of scattered rows, block by block.

    Args:
        query: `[batch, heads, rows, head_dim]`.
        key: `[batch, kv_heads, keys, head_dim]`; `heads` is `mask.group` times `kv_heads`.
        value: `[batch, kv_heads, keys, value_dim]`.
        mask: which keys each row sees.
        dropout: share of the weights that is dropped.
        scale: of the scores; None is one over the root of `head_dim`.

    Returns:
        `[batch, heads, rows, value_dim]`.
    """
    heads, group = query.shape[1], mask.group if mask.shape[1] == 1 else 1
    output = query.new_empty((*query.shape[:3], value.shape[-1]))
    for block in mask.blocks(group):
        part = query[:, :, block.rows].reshape(query.shape[0], heads // group, -1, query.shape[3])
        bias = None if block.bias is None else block.bias.to(query.dtype)
        done = scaled_dot_product_attention(
            part,
            key[:, :, block.keys],
            value[:, :, block.keys],
            bias,
            dropout,
            scale=scale,
            enable_gqa=part.shape[1] != key.shape[1],
        )
        output[:, :, block.rows] = done.reshape(query.shape[0], heads, -1, value.shape[-1])
    return output


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: RowMask,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`scaled_dot_product_attention` with a `RowMask`."""
    heads, group = query.shape[1], attn_mask.group
    if attn_mask.shape[2] == 1:  # one line for all queries: transformers has folded the heads of a group into rows
        plain = attn_mask.as_subclass(Tensor)
        return scaled_dot_product_attention(query, key, value, plain, dropout_p, scale=scale, enable_gqa=enable_gqa)
    if group > 1 and attn_mask.shape[1] == 1 and key.shape[1] == heads:
        key, value = key[:, ::group], value[:, ::group]  # undo the repetition
    return attend(query, key, value, attn_mask, dropout_p, scale)
