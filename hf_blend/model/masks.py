# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Exact masks for scattered rows, and attention that does not pay for what they hide.

When only some tokens flow through a layer, no kernel's built-in causal mask fits: aligned at the bottom right it lets
a row see tokens behind it. So each row carries its own line of the mask, cut out of the mask that the model made for
all rows (padding and windows included), or built from the rows' columns where the model left it out.

`RowMask` is such a mask, a tensor to all code. Handed to `scaled_dot_product_attention` it also does the work: sorted
rows are taken in blocks, and a block reads keys only where one of its rows may look.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._pytree import tree_map

BLOCK_ROWS = (128, 1024)  # rows per block on a CPU and on a GPU; fewer look at less in vain, more fill the kernels
SMALL_MASK = 1 << 18  # rows x keys up to which one block is faster than several
KEPT_BYTES = 32 << 20  # of additive masks that are kept for all layers; larger ones are made where they are used


def row_mask(
    model_mask: Tensor | BlockMask | None,
    rows: Tensor,
    past: int,
    keys: int,
    implementation: str,
    numbers: Callable[[], list[int]] | None = None,
) -> Tensor | BlockMask:
    """The mask of some rows, for the attention implementation that the model uses.

    Args:
        model_mask: what the model passes to the layer for all its rows, `[batch, heads or 1, rows, keys]`, boolean
            (True: may look) or additive; a block mask for flex; None where the model relies on a causal kernel.
        rows: `[batch, kept]`, sorted places of the kept rows among the new tokens.
        past: keys in the cache before the new tokens.
        keys: all keys, past and new.
        implementation: the model's attention implementation, such as `"sdpa"`.
        numbers: gives the rows of a single batch entry to the host; asked only where the work is done by blocks.

    Returns:
        `[batch, heads or 1, kept, keys]`: a `RowMask` for sdpa, an additive mask for eager, a block mask for flex, a
        boolean one otherwise.
    """
    if isinstance(model_mask, BlockMask):
        return _cut_blocks(model_mask, rows, keys)
    if implementation == "sdpa" and model_mask is None and rows.shape[0] == 1:
        known = rows[0].tolist if numbers is None else numbers
        return RowMask.causal(rows + past, keys, lambda: [number + past for number in known()])
    mask = local_mask(rows, past, keys, None) if model_mask is None else _cut(model_mask, rows)
    if implementation == "sdpa":
        return RowMask.of(mask)
    if implementation == "eager" and model_mask is None:  # a boolean mask that a model made is what it expects
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
    """

    rows: slice
    keys: slice


class RowMask(Tensor):
    """A boolean or additive mask `[batch, heads or 1, rows, keys]` that attends by blocks of rows.

    Every operation but `scaled_dot_product_attention` sees a plain tensor. A mask that says no more than "up to the
    row's own column" has no memory of its own: a plain tensor is made of it only where some operation asks for one.

    Attributes:
        group: how many query heads share a key head, where transformers repeats the keys for them; 1 if it does not.
    """

    group: int
    _dense: Tensor | None  # the mask; None: made of `_columns` where it is asked for
    _columns: Tensor | None  # `[1, rows]`, each row sees the keys up to its own column
    _ask: Callable[[], list[int]] | None  # gives the same to the host
    _blocks: list[RowBlock] | None
    _biases: dict[tuple[int, torch.dtype, int], Tensor]

    @classmethod
    def of(cls, mask: Tensor) -> "RowMask":
        """Wrap a mask `[batch, heads or 1, rows, keys]`; no copy."""
        return cls._wrap(mask.shape, mask, None, None)

    @classmethod
    def causal(cls, columns: Tensor, keys: int, numbers: Callable[[], list[int]] | None = None) -> "RowMask":
        """A mask by which each row sees exactly the keys up to its own column.

        Args:
            columns: `[1, rows]`, sorted.
            keys: how many there are.
            numbers: gives the same columns to the host.

        Returns:
            A boolean mask `[1, 1, rows, keys]`.
        """
        return cls._wrap((1, 1, columns.shape[1], keys), None, columns, numbers or columns[0].tolist)

    @classmethod
    def _wrap(cls, shape: Any, dense: Tensor | None, columns: Tensor | None, ask: Any) -> "RowMask":
        like: Any = columns if dense is None else dense
        dtype = torch.bool if dense is None else dense.dtype
        wrapped: RowMask = Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=like.device)
        wrapped.group, wrapped._blocks, wrapped._biases = 1, None, {}
        wrapped._dense, wrapped._columns, wrapped._ask = dense, columns, ask
        return wrapped

    @property
    def is_causal(self) -> bool:
        """Whether each row sees exactly the keys up to its own column."""
        return self._dense is None

    @cached_property
    def _numbers(self) -> list[int]:
        return [] if self._ask is None else self._ask()

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
            if getattr(func, "__name__", "") == "__get__" or func in _ASKING:
                return func(*args, **(kwargs or {}))
            return func(*tree_map(_as_plain, args), **tree_map(_as_plain, kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What comes past `__torch_function__`, such as from C++: plain tensors there too."""
        return func(*tree_map(_as_plain, args), **tree_map(_as_plain, kwargs or {}))

    def plain(self) -> Tensor:
        """The mask as a tensor of its own."""
        if self._dense is not None:
            return self._dense
        columns: Any = self._columns
        return (torch.arange(self.shape[3], device=columns.device) <= columns[..., None])[:, None]

    def _to(self, *args: Any, **kwargs: Any) -> Tensor:
        """The same mask elsewhere: accelerate brings the arguments of a layer to where its weights are."""
        if self._dense is None:
            moved = torch.empty(0, dtype=torch.bool, device=self.device).to(*args, **kwargs)
            if moved.dtype != torch.bool:
                return self.plain().to(*args, **kwargs)
            mask = RowMask.causal(self._columns.to(moved.device), self.shape[3], self._ask)  # type: ignore[union-attr]
        else:
            mask = RowMask.of(self._dense.to(*args, **kwargs))
        if mask.device == self.device and mask.dtype == self.dtype:
            return self
        mask.group, mask._blocks = self.group, self._blocks
        return mask

    def blocks(self) -> list[RowBlock]:
        """The blocks of this mask, found once and kept: in order, together they hold every row once."""
        if self._blocks is None:
            rows, keys = self.shape[2], self.shape[3]
            step = BLOCK_ROWS[self.device.type == "cuda"] if rows * keys > SMALL_MASK else rows
            cut = [slice(start, min(start + step, rows)) for start in range(0, rows, step)]
            if self._dense is None:
                ends = [(0, self._numbers[one.stop - 1] + 1) for one in cut]
            else:
                ends = self._read_ends(cut)
            self._blocks = [RowBlock(rows, slice(*end)) for rows, end in zip(cut, ends, strict=True)]
        return self._blocks

    def bias(self, number: int, dtype: torch.dtype, repeats: int = 1) -> Tensor:
        """The additive mask of a block, `[batch or 1, heads or 1, repeats * rows, keys]`.

        Args:
            number: of the block.
            dtype: of the queries.
            repeats: how often the rows stand one behind the other.

        Returns:
            The bias; it is kept, unless all together would take much memory.
        """
        place, block = (number, dtype, repeats), self.blocks()[number]
        if place not in self._biases:
            if repeats == 1 and self._is_run(block):
                return self._diagonal(block, dtype)
            made = self._make_bias(block, dtype)
            made = made.repeat(1, 1, repeats, 1) if repeats > 1 else made
            if self.shape[0] * self.shape[2] * self.shape[3] * repeats * made.element_size() > KEPT_BYTES:
                return made
            self._biases[place] = made
        return self._biases[place]

    def _is_run(self, block: RowBlock) -> bool:
        """Whether the rows of a block are neighbours that see all before them."""
        known, rows = self._numbers, block.rows
        return bool(known) and known[rows.stop - 1] - known[rows.start] == rows.stop - rows.start - 1

    def _diagonal(self, block: RowBlock, dtype: torch.dtype) -> Tensor:
        """The bias of neighbouring rows: the end of one that all runs of as many rows share."""
        rows, keys = block.rows.stop - block.rows.start, self._numbers[-1] + 1
        place = (-rows, dtype, 1)
        if place not in self._biases:
            run = RowMask.causal(torch.arange(keys - rows, keys, device=self.device)[None], keys)
            self._biases[place] = run._make_bias(RowBlock(slice(0, rows), slice(0, keys)), dtype)
        return self._biases[place][..., keys - block.keys.stop :]

    def _make_bias(self, block: RowBlock, dtype: torch.dtype) -> Tensor:
        if self._dense is not None:
            part = self._dense[:, :, block.rows, block.keys]
            if part.dtype != torch.bool:
                return part.to(dtype)
        else:
            columns: Any = self._columns
            part = torch.arange(block.keys.stop, device=columns.device) <= columns[0, block.rows, None]
            part = part[None, None]
        width = part.shape[3]  # kernels on a GPU read lines that begin at multiples of 16 bytes
        lines = torch.zeros((*part.shape[:3], -(-width // 8) * 8), dtype=dtype, device=part.device)[..., :width]
        return lines.masked_fill_(part.logical_not(), float("-inf"))

    def _read_ends(self, cut: list[slice]) -> list[tuple[int, int]]:
        """The first and the end of the keys that one of the rows of each block sees."""
        mask: Any = self._dense
        visible = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
        seen = torch.stack([visible[:, :, rows].flatten(0, 2).any(0) for rows in cut]).to(torch.uint8)
        first, last = seen.argmax(1), seen.shape[1] - seen.flip(1).argmax(1)
        found = torch.stack((first, last, seen.amax(1)), dim=1).tolist()
        return [(start, end) if some else (0, seen.shape[1]) for start, end, some in found]


_ASKING = {Tensor.dim, Tensor.size, Tensor.is_floating_point, Tensor.ndimension, Tensor.numel}


def _as_plain(value: Any) -> Any:
    return value.plain() if isinstance(value, RowMask) else value


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: RowMask, dropout: float = 0.0, scale: float | None = None
) -> Tensor:
    """Attention of scattered rows, block by block.

    Args:
        query: `[batch, heads, rows, head_dim]`.
        key: `[batch, kv_heads, keys, head_dim]`; `heads` is a multiple of `kv_heads`.
        value: `[batch, kv_heads, keys, value_dim]`.
        mask: which keys each row sees.
        dropout: share of the weights that is dropped.
        scale: of the scores; None is one over the root of `head_dim`.

    Returns:
        `[batch, heads, rows, value_dim]`.
    """
    parts = [_attend_block(query, key, value, mask, number, dropout, scale) for number in range(len(mask.blocks()))]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _attend_block(
    query: Tensor, key: Tensor, value: Tensor, mask: RowMask, number: int, dropout: float, scale: float | None
) -> Tensor:
    """Attention of one block; query heads that share a key head go side by side, so that no keys are repeated."""
    block = mask.blocks()[number]
    query, key, value = query[:, :, block.rows], key[:, :, block.keys], value[:, :, block.keys]
    batch, heads, rows, width = query.shape
    kv_heads, keys = key.shape[1:3]
    group = heads // kv_heads
    if group == 1 or mask.shape[1] > 1:
        bias = mask.bias(number, query.dtype)
        return scaled_dot_product_attention(query, key, value, bias, dropout, scale=scale, enable_gqa=group > 1)
    if batch == 1:  # one entry for each key head; nothing is copied
        spread = (states[0][:, None].expand(kv_heads, group, keys, states.shape[3]) for states in (key, value))
        query = query[0].unflatten(0, (kv_heads, group))
        done = scaled_dot_product_attention(query, *spread, mask.bias(number, query.dtype), dropout, scale=scale)
    else:  # the heads of a group one behind the other, as rows
        query = query.reshape(batch, kv_heads, group * rows, width)
        bias = mask.bias(number, query.dtype, group)
        done = scaled_dot_product_attention(query, key, value, bias, dropout, scale=scale)
    return done.reshape(batch, heads, rows, value.shape[-1])


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
        plain = attn_mask.plain()
        return scaled_dot_product_attention(query, key, value, plain, dropout_p, scale=scale, enable_gqa=enable_gqa)
    if group > 1 and attn_mask.shape[1] == 1 and key.shape[1] == heads:
        key, value = key[:, ::group], value[:, ::group]  # undo the repetition
    return attend(query, key, value, attn_mask, dropout_p, scale)
