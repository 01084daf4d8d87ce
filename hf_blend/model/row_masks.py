# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Exact masks for scattered rows, and attention that skips the keys that they hide.

When a layer computes only some tokens, no kernel's causal mask fits: aligned at the bottom right it lets a row see
tokens behind it. So each row has its own line of the mask. It is cut out of the mask that the model made for all rows
(padding and windows included), or made from the rows' columns where the model made none.

`RowMask` is such a mask, a tensor to all code. `scaled_dot_product_attention` and a model's attention function, when
they receive one, attend by blocks of sorted rows, and a block reads no keys that all its rows hide. On a CPU a long
block is attended in two steps: without a mask over the keys that all its rows see, then over those at which they
differ. The fused kernel gives the logarithm of each row's sum of weights, by which the two results are combined.
Nothing has rows × keys entries, unless some code asks for a plain tensor.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._pytree import tree_map

BLOCK_ROWS = (128, 1024)  # rows per block on a CPU and on a GPU; fewer look at less in vain, more fill the kernels
BLOCK_BYTES = 32 << 20  # of the additive mask of one block
SMALL_MASK = 1 << 18  # rows x keys up to which one block is faster than several
KEPT_BYTES = 32 << 20  # of additive masks that are kept for all layers; larger ones are made where they are used
RUN_ROWS = 256  # neighbours from which on a kernel's own causal mask is worth a call
CAUSAL_MASK, CAUSAL_ROWS = (1 << 16, 1 << 19), 48  # on a CPU: rows x keys from and up to which to cut, and into what
SPAN_BLOCKS, SPAN_ROWS = 16, (64, 512)  # scattered rows are cut into so many blocks, or of so many rows


@dataclass(frozen=True)
class RowBlock:
    """Neighbouring rows, and the keys that at least one of them sees.

    Attributes:
        rows: the rows, numbered as in the mask.
        keys: the keys.
        shared: all rows see the keys before this one.
        is_run: the rows are neighbours in the prompt too, so that a causal kernel fits behind the shared keys.
    """

    rows: slice
    keys: slice
    shared: int = 0
    is_run: bool = False


@dataclass(eq=False)
class RowLines(ABC):
    """The lines of a mask `[batch, heads or 1, rows, keys]`."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    _biases: dict[tuple[object, ...], Tensor] = field(default_factory=dict, init=False, repr=False)
    is_causal: bool = field(default=False, init=False)  # rows see all keys up to their columns, which are on the host

    @abstractmethod
    def cut(self, rows: slice, keys: slice) -> Tensor:
        """The mask of some rows and keys, `[batch, heads or 1, rows, keys]`, in `dtype`."""

    def to(self, device: torch.device) -> "RowLines":
        """The same lines on another device."""
        moved, derived = copy(self), ("blocks", "masks", "spans")
        fields = {name: value for name, value in vars(self).items() if name not in derived}
        fields |= {name: value.to(device) for name, value in fields.items() if isinstance(value, Tensor | RowLines)}
        vars(moved).clear()
        vars(moved).update(fields, device=device, _biases={})
        return moved

    def plain(self) -> Tensor:
        """The whole mask."""
        return self.cut(slice(0, self.shape[2]), slice(0, self.shape[3]))

    @cached_property
    def blocks(self) -> list[RowBlock]:
        """Blocks in order; together they hold every row once."""
        (rows, keys), (least, most) = self.shape[2:], CAUSAL_MASK
        step = min(BLOCK_ROWS[self.device.type == "cuda"], max(64, BLOCK_BYTES // (4 * keys)))
        if self.is_causal and self.device.type == "cpu" and least < rows * keys <= most:
            step = CAUSAL_ROWS  # the columns are on the host, so more blocks cost nothing
        elif rows * keys <= SMALL_MASK:  # without waiting for the device
            return [RowBlock(slice(0, rows), slice(0, keys))]
        cut = _steps(0, rows, step)
        return [RowBlock(rows, slice(*end)) for rows, end in zip(cut, self._ends(cut), strict=True)]

    def bias(self, block: RowBlock, dtype: torch.dtype, repeats: int = 1) -> Tensor:
        """The additive mask of a block behind the keys that all its rows see.

        Shape: `[batch or 1, heads or 1, repeats * rows, keys]`.
        """
        key = (block.rows.start, block.rows.stop, block.shared, dtype, repeats)
        if key not in self._biases:
            keys = slice(max(block.keys.start, block.shared), block.keys.stop)
            if self.dtype == torch.bool:
                hidden = self.cut(block.rows, keys).logical_not()
                width = hidden.shape[3]  # kernels on a GPU read lines that begin at multiples of 16 bytes
                lines = torch.zeros((*hidden.shape[:3], -(-width // 8) * 8), dtype=dtype, device=hidden.device)
                made = lines[..., :width].masked_fill_(hidden, float("-inf"))
            else:
                made = self.cut(block.rows, keys).to(dtype)
            made = made.repeat(1, 1, repeats, 1) if repeats > 1 else made
            if sum(bias.nbytes for bias in self._biases.values()) + made.nbytes > KEPT_BYTES:
                return made
            self._biases[key] = made
        return self._biases[key]

    def _ends(self, cut: list[slice]) -> list[tuple[int, int]]:
        """By block, the first and the end of the keys that its rows see; waits for the device once."""
        lines = []
        for rows in cut:
            mask = self.cut(rows, slice(0, self.shape[3]))
            visible = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
            lines.append(visible.flatten(0, 2).any(0))
        seen = torch.stack(lines).to(torch.uint8)
        first, last = seen.argmax(1), seen.shape[1] - seen.flip(1).argmax(1)
        ends = torch.stack((first, last, seen.amax(1)), dim=1).tolist()
        return [(start, end) if some else (0, seen.shape[1]) for start, end, some in ends]


class MadeLines(RowLines):
    """The lines of a mask that the model made: all of them, or those of some rows."""

    def __init__(self, mask: Tensor, rows: Tensor | None = None) -> None:
        """Take a mask `[batch or 1, heads or 1, tokens, keys]`; no copy.

        Shapes: rows `[batch, kept]`.
        """
        batch, count = (mask.shape[0], mask.shape[2]) if rows is None else rows.shape
        super().__init__((batch, mask.shape[1], count, mask.shape[3]), mask.dtype, mask.device)
        self._mask, self._rows = mask, None if rows is None else rows.to(mask.device)

    def cut(self, rows: slice, keys: slice) -> Tensor:
        """See `RowLines.cut`; a view, where all rows are there."""
        if self._rows is None:
            return self._mask[:, :, rows, keys]
        mask, index = self._mask[..., keys], self._rows[:, rows]
        if index.shape[0] == 1:
            return mask.index_select(2, index[0])
        return torch.take_along_dim(mask.expand(index.shape[0], *mask.shape[1:]), index[:, None, :, None], dim=2)


class LocalLines(RowLines):
    """The lines of a causal mask: each row sees the keys up to its own column, but for padding, within a window."""

    def __init__(
        self, columns: Tensor, keys: int, window: int | None = None, real: Tensor | None = None, ask: Any = None
    ) -> None:
        """Describe the lines.

        Args:
            columns: of the rows, `[batch, rows]`.
            keys: how many there are.
            window: how many keys a row sees; None: all up to its own.
            real: where there is no padding, `[batch, …]`.
            ask: gives the columns as numbers; only for one entry without window and padding.
        """
        super().__init__((columns.shape[0], 1, columns.shape[1], keys), torch.bool, columns.device)
        self._columns, self._window, self._real, self._ask = columns, window, real, ask
        self.is_causal = ask is not None

    def cut(self, rows: slice, keys: slice) -> Tensor:
        """See `RowLines.cut`."""
        columns, own = torch.arange(keys.start, keys.stop, device=self.device), self._columns[:, None, rows, None]
        seen = columns <= own
        if self._window is not None:
            seen &= columns > own - self._window
        if self._real is not None:
            real = self._real[:, -self.shape[3] :][:, None, None, keys]
            seen = seen & real.to(device=seen.device, dtype=torch.bool)
        return seen

    @cached_property
    def spans(self) -> list[RowBlock]:
        """Blocks for attention in two steps: first the keys that all rows of a block see, then the rest."""
        if not self.is_causal or self.shape[2] * self.shape[3] <= CAUSAL_MASK[1]:
            return []
        rows, numbers = self.shape[2], self._numbers
        step, cut, start = max(SPAN_ROWS[0], min(SPAN_ROWS[1], rows // SPAN_BLOCKS)), [], 0
        for run in _runs(numbers, RUN_ROWS):
            cut += _steps(start, run.start, step)
            cut.append(run)
            start = run.stop
        ends = [(span, numbers[span.start], numbers[span.stop - 1]) for span in (*cut, *_steps(start, rows, step))]
        return [
            RowBlock(span, slice(0, last + 1), first, last - first == span.stop - span.start - 1)
            for span, first, last in ends
        ]

    @cached_property
    def _numbers(self) -> list[int]:
        numbers: list[int] = self._ask()
        return numbers

    def _ends(self, cut: list[slice]) -> list[tuple[int, int]]:
        return [(0, self._numbers[rows.stop - 1] + 1) for rows in cut] if self.is_causal else super()._ends(cut)


class PackedLines(RowLines):
    """The lines of several texts in one row of a batch: each token sees its own text, and the first if it is shared.

    The mask that the model made is read at the positions of tokens, where it is that of each text alone.
    """

    def __init__(
        self, mask: Tensor | None, starts: Sequence[int], tokens: int, device: torch.device, shared: int = 0
    ) -> None:
        """Describe the lines.

        Args:
            mask: that of the model, `[1, heads or 1, tokens, tokens]`; None: it leaves it to a causal kernel.
            starts: the first columns of the texts.
            tokens: of all texts.
            device: of the mask.
            shared: tokens of the first text, if all others see it.
        """
        columns = torch.arange(tokens, device=device)
        lines = LocalLines(columns[None], tokens) if mask is None else MadeLines(mask)
        super().__init__((1, *lines.shape[1:]), lines.dtype, lines.device)
        self._lines, self._starts, self._shared, self._is_plain = lines, tuple(starts), shared, mask is None
        self._columns, firsts = columns, torch.tensor(self._starts, device=device)
        self._texts = torch.bucketize(columns, firsts, right=True)
        self._positions = columns - firsts[self._texts - 1] + shared * (columns >= shared)

    @cached_property
    def blocks(self) -> list[RowBlock]:
        """See `RowLines.blocks`; one for each text."""
        ends = pairwise((*self._starts, self.shape[2]))
        return [RowBlock(slice(*end), slice(0 if self._shared else end[0], end[1])) for end in ends]

    @cached_property
    def masks(self) -> list[Tensor | None]:
        """By block, its mask for the keys of `seen_of`; None where a causal kernel does without."""
        return [self._mask(self._before(block), block.rows.stop - block.rows.start) for block in self.blocks]

    def seen_of(self, states: Tensor, block: RowBlock) -> Tensor:
        """The keys or values that a block sees: what is shared, and its own."""
        own, before = states[:, :, block.rows], self._before(block)
        return torch.cat((states[:, :, :before], own), dim=2) if before else own

    def cut(self, rows: slice, keys: slice) -> Tensor:
        """See `RowLines.cut`."""
        seen = self._lines.plain()[:, :, self._positions[rows]][..., self._positions[keys]]
        own = (self._texts[rows, None] == self._texts[keys]) | (self._columns[keys] < self._shared)
        return seen & own if seen.dtype == torch.bool else seen.masked_fill(~own, torch.finfo(seen.dtype).min)

    def _before(self, block: RowBlock) -> int:
        return self._shared if block.rows.start >= self._shared else 0

    def _mask(self, before: int, tokens: int) -> Tensor | None:
        if self._is_plain and not before:
            return None
        end = before + tokens
        made = self._lines.cut(slice(before, end), slice(0, end))
        is_causal = not before and made.dtype == torch.bool and torch.equal(made, torch.ones_like(made).tril())
        return None if is_causal else made


def _runs(numbers: list[int], least: int) -> list[slice]:
    """Where at least `least` numbers follow each other without a gap."""
    gaps = [0, *(at for at in range(1, len(numbers)) if numbers[at] != numbers[at - 1] + 1), len(numbers)]
    return [slice(start, stop) for start, stop in pairwise(gaps) if stop - start >= least]


def _steps(start: int, stop: int, step: int) -> list[slice]:
    return [slice(first, min(first + step, stop)) for first in range(start, stop, step)]


_fused: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)


def attend(
    query: Tensor, key: Tensor, value: Tensor, lines: RowLines, dropout: float = 0.0, scale: float | None = None
) -> Tensor:
    """Attention of scattered rows.

    Shapes: query `[batch, heads, rows, head_dim]`, key `[batch, kv_heads, keys, head_dim]`, value `[batch, kv_heads,
    keys, value_dim]` → `[batch, heads, rows, value_dim]`.
    """
    if len(lines.blocks) == 1:
        done = _at_once(query, key, value, lines, lines.blocks[0], dropout, scale)
        return done.permute(0, 3, 1, 2, 4).flatten(2, 3).transpose(1, 2)
    out = query.new_empty((query.shape[0], query.shape[2], query.shape[1], value.shape[-1]))
    # the fused kernel gives its sums of weights for no gradients
    is_plain = query.device.type == "cpu" and not dropout and not query.requires_grad and not key.requires_grad
    gives_sums = _fused is not None and is_plain and query.shape[-1] == value.shape[-1]
    spans = lines.spans if gives_sums and isinstance(lines, LocalLines) else []
    for block in spans or lines.blocks:
        operands = query[:, :, block.rows], key, value, lines, block
        done = _in_two(*operands, scale) if spans else _at_once(*operands, dropout, scale)
        out[:, block.rows] = done.permute(0, 3, 1, 2, 4).flatten(2, 3)
    return out.transpose(1, 2)


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
    is_shared = batch > 1 and key.stride(0) == value.stride(0) == 0  # the entries of the batch are the same memory
    if is_shared and lines.shape[1] == 1:
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
    operands = _by_key_head(query, key[:, :, own], value[:, :, own])
    done, sums = _fused(*operands, 0.0, block.is_run, attn_mask=bias, scale=scale)
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


def row_mask(
    model_mask: Tensor | BlockMask | None,
    rows: Tensor,
    past: int,
    keys: int,
    implementation: str,
    numbers: Callable[[], list[int]] | None = None,
    window: int | None = None,
) -> Tensor | BlockMask:
    """The mask of some rows, for the attention implementation that the model uses.

    Shapes: model_mask `[batch, heads or 1, rows, keys]` or `[batch, keys]`, rows `[batch, kept]` → `[batch, heads or
    1, kept, keys]`.
    """
    if isinstance(model_mask, BlockMask):
        return _cut_blocks(model_mask, rows, keys)
    lines: RowLines
    if model_mask is not None and model_mask.dim() == 4:
        lines = MadeLines(model_mask, rows)
    elif model_mask is not None or window is not None or rows.shape[0] > 1:
        lines = LocalLines(rows + past, keys, window, model_mask)
    else:
        ask = numbers or rows[0].tolist
        columns = rows + past if past else rows
        lines = LocalLines(columns, keys, ask=lambda: [number + past for number in ask()])
    if implementation == "sdpa":
        return RowMask.of(lines)
    mask = lines.plain()
    if implementation == "eager" and model_mask is None:  # a boolean mask that a model made is what it expects
        return torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, torch.finfo(torch.float32).min)
    return mask


def _cut_blocks(model_mask: BlockMask, rows: Tensor, keys: int) -> BlockMask:
    """The mask of flex attention at some rows."""
    index = rows.to(model_mask.kv_num_blocks.device)

    def at_rows(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return model_mask.mask_mod(batch, head, index[batch, row], key)

    return create_block_mask(at_rows, rows.shape[0], None, rows.shape[1], keys, device=index.device)


class RowMask(Tensor):
    """A boolean or additive mask `[batch, heads or 1, rows, keys]` that attends by blocks of rows.

    Every operation but `scaled_dot_product_attention` sees a plain tensor, which is made only if one asks for it.
    """

    lines: RowLines

    @classmethod
    def of(cls, lines: RowLines | Tensor) -> "RowMask":
        """Wrap lines, or a mask `[batch, heads or 1, rows, keys]`; no copy."""
        lines = MadeLines(lines) if isinstance(lines, Tensor) else lines
        wrapped: RowMask = Tensor._make_wrapper_subclass(cls, lines.shape, dtype=lines.dtype, device=lines.device)
        wrapped.lines = lines
        return wrapped

    @property
    def is_causal(self) -> bool:
        """Whether each row sees exactly the keys up to its own column."""
        return self.lines.is_causal

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
        """Operations that do not come through `__torch_function__`, such as from C++: they get plain tensors, too."""
        return func(*tree_map(_as_plain, args), **tree_map(_as_plain, kwargs or {}))

    def plain(self) -> Tensor:
        """The mask as a tensor of its own."""
        return self.lines.plain()

    def _to(self, *args: Any, **kwargs: Any) -> Tensor:
        """The same mask elsewhere: accelerate brings the arguments of a layer to where its weights are."""
        moved = torch.empty(0, dtype=self.dtype, device=self.device).to(*args, **kwargs)
        if moved.dtype != self.dtype:
            return self.plain().to(*args, **kwargs)
        if moved.device == self.device:
            return self
        return RowMask.of(self.lines.to(moved.device))


_ASKING = {Tensor.dim, Tensor.size, Tensor.is_floating_point, Tensor.ndimension, Tensor.numel}


def _as_plain(value: Any) -> Any:
    return value.plain() if isinstance(value, RowMask) else value


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
    lines = attn_mask.lines
    if lines.shape[2] == 1:  # one line for all queries: transformers has folded the heads of a group into rows
        plain = lines.plain()
        return scaled_dot_product_attention(query, key, value, plain, dropout_p, scale=scale, enable_gqa=enable_gqa)
    return attend(query, key, value, lines, dropout_p, scale)
