# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A chunk as an entry whose blocks can be read one by one: what is loaded is verified, and no more.

A block holds the keys, or the values, of some tokens in one layer and one KV head. Inside a chunk tokens are in the
order of their importance, so that important ones share blocks; `order` says where each came from. The digests of all
blocks are a tensor of the entry, whose own digest is in the header; the tensors of the layers have none of their own.
"""

import json
import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from ...errors import UnsupportedModelError
from ...store.chunk import ChunkKey, ChunkKV, Layout, has_usable_values, kinds_of
from ...store.entry import check_tables
from ...store.format import (
    DTYPES,
    EntryFile,
    Header,
    TensorPlan,
    bytes_of,
    compact,
    digest_of,
    dtype_name,
    hash_namespace,
    plan_of,
)
from ...store.seal import content_hasher
from ...store.tiers.base import EntryFault, Source, as_fault

KIND = "hf_blend.blocks/3"
_KINDS = ("k", "v")


def encode_blocks(
    chunk: ChunkKV, order: Sequence[int], block_tokens: int, secret: bytes | None = None
) -> list[memoryview]:
    """Write a chunk as blocks; equal chunks and orders give equal bytes."""
    _check_layers(chunk)
    index, pieces = torch.tensor(list(order)), list[memoryview]()
    tensors = [("order", index)]
    for number, (cos, sin) in enumerate(chunk.tables):
        tensors += [(f"table.{number}.cos", cos.float()), (f"table.{number}.sin", sin.float())]
    plans = []
    for layer, pair in enumerate(chunk.layers):
        for kind, states in zip(_KINDS, pair, strict=True):
            moved = states.index_select(1, index).contiguous()
            pieces += [bytes_of(part) for head in moved for part in head.split(block_tokens)]
            name = f"layer.{layer}.{kind}"
            plans.append(TensorPlan(name, dtype_name(name, states.dtype), tuple(states.shape), ""))
    digests = b"".join(digest_of(piece, secret) for piece in pieces)
    width = content_hasher(secret).digest_size
    tensors.append(("digests", torch.frombuffer(bytearray(digests), dtype=torch.uint8).view(-1, width)))
    first = [plan_of(name, tensor, secret) for name, tensor in tensors]
    about = {
        "key": chunk.key.digest,
        "fingerprint": chunk.key.fingerprint,
        "namespace": hash_namespace(chunk.key.namespace),
        "layer_table": compact(chunk.layer_table),
        "block_tokens": str(block_tokens),
    }
    header = Header(KIND, about, (*(plan for plan, _ in first), *plans))
    return [memoryview(header.encode(secret)), *(view for _, view in first), *pieces]


class BlockReader:
    """An open entry of blocks whose header was checked; blocks are read and checked when they are asked for."""

    def __init__(
        self, source: Source, key: ChunkKey, secret: bytes | None = None, layout: Layout | None = None
    ) -> None:
        self._source, self._secret, self._file = source, secret, EntryFile(source, KIND, secret)
        with as_fault("the header of the blocks"):
            self._check_header(key)
            take = self._file.taker(self._file.start, self._data - self._file.start)
            self.order = take("order")
            if self.order.dtype != torch.int64 or sorted(self.order.tolist()) != list(range(self.tokens)):
                raise EntryFault("format", f"the blocks do not hold each of {self.tokens} tokens once")
            self.tables = tuple((take(f"table.{one}.cos"), take(f"table.{one}.sin")) for one in range(self._tables))
            self._digests = bytes_of(take("digests"))
            self._check_layout(layout)
        self.loaded_bytes = self._data
        self._asked: tuple[int, ...] = ()
        self._positions = self.order[:0]

    def _check_header(self, key: ChunkKey) -> None:
        """Compare the header with the key, and everything in it with what an entry of blocks holds."""
        about, plans = self._file.header.about, self._file.header.tensors
        if about["fingerprint"] != key.fingerprint:
            raise EntryFault("fingerprint", "computed by another model")
        if about["key"] != key.digest or about["namespace"] != hash_namespace(key.namespace):
            raise EntryFault("key", f"the entry is not of chunk {key.digest}")
        self.layer_table = tuple(map(int, json.loads(about["layer_table"])))
        self.layers, self._tables = len(self.layer_table), sum(plan.name.startswith("table.") for plan in plans) // 2
        keys, values = (self._file.plans[f"layer.0.{kind}"][0] for kind in _KINDS)
        self.heads, self.tokens, self.key_width = keys.shape
        self.value_width, self.dtype = values.shape[2], DTYPES[keys.dtype]
        self.block_tokens = int(about["block_tokens"])
        self.blocks = -(-self.tokens // self.block_tokens)
        self._data = self._file.plans["layer.0.k"][1]
        found = [(plan.name, plan.shape) for plan in plans]
        is_whole = found == list(self._forms()) and {plan.dtype for plan in plans[-2 * self.layers :]} == {keys.dtype}
        is_whole = is_whole and self.tokens == len(key.token_ids) and min(*keys.shape, self.value_width) > 0
        is_whole = is_whole and all(-1 <= table < self._tables for table in self.layer_table)
        if not is_whole or not self.dtype.is_floating_point:
            raise EntryFault("format", f"the header is not one of a chunk of {len(key.token_ids)} tokens")

    def _forms(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Give name and shape of what the entry must hold."""
        yield "order", (self.tokens,)
        for index in range(self._tables):
            for part in ("cos", "sin"):
                yield f"table.{index}.{part}", (self.tokens, self._file.plans[f"table.{index}.{part}"][0].shape[-1])
        yield "digests", (self.layers * 2 * self.heads * self.blocks, content_hasher(self._secret).digest_size)
        for index in range(self.layers):
            yield f"layer.{index}.k", (self.heads, self.tokens, self.key_width)
            yield f"layer.{index}.v", (self.heads, self.tokens, self.value_width)

    def _check_layout(self, layout: Layout | None) -> None:
        pair = (self.heads, self.key_width, self.dtype), (self.heads, self.value_width, self.dtype)
        tables = tuple((cos.shape[1], sin.shape[1], cos.dtype) for cos, sin in self.tables)
        found = Layout((pair,) * self.layers, tables, self.layer_table)
        if layout is not None and layout != found:
            raise EntryFault("layout", f"{found!r:.160} is not what the model has: {layout!r:.160}")
        check_tables(self.tables, layout)

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return self.layers * self.heads * self.tokens * (self.key_width + self.value_width) * self.dtype.itemsize

    def tokens_of(self, blocks: Sequence[int]) -> Tensor:
        """The tokens of the chunk that some blocks hold, in the order in which `read` gives them."""
        return self.order[self.positions_of(blocks)]

    def positions_of(self, blocks: Sequence[int]) -> Tensor:
        """Where the tokens of some blocks are in the order of the blocks."""
        asked = tuple(blocks)
        if self._asked != asked:  # keys and values are asked for one behind the other
            starts = torch.tensor(asked, dtype=torch.long) * self.block_tokens
            positions = (starts[:, None] + torch.arange(self.block_tokens)).view(-1)
            self._asked, self._positions = asked, positions[positions < self.tokens]  # the last block may be shorter
        return self._positions

    def empty(self, part: int) -> Tensor:
        """`[kv_heads, tokens, width]` for the keys (0) or values (1) of a layer, contents undefined."""
        return torch.empty(self.heads, self.tokens, self._width(part), dtype=self.dtype)

    def expect(self, layer: int, part: int, heads: Sequence[int], blocks: Sequence[int]) -> None:
        """Have a device begin with what `read` will be asked for soon; only sources that are files do."""
        tell = getattr(self._source, "expect", None)
        if tell is None:
            return
        runs = self._runs(part, blocks)
        for head in heads:
            base = self._base(layer, part, head)
            for start, nbytes in runs:
                tell(base + start, nbytes)

    def read(self, layer: int, part: int, heads: Sequence[int], blocks: Sequence[int]) -> Tensor:
        """Read some blocks, increasing, of some heads: `[heads, tokens of the blocks, width]`, keys as stored.

        Raises EntryFault: truncated; digest, a block is not what was stored; values, it holds absurd ones.
        """
        runs, sizes = self._runs(part, blocks), self._sizes(part, blocks)
        buffer = torch.empty(len(heads), sum(sizes), dtype=torch.uint8)
        for head, line in zip(heads, buffer, strict=True):
            base, view, filled = self._base(layer, part, head), memoryview(line.numpy()), 0
            for start, nbytes in runs:
                self._source.read_into(base + start, view[filled : filled + nbytes])
                filled += nbytes
            self._check(layer, part, head, blocks, sizes, view)
        self.loaded_bytes += buffer.nbytes
        states = buffer.view(self.dtype).view(len(heads), -1, self._width(part))
        if not has_usable_values(states):
            raise EntryFault("values", f"layer {layer} holds NaN, infinity or absurd values in heads {list(heads)}")
        return states

    def _check(
        self, layer: int, part: int, head: int, blocks: Sequence[int], sizes: Sequence[int], view: memoryview
    ) -> None:
        """Compare the blocks of one head with their digests."""
        first, width = ((layer * 2 + part) * self.heads + head) * self.blocks, content_hasher(self._secret).digest_size
        start = 0
        for block, size in zip(blocks, sizes, strict=True):
            at = (first + block) * width
            if digest_of(view[start : start + size], self._secret) != self._digests[at : at + width]:
                raise EntryFault("digest", f"block {block} of layer {layer}, head {head} is not what was stored")
            start += size

    def _width(self, part: int) -> int:
        return self.value_width if part else self.key_width

    def _base(self, layer: int, part: int, head: int) -> int:
        """Where the blocks of a head begin in the file."""
        plan, offset = self._file.plans[f"layer.{layer}.{_KINDS[part]}"]
        return offset + head * math.prod(plan.shape[1:]) * self.dtype.itemsize

    def _sizes(self, part: int, blocks: Sequence[int]) -> list[int]:
        """Bytes of some blocks of a head."""
        token_bytes = self._width(part) * self.dtype.itemsize
        return [min(self.block_tokens, self.tokens - one * self.block_tokens) * token_bytes for one in blocks]

    def _runs(self, part: int, blocks: Sequence[int]) -> list[tuple[int, int]]:
        """Where each run of neighbours begins behind the base of a head, and its bytes."""
        cuts = [cut for cut in range(1, len(blocks)) if blocks[cut] != blocks[cut - 1] + 1]
        sizes, step = self._sizes(part, blocks), self.block_tokens * self._width(part) * self.dtype.itemsize
        ends = [0, *cuts, len(blocks)] if blocks else []
        return [(blocks[first] * step, sum(sizes[first:last])) for first, last in pairwise(ends)]


def _check_layers(chunk: ChunkKV) -> None:
    for index, states in enumerate(chunk.layers):
        if len(states) != 2:
            kinds = ", ".join(kinds_of(states)) or "nothing"
            raise UnsupportedModelError(
                f"layer {index} of chunk {chunk.key.digest[:12]} has {kinds} (k and v: K and V, p: projections of a "
                "mixer or keys of an indexer), but K and V alone are expected in every layer that is loaded in part. "
                "Use a ChunkStore for this model."
            )
