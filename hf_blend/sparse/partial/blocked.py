# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Entries in blocks: writes them, and reads their blocks one by one; what is loaded is verified, and no more.

Tokens are in the order of their importance, so that important ones share blocks; `order` says where each came from.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from ...store.chunk import ChunkKey, ChunkKV, Layout, has_usable_values
from ...store.entry import EntryReader, encode_entry, stored_as
from ...store.format import digest_of
from ...store.importance import TokenImportance
from ...store.tiers.base import EntryFault, Source

BLOCK_TOKENS = 16
_KINDS = ("k", "v")


class BlockEncoder:
    """Makes entries in blocks of chunks whose layers are all alike and have K and V only, and plain ones of others."""

    def __init__(self, codec: str, importance: TokenImportance, block_tokens: int) -> None:
        self._codec = codec
        self._importance, self._block_tokens = importance, block_tokens

    def encode(self, chunk: ChunkKV, order: Sequence[int] | None = None) -> Sequence[memoryview]:
        """Give the bytes of a chunk's entry, its tokens in an order; None is the most important first."""
        if not has_blocks(chunk):
            return encode_entry(chunk, self._codec)
        order = self._order(chunk) if order is None else order
        return encode_entry(stored_as(chunk, self._codec), "raw", order, self._block_tokens)

    def _order(self, chunk: ChunkKV) -> Sequence[int]:
        """The tokens of a chunk, the most important first; in order if their importance is unknown."""
        record = self._importance.get(chunk.key.digest)
        if record is None or len(record.scores) != chunk.tokens:
            return range(chunk.tokens)
        order: list[int] = torch.from_numpy(record.scores).argsort(descending=True, stable=True).tolist()
        return order


def has_blocks(chunk: ChunkKV) -> bool:
    """Whether a chunk can be in blocks: its layers are all alike and have K and V only."""
    forms = {*chunk.layout.layers}
    form = forms.pop() if forms else ()
    return not forms and len(form) == 2 and form[0][::2] == form[1][::2]


class BlockReader(EntryReader):
    """An open entry in blocks whose header was checked; blocks are read and checked when they are asked for."""

    def __init__(self, source: Source, key: ChunkKey, layout: Layout | None = None) -> None:
        super().__init__(source, key, layout)
        if self.in_blocks:
            (self.heads, *_, self.dtype), _ = self.layout.layers[0]
            self.widths = tuple(form[1] for form in self.layout.layers[0])  # of keys, of values
            self.loaded_bytes = self.data_start = self._layer_start(0)

    @property
    def block_bytes(self) -> int:
        """Bytes of all blocks."""
        return len(self.layer_table) * self.heads * len(self.order) * sum(self.widths) * self.dtype.itemsize

    def tokens_of(self, blocks: Sequence[int]) -> Tensor:
        """The tokens of the chunk that some blocks hold, in the order in which `read_blocks` gives them."""
        return self.order[self.positions_of(blocks)]

    def positions_of(self, blocks: Sequence[int]) -> Tensor:
        """Where the tokens of some blocks are in the order of the blocks."""
        starts = torch.tensor(blocks, dtype=torch.long) * self.block_tokens
        positions = (starts[:, None] + torch.arange(self.block_tokens)).view(-1)
        return positions[positions < len(self.order)]  # the last block may be shorter

    def empty(self, which: int) -> Tensor:
        """`[kv_heads, tokens, width]` for the keys (0) or values (1) of a layer, contents undefined."""
        return torch.empty(self.heads, len(self.order), self.widths[which], dtype=self.dtype)

    def expect(self, layer: int, which: int, heads: Sequence[int], blocks: Sequence[int]) -> None:
        """Have a device begin with what will be read soon; only sources that are files do."""
        tell = getattr(self._file.source, "expect", None)
        if tell is None:
            return
        for start, nbytes in self._runs(which, blocks):
            for head in heads:
                tell(self._base(layer, which, head) + start, nbytes)

    def read_blocks(self, layer: int, which: int, heads: Sequence[int], blocks: Sequence[int]) -> Tensor:
        """Read some blocks, increasing, of some heads: `[heads, tokens of the blocks, width]`, keys as stored.

        Raises EntryFault: truncated; digest, a block is not what was stored; values, it holds absurd ones.
        """
        runs, sizes = self._runs(which, blocks), self._sizes(which, blocks)
        buffer = torch.empty(len(heads), sum(sizes), dtype=torch.uint8)
        for head, line in zip(heads, buffer, strict=True):
            base, view, filled = self._base(layer, which, head), memoryview(line.numpy()), 0
            for start, nbytes in runs:
                self._file.source.read_into(base + start, view[filled : filled + nbytes])
                filled += nbytes
            self._check(layer, which, head, blocks, sizes, view)
        self.loaded_bytes += buffer.nbytes
        states = buffer.view(self.dtype).view(len(heads), -1, self.widths[which])
        if not has_usable_values(states):
            raise EntryFault("values", f"layer {layer} holds NaN, infinity or absurd values in heads {list(heads)}")
        return states

    def _check(
        self, layer: int, which: int, head: int, blocks: Sequence[int], sizes: Sequence[int], view: memoryview
    ) -> None:
        """Compare the blocks of one head with their digests."""
        first, count = ((layer * 2 + which) * self.heads + head) * self.blocks, len(self.layer_table) * 2 * self.heads
        width, start = len(self.block_digests) // (count * self.blocks), 0
        for block, size in zip(blocks, sizes, strict=True):
            at = (first + block) * width
            if digest_of(view[start : start + size]) != self.block_digests[at : at + width]:
                raise EntryFault("digest", f"block {block} of layer {layer}, head {head} is not what was stored")
            start += size

    def _base(self, layer: int, which: int, head: int) -> int:
        """Where the blocks of a head begin in the file."""
        plan, offset = self._file.plans[f"layer.{layer}.{_KINDS[which]}"]
        return offset + head * math.prod(plan.shape[1:]) * self.dtype.itemsize

    def _sizes(self, which: int, blocks: Sequence[int]) -> list[int]:
        """Bytes of some blocks of a head."""
        token_bytes = self.widths[which] * self.dtype.itemsize
        return [min(self.block_tokens, len(self.order) - block * self.block_tokens) * token_bytes for block in blocks]

    def _runs(self, which: int, blocks: Sequence[int]) -> list[tuple[int, int]]:
        """Where each run of neighbours begins behind the base of a head, and its bytes."""
        cuts = [cut for cut in range(1, len(blocks)) if blocks[cut] != blocks[cut - 1] + 1]
        sizes, step = self._sizes(which, blocks), self.block_tokens * self.widths[which] * self.dtype.itemsize
        ends = [0, *cuts, len(blocks)] if blocks else []
        return [(blocks[first] * step, sum(sizes[first:last])) for first, last in pairwise(ends)]
