# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Exact masks for scattered rows, and attention that skips the keys that they hide.

When a layer computes only some tokens, no kernel's causal mask fits: aligned at the bottom right it lets a row see
tokens behind it. So each row has its own line of the mask. It is cut out of the mask that the model made for all rows
(padding and windows included), or made from the rows' columns where the model made none.

`RowLines` are these lines. They reach the registered attention function as a keyword (`attention`), and attend there
by blocks of sorted rows; a block reads no keys that all its rows hide. Nothing has rows × keys entries, unless a layer
does not hand the keyword on and is given `plain()` instead.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.nn.functional import scaled_dot_product_attention

from ..errors import UnsupportedModelError

BLOCK_ROWS = (64, 1024)  # rows per block on a CPU and on a GPU; fewer look at less in vain, more fill the kernels
SMALL_MASK = (1 << 16, 1 << 18)  # rows x keys up to which one block is faster than several, on a CPU and on a GPU
BLOCK_BYTES = 32 << 20  # of the additive mask of one block
KEPT_BYTES = 32 << 20  # of additive masks that are kept for all layers; larger ones are made where they are used
SPECIAL = ("position_bias", "softcap", "s_aux", "indices")  # arguments of attention that blocks do not take

AttentionFn = Callable[..., tuple[Tensor, Tensor | None]]  # what an attention function of transformers is


class RowBlock(NamedTuple):
    """Neighbouring rows, numbered as in the mask, and the keys that at least one of them sees."""

    rows: slice
    keys: slice


class RowLines(ABC):
    """The lines of a mask `[batch, heads or 1, rows, keys]`, boolean or additive."""

    is_causal = False  # rows see all keys up to their columns, which are on the host

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        self.dtype = dtype
        self.device = device
        self._biases: dict[tuple[Any, ...], Tensor] = {}

    @abstractmethod
    def cut(self, rows: slice, keys: slice) -> Tensor:
        """The mask of some rows and keys, `[batch, heads or 1, rows, keys]`, in `dtype`."""

    @abstractmethod
    def to(self, device: torch.device, **_: Any) -> "RowLines":
        """The same lines on another device: accelerate brings a layer's arguments to where its weights are."""

    def plain(self) -> Tensor:
        """The whole mask."""
        return self.cut(slice(0, self.shape[2]), slice(0, self.shape[3]))

    def attend(
        self, stock: AttentionFn, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, _: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of the rows, in the place of a stock function of transformers and with its arguments."""
        special = [name for name in SPECIAL if kwargs.get(name) is not None]
        implementation = module.config._attn_implementation
        if special and is_flash(implementation):
            raise UnsupportedModelError(
                f"attention is {implementation} with {' and '.join(special)}, but scattered rows go through sdpa, "
                "which has none. Load the model with attn_implementation='eager'."
            )
        if special:
            return stock(module, query, key, value, self.plain(), **kwargs)
        output = attend(query, key, value, self, kwargs.get("dropout", 0.0), kwargs.get("scaling"))
        return output.transpose(1, 2).contiguous(), None

    @cached_property
    def blocks(self) -> list[RowBlock]:
        """Blocks in order; together they hold every row once."""
        rows, keys = self.shape[2:]
        on_gpu = self.device.type == "cuda"
        if rows * keys <= SMALL_MASK[on_gpu]:  # without waiting for the device
            return [RowBlock(slice(0, rows), slice(0, keys))]
        step = min(BLOCK_ROWS[on_gpu], max(64, BLOCK_BYTES // (4 * keys)))
        cut = [slice(start, min(start + step, rows)) for start in range(0, rows, step)]
        return [RowBlock(block, seen) for block, seen in zip(cut, self._seen_keys(cut), strict=True)]

    def bias(self, block: RowBlock, dtype: torch.dtype, repeats: int = 1) -> Tensor:
        """The additive mask of a block, `[batch or 1, heads or 1, repeats * rows, keys]`."""
        key = (block.rows.start, block.rows.stop, dtype, repeats)
        if key in self._biases:
            return self._biases[key]
        lines = self.cut(block.rows, block.keys)
        if lines.dtype == torch.bool:
            width = lines.shape[3]
            padded = -(-width // 8) * 8  # kernels on a GPU read lines that begin at multiples of 16 bytes
            made = torch.zeros((*lines.shape[:3], padded), dtype=dtype, device=lines.device)
            made = made[..., :width].masked_fill_(lines.logical_not(), float("-inf"))
        else:
            made = lines.to(dtype)
        if repeats > 1:
            made = made.repeat(1, 1, repeats, 1)
        if sum(bias.nbytes for bias in self._biases.values()) + made.nbytes <= KEPT_BYTES:
            self._biases[key] = made
        return made

    def _seen_keys(self, cut: list[slice]) -> list[slice]:
        """By block, from the first to the last of the keys that its rows see; waits for the device once."""
        every = slice(0, self.shape[3])
        seen_by_block = []
        for rows in cut:
            seen_by_block.append(_visible(self.cut(rows, every)).flatten(0, 2).any(0))
        seen = torch.stack(seen_by_block).to(torch.uint8)
        first = seen.argmax(1)
        end = seen.shape[1] - seen.flip(1).argmax(1)
        ends = torch.stack((first, end, seen.amax(1)), dim=1).tolist()
        return [slice(start, stop) if some else every for start, stop, some in ends]


class MadeLines(RowLines):
    """The lines of a mask that the model made: all of them, or those of some rows."""

    def __init__(self, mask: Tensor, rows: Tensor | None = None) -> None:
        """Take a mask `[batch or 1, heads or 1, tokens, keys]` and rows `[batch, kept]`; no copy."""
        batch, count = (mask.shape[0], mask.shape[2]) if rows is None else rows.shape
        super().__init__((batch, mask.shape[1], count, mask.shape[3]), mask.dtype, mask.device)
        self._mask = mask
        self._rows = None if rows is None else rows.to(mask.device)

    def cut(self, rows: slice, keys: slice) -> Tensor:
        """See `RowLines.cut`; a view, where all rows are there."""
        if self._rows is None:
            return self._mask[:, :, rows, keys]
        mask = self._mask[..., keys]
        index = self._rows[:, rows]
        if index.shape[0] == 1:
            return mask.index_select(2, index[0])
        return torch.take_along_dim(mask.expand(index.shape[0], *mask.shape[1:]), index[:, None, :, None], dim=2)

    def to(self, device: torch.device, **_: Any) -> RowLines:
        """See `RowLines.to`."""
        return self if device == self.device else MadeLines(self._mask.to(device), self._rows)


class LocalLines(RowLines):
    """The lines of a causal mask: each row sees the keys up to its own column, but for padding, within a window."""

    def __init__(
        self,
        columns: Tensor,
        keys: int,
        window: int | None = None,
        real: Tensor | None = None,
        numbers: Callable[[], Sequence[int]] | None = None,
    ) -> None:
        """Describe the lines.

        Args:
            columns: of the rows, `[batch, rows]`.
            keys: how many there are.
            window: how many keys a row sees; None: all up to its own.
            real: where there is no padding, `[batch, …]`.
            numbers: gives the columns as numbers; only for one entry without window and padding.
        """
        super().__init__((columns.shape[0], 1, columns.shape[1], keys), torch.bool, columns.device)
        self._columns = columns
        self._window = window
        self._real = real
        self._numbers = numbers
        self.is_causal = numbers is not None

    def cut(self, rows: slice, keys: slice) -> Tensor:
        """See `RowLines.cut`."""
        columns = torch.arange(keys.start, keys.stop, device=self.device)
        ends = self._columns[:, None, rows, None]
        seen = columns <= ends
        if self._window is not None:
            seen &= columns > ends - self._window
        if self._real is not None:
            real = self._real[:, -self.shape[3] :][:, None, None, keys]
            seen = seen & real.to(device=seen.device, dtype=torch.bool)
        return seen

    def to(self, device: torch.device, **_: Any) -> RowLines:
        """See `RowLines.to`."""
        if device == self.device:
            return self
        return LocalLines(self._columns.to(device), self.shape[3], self._window, self._real, self._numbers)

    def _seen_keys(self, cut: list[slice]) -> list[slice]:
        if self._numbers is None:
            return super()._seen_keys(cut)
        numbers = self._numbers()
        return [slice(0, numbers[rows.stop - 1] + 1) for rows in cut]


def is_flash(implementation: str) -> bool:
    """Return True for an implementation of flash attention, which transformers knows by its name too."""
    return "flash" in implementation


def _visible(mask: Tensor) -> Tensor:
    """A mask, boolean or additive, as a boolean one."""
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


def attend(
    query: Tensor, key: Tensor, value: Tensor, lines: RowLines, dropout: float = 0.0, scale: float | None = None
) -> Tensor:
    """Attention of scattered rows.

    Shapes: query `[batch, heads, rows, head_dim]`, key `[batch, kv_heads, keys, head_dim]`, value `[batch, kv_heads,
    keys, value_dim]` → `[batch, heads, rows, value_dim]`.
    """
    outputs = []
    for block in lines.blocks:
        keys, values = key, value
        if (block.keys.start, block.keys.stop) != (0, key.shape[2]):
            keys, values = key[:, :, block.keys], value[:, :, block.keys]
        done = _attend_block(query[:, :, block.rows], keys, values, lines, block, dropout, scale)
        outputs.append(done.permute(0, 3, 1, 2, 4).flatten(2, 3))
    rows = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
    return rows.transpose(1, 2)


def _attend_block(
    query: Tensor, key: Tensor, value: Tensor, lines: RowLines, block: RowBlock, dropout: float, scale: float | None
) -> Tensor:
    """Attention of one block, `[batch, kv_heads, group, rows, value_dim]`; keys are not repeated for a group."""
    batch, heads, rows, width = query.shape
    kv_heads = key.shape[1]
    group = heads // kv_heads
    is_shared = batch > 1 and key.stride(0) == value.stride(0) == 0  # the entries of the batch are the same memory
    if is_shared and lines.shape[1] == 1:
        return _attend_shared(query, key[:1], value[:1], lines.bias(block, query.dtype, group), dropout, scale)
    if group == 1 or lines.shape[1] > 1:
        bias = lines.bias(block, query.dtype)
        done = scaled_dot_product_attention(query, key, value, bias, dropout, scale=scale, enable_gqa=group > 1)
        return done.view(batch, kv_heads, group, rows, -1)
    if batch == 1:  # one entry for each key head; nothing is copied
        bias = lines.bias(block, query.dtype)
        by_head = query.view(kv_heads, group, rows, width)
        keys = key.transpose(0, 1).expand(-1, group, -1, -1)
        values = value.transpose(0, 1).expand(-1, group, -1, -1)
        return scaled_dot_product_attention(by_head, keys, values, bias, dropout, scale=scale)[None]
    folded = query.reshape(batch, kv_heads, group * rows, width)  # the heads of a group one behind the other, as rows
    bias = lines.bias(block, query.dtype, group)
    done = scaled_dot_product_attention(folded, key, value, bias, dropout, scale=scale)
    return done.view(batch, kv_heads, group, rows, -1)


def _attend_shared(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, dropout: float, scale: float | None
) -> Tensor:
    """A batch over one entry's keys: all its queries are rows of that entry, so that a key is read once for all.

    Attention over a shared prefix as in Hydragen (https://arxiv.org/abs/2402.05099), section 3.2.
    Differs: what only one sequence has is among the same keys and hidden from the others, so nothing is put together.
    """
    (batch, heads, rows, width), kv_heads = query.shape, key.shape[1]
    folded = query.reshape(batch, kv_heads, -1, width).transpose(0, 1).reshape(1, kv_heads, -1, width)
    bias = bias.reshape(1, 1, folded.shape[2], key.shape[2])
    done = scaled_dot_product_attention(folded, key, value, bias, dropout, scale=scale)
    return done.view(kv_heads, batch, heads // kv_heads, rows, -1).transpose(0, 1)


def row_lines(
    model_mask: Tensor | None,
    rows: Tensor,
    past: int,
    keys: int,
    numbers: Callable[[], Sequence[int]] | None = None,
    window: int | None = None,
) -> RowLines:
    """The lines of some rows of a model's mask.

    Shapes: model_mask `[batch, heads or 1, rows, keys]` or `[batch, keys]`, rows `[batch, kept]`.
    """
    if model_mask is not None and model_mask.dim() == 4:
        return MadeLines(model_mask, rows)
    if model_mask is not None or window is not None or rows.shape[0] > 1:
        return LocalLines(rows + past, keys, window, model_mask)
    known = numbers or rows[0].tolist
    if not past:
        return LocalLines(rows, keys, numbers=known)
    return LocalLines(rows + past, keys, numbers=lambda: [number + past for number in known()])


def cut_block_mask(model_mask: BlockMask, rows: Tensor, keys: int) -> BlockMask:
    """The mask of flex attention at some rows, `[batch, kept]`."""
    index = rows.to(model_mask.kv_num_blocks.device)

    def at_rows(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return model_mask.mask_mod(batch, head, index[batch, row], key)

    return create_block_mask(at_rows, rows.shape[0], None, rows.shape[1], keys, device=index.device)
