# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Entries in blocks: writes them, and reads their blocks one by one; what is loaded is verified, and no more.

An entry in blocks has its tokens in another order, by their importance, so that important ones share blocks; the order
stands behind the ids, with the digests of all blocks. A block has the keys, or the values, of some tokens in one layer
and one KV head.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from ...store.chunk import ChunkKey, ChunkKV, Layout
from ...store.entry import (
    KIND,
    EntryFormat,
    EntryReader,
    PackedChunk,
    about_chunk,
    bytes_of,
    digest_of,
    leading_tensors,
    pack_entry,
    tensor_digest,
)
from ...store.tiers.base import EntryFault, Source, as_fault

BLOCKS = "hf_blend.blocks/4"
BLOCK_TOKENS = 16
_KINDS = ("k", "v")


class BlockFormat(EntryFormat):
    """Entries in blocks of chunks whose layers are all alike and have K and V only, and plain ones of others."""

    kinds = (BLOCKS, KIND)

    def __init__(self, codec: str, block_tokens: int) -> None:
        super().__init__(codec)
        self._block_tokens = block_tokens

    def pack(self, chunk: ChunkKV, order: Sequence[int] | None = None) -> PackedChunk:
        """Pack a chunk with its tokens in an order; None is the most important first, as they are if it is unknown."""
        if not has_blocks(chunk):
            return super().pack(chunk)
        if order is None:
            order = range(chunk.tokens)
            if chunk.importance is not None:
                order = chunk.importance.argsort(descending=True, stable=True).tolist()
        return BlockedChunk(chunk, self.codec, order, self._block_tokens)

    def open(self, source: Source, key: ChunkKey, layout: Layout | None) -> "BlockReader":
        """Check the header of an entry, which may be a plain one."""
        return BlockReader(source, key, layout)


class BlockedChunk(PackedChunk):
    """A chunk as it is written in blocks: its states rounded by the codec, and not packed."""

    def __init__(self, chunk: ChunkKV, codec: str, order: Sequence[int], block_tokens: int) -> None:
        super().__init__(chunk, codec)
        self._order = list(order)
        self._block_tokens = block_tokens

    @cached_property
    def parts(self) -> list[memoryview]:
        """The bytes of the entry; equal arguments give equal bytes."""
        index = torch.tensor(self._order)
        layers = [tuple(states.index_select(1, index) for states in pair) for pair in self.chunk.layers]
        digests = []
        for pair in layers:
            for states in pair:
                for head in states:
                    digests += [digest_of(bytes_of(block)) for block in head.split(self._block_tokens)]
        digest_bytes = bytearray(b"".join(digests))
        digest_rows = torch.frombuffer(digest_bytes, dtype=torch.uint8).view(len(digests), -1)
        about = {**about_chunk(self.chunk, "raw"), "block_tokens": str(self._block_tokens)}
        leading = [*leading_tensors(self.chunk), ("order", index), ("block_digests", digest_rows)]
        ordered = replace(self.chunk, layers=layers)
        return pack_entry(BLOCKS, about, [*leading, *ordered.named_tensors()])


def has_blocks(chunk: ChunkKV) -> bool:
    """Whether a chunk can be in blocks: its layers are all alike and have K and V only."""
    return _block_form(chunk.layout) is not None


def _block_form(layout: Layout) -> tuple[int, int, int, torch.dtype] | None:
    """Heads, width of K, width of V and dtype of every layer; None if they differ or have something else."""
    forms = set(layout.layers)
    if len(forms) != 1:
        return None
    (form,) = forms
    if len(form) != 2:
        return None
    (heads, key_width, dtype), (value_heads, value_width, value_dtype) = form
    if heads != value_heads or dtype != value_dtype:
        return None
    return heads, key_width, value_width, dtype


class BlockReader(EntryReader):
    """An open entry, in blocks or plain, whose header was checked; blocks are read when they are asked for."""

    kinds = (BLOCKS, KIND)

    def __init__(self, source: Source, key: ChunkKey, layout: Layout | None = None) -> None:
        super().__init__(source, key, layout)
        if self.in_blocks:
            self._read_order()
            self.loaded_bytes = self._layer_start(0)

    @property
    def in_blocks(self) -> bool:
        """Whether the entry is in blocks."""
        return self.header.kind == BLOCKS

    def leading_forms(self) -> Iterator[tuple[str, int, int | None, int]]:
        """Give the forms of what is before the tables."""
        yield from super().leading_forms()
        if self.in_blocks:
            yield ("order", 1, 0, len(self.key.token_ids))
            yield ("block_digests", 2, None, 0)

    def _read_order(self) -> None:
        """Read the order of the tokens, and the digests of blocks, of which there must be so many."""
        tokens = len(self.key.token_ids)
        start = self._file.plans["order"][1]
        plan, offset = self._file.plans["block_digests"]
        form = _block_form(self.layout)
        with as_fault("the order of the tokens"):
            take = self._file.taker(start, offset + plan.nbytes - start)
            self.order = take("order")
            self.block_digests = bytes_of(take("block_digests"))
            self.block_tokens = int(self.header.about["block_tokens"])
            if self.order.dtype != torch.int64 or sorted(self.order.tolist()) != list(range(tokens)):
                raise EntryFault("format", f"the blocks do not hold each of {tokens} tokens once")
            if form is None or min(self.block_tokens, *form[:3]) < 1 or not self._packing.codec.is_exact:
                raise EntryFault("format", f"{self.layout!r:.120} cannot be in blocks of {self.block_tokens} tokens")
            self.heads, *widths, self.dtype = form
            self.widths = tuple(widths)  # of keys, of values
            self.blocks = -(-tokens // self.block_tokens)
            count = 2 * self.heads * len(self.layer_table) * self.blocks
            if not count or plan.shape != (count, tensor_digest().digest_size):
                raise EntryFault("format", f"{plan.shape} digests of blocks are not those of {self.layout!r:.120}")
        self.back = self.order.argsort()  # where in the entry each token of the chunk is

    def _states(self, take: Callable[[str], Tensor], index: int) -> tuple[Tensor, ...]:
        states = super()._states(take, index)
        if not self.in_blocks:
            return states
        return tuple(tensor.index_select(1, self.back) for tensor in states)

    @property
    def block_bytes(self) -> int:
        """Bytes of all blocks."""
        token_bytes = self.heads * sum(self.widths) * self.dtype.itemsize
        return len(self.layer_table) * len(self.order) * token_bytes

    def tokens_of(self, blocks: Sequence[int]) -> Tensor:
        """The tokens of the chunk that some blocks hold, in the order in which `read_blocks` gives them."""
        starts = torch.tensor(blocks, dtype=torch.long) * self.block_tokens
        positions = (starts[:, None] + torch.arange(self.block_tokens)).view(-1)
        return self.order[positions[positions < len(self.order)]]  # the last block may be shorter

    def read_blocks(self, layer: int, which: int, heads: Sequence[int], blocks: Sequence[int]) -> Tensor:
        """Read some blocks, increasing, of some heads: `[heads, tokens of the blocks, width]`, keys as stored.

        Raises EntryFault: truncated; digest, a block is not what was stored.
        """
        sizes = self._sizes(which, blocks)
        buffer = torch.empty(len(heads), sum(sizes), dtype=torch.uint8)
        for head, line in zip(heads, buffer, strict=True):
            view = memoryview(line.numpy())
            filled = 0
            for start, nbytes in self._runs(which, blocks):
                self._file.source.read_into(self._base(layer, which, head) + start, view[filled : filled + nbytes])
                filled += nbytes
            self._check(layer, which, head, blocks, sizes, view)
        self.loaded_bytes += buffer.nbytes
        return buffer.view(self.dtype).view(len(heads), -1, self.widths[which])

    def _check(
        self, layer: int, which: int, head: int, blocks: Sequence[int], sizes: Sequence[int], view: memoryview
    ) -> None:
        """Compare the blocks of one head with their digests."""
        first = ((layer * 2 + which) * self.heads + head) * self.blocks
        digests = len(self.layer_table) * 2 * self.heads * self.blocks
        width = len(self.block_digests) // digests
        start = 0
        for block, size in zip(blocks, sizes, strict=True):
            expected = self.block_digests[(first + block) * width : (first + block + 1) * width]
            if digest_of(view[start : start + size]) != expected:
                raise EntryFault("digest", f"block {block} of layer {layer}, head {head} is not what was stored")
            start += size

    def _base(self, layer: int, which: int, head: int) -> int:
        """Where the blocks of a head begin in the file."""
        plan, offset = self._file.plans[f"layer.{layer}.{_KINDS[which]}"]
        return offset + head * math.prod(plan.shape[1:]) * self.dtype.itemsize

    def _sizes(self, which: int, blocks: Sequence[int]) -> list[int]:
        """Bytes of some blocks of a head."""
        token_bytes = self.widths[which] * self.dtype.itemsize
        sizes = []
        for block in blocks:
            tokens = min(self.block_tokens, len(self.order) - block * self.block_tokens)  # the last may be shorter
            sizes.append(tokens * token_bytes)
        return sizes

    def _runs(self, which: int, blocks: Sequence[int]) -> list[tuple[int, int]]:
        """Where each run of neighbours begins behind the base of a head, and its bytes."""
        step = self.block_tokens * self.widths[which] * self.dtype.itemsize
        runs: list[tuple[int, int]] = []
        for block, size in zip(blocks, self._sizes(which, blocks), strict=True):
            start = block * step
            if runs and sum(runs[-1]) == start:
                start, before = runs.pop()
                size += before
            runs.append((start, size))
        return runs
