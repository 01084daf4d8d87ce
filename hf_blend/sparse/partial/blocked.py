# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A chunk as blocks that can be read one by one: each has its own digest, so what is loaded is verified, and no more.

    magic | length of the header | header (JSON) | digests of the blocks | blocks

A block holds the keys, or the values, of some tokens in one layer and one KV head. Inside a chunk tokens stand in the
order of their importance, so that important ones share blocks; the header says where each came from. The header's
digest covers itself and all digests of blocks.
"""

import base64
import hashlib
import json
from collections.abc import Sequence
from typing import Any

import torch
import xxhash
from torch import Tensor

from ...store.chunk import ChunkKey, ChunkKV
from ...store.header import DTYPES, hash_namespace
from ...store.tiers.base import EntryFault, Source

MAGIC = b"hf_blend.blocks/1\n"
DIGEST_BYTES = 16
HEADER_CAP_BYTES = 1 << 22
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def encode_blocks(chunk: ChunkKV, order: Sequence[int], block_tokens: int) -> list[memoryview]:
    """Write a chunk as blocks; equal chunks and orders give equal bytes.

    Args:
        chunk: on the CPU, all layers of one dtype and shape.
        order: the tokens, the most important first.
        block_tokens: tokens of a block; the last one may be shorter.

    Returns:
        The bytes in pieces.
    """
    index = torch.tensor(list(order))
    pieces, digests = [], []
    for keys, values in chunk.layers:
        for states in (keys, values):
            moved = states.index_select(1, index).contiguous()
            for head in moved:
                for part in head.split(block_tokens):
                    view = memoryview(part.contiguous().view(-1).view(torch.uint8).numpy())
                    pieces.append(view)
                    digests.append(xxhash.xxh3_128_digest(view))
    keys, values = chunk.layers[0]
    header = {
        "key": chunk.key.digest,
        "fingerprint": chunk.key.fingerprint,
        "namespace": hash_namespace(chunk.key.namespace),
        "dtype": _NAMES[keys.dtype],
        "shape": [len(chunk.layers), keys.shape[0], chunk.tokens, keys.shape[2], values.shape[2]],
        "block_tokens": block_tokens,
        "order": list(order),
        "layer_table": list(chunk.layer_table),
        "tables": [[_text(part) for part in pair] for pair in chunk.tables],
    }
    joined = b"".join(digests)
    header["digest"] = _manifest(header, joined)
    text = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    return [memoryview(MAGIC + len(text).to_bytes(8, "little") + text + joined), *pieces]


class BlockReader:
    """An open entry of blocks whose header was checked; blocks are read and checked when asked for.

    Args:
        source: an open entry; it stays open, and whoever opened it closes it.
        key: which chunk is wanted.

    Raises:
        EntryFault: the header is damaged, or the entry is of another chunk.
    """

    def __init__(self, source: Source, key: ChunkKey) -> None:
        self._source = source
        self.header = _header(source, key)
        self.layers, self.heads, self.tokens, self.key_width, self.value_width = self.header["shape"]
        self.dtype = DTYPES[self.header["dtype"]]
        self.block_tokens = self.header["block_tokens"]
        self.blocks = -(-self.tokens // self.block_tokens)
        self.order = torch.tensor(self.header["order"])
        self.loaded_bytes = len(MAGIC) + 8 + self.header["length"]
        count = self.layers * 2 * self.heads * self.blocks * DIGEST_BYTES
        start = len(MAGIC) + 8 + self.header["length"]
        self._digests = _read(source, start, count)
        if _manifest({**self.header, "digest": None}, self._digests) != self.header["digest"]:
            raise EntryFault("digest", "the header is not what was stored")
        self._data = start + count
        self.loaded_bytes += count

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return self.layers * self.heads * self.tokens * (self.key_width + self.value_width) * self.dtype.itemsize

    def tokens_of(self, blocks: Sequence[int]) -> Tensor:
        """The tokens of the chunk that some blocks hold, in the order in which `read` gives them."""
        ends = [slice(one * self.block_tokens, (one + 1) * self.block_tokens) for one in blocks]
        return torch.cat([self.order[one] for one in ends]) if ends else self.order[:0]

    def expect(self, layer: int, part: int, heads: Sequence[int], blocks: Sequence[int]) -> None:
        """Have a device begin with what `read` will be asked for soon; only sources that are files do."""
        tell = getattr(self._source, "expect", None)
        if tell is None:
            return
        for head in heads:
            base, sizes = self._extent(layer, part, head, blocks)
            for first, last in _runs(blocks):
                tell(base + blocks[first] * self._block_bytes(part), sum(sizes[first:last]))

    def read(self, layer: int, part: int, head: int, blocks: Sequence[int]) -> Tensor:
        """Read some blocks of one head.

        Args:
            layer: which layer.
            part: 0 for keys, 1 for values.
            head: which KV head.
            blocks: increasing; neighbours are read together.

        Returns:
            `[tokens of the blocks, width]`, keys rotated for the chunk's own positions.

        Raises:
            EntryFault: truncated, or a block is not what was stored.
            OSError: it cannot be read now.
        """
        base, sizes = self._extent(layer, part, head, blocks)
        buffer = torch.empty(sum(sizes), dtype=torch.uint8)
        view, place = memoryview(buffer.numpy()), 0
        for first, last in _runs(blocks):
            nbytes = sum(sizes[first:last])
            start = base + blocks[first] * self._block_bytes(part)
            self._source.read_into(start, view[place : place + nbytes])
            place += nbytes
        number = ((layer * 2 + part) * self.heads + head) * self.blocks
        place = 0
        for block, size in zip(blocks, sizes, strict=True):
            at = (number + block) * DIGEST_BYTES
            if xxhash.xxh3_128_digest(view[place : place + size]) != self._digests[at : at + DIGEST_BYTES]:
                raise EntryFault("digest", f"block {block} of layer {layer}, head {head} is not what was stored")
            place += size
        self.loaded_bytes += len(view)
        return buffer.view(self.dtype).view(-1, self._width(part))

    def _width(self, part: int) -> int:
        return self.value_width if part else self.key_width

    def _block_bytes(self, part: int) -> int:
        return self.block_tokens * self._width(part) * self.dtype.itemsize

    def _extent(self, layer: int, part: int, head: int, blocks: Sequence[int]) -> tuple[int, list[int]]:
        """Where the blocks of a head begin in the file, and the sizes of some of them, in bytes."""
        per_head = [self.tokens * self._width(one) * self.dtype.itemsize for one in (0, 1)]
        base = self._data + self.heads * (layer * sum(per_head) + part * per_head[0]) + head * per_head[part]
        token_bytes = self._width(part) * self.dtype.itemsize
        sizes = [min(self.block_tokens, self.tokens - one * self.block_tokens) * token_bytes for one in blocks]
        return base, sizes


def tables_of(header: dict[str, Any]) -> tuple[tuple[Tensor, Tensor], ...]:
    """The rotary tables in a header, as `ChunkKV.tables`."""
    tokens = header["shape"][2]
    made = [[_tensor(text).view(tokens, -1) for text in pair] for pair in header["tables"]]
    return tuple((cos, sin) for cos, sin in made)


def _text(table: Tensor) -> str:
    return base64.b64encode(table.float().contiguous().numpy().tobytes()).decode()


def _tensor(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.float32)


def _runs(blocks: Sequence[int]) -> list[tuple[int, int]]:
    """First and last-but-one place of each run of neighbours."""
    cuts = [place for place in range(1, len(blocks)) if blocks[place] != blocks[place - 1] + 1]
    return list(zip([0, *cuts], [*cuts, len(blocks)], strict=True)) if blocks else []


def _read(source: Source, start: int, count: int) -> bytes:
    found = bytearray(count)
    source.read_into(start, memoryview(found))
    return bytes(found)


def _manifest(header: dict[str, Any], digests: bytes) -> str:
    plain = {name: value for name, value in header.items() if name not in ("digest", "length")}
    text = json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()
    return hashlib.sha256(text + digests).hexdigest()


def _header(source: Source, key: ChunkKey) -> dict[str, Any]:
    start = len(MAGIC)
    if _read(source, 0, start) != MAGIC:
        raise EntryFault("format", f"the first {start} bytes are not those of an entry of blocks")
    length = int.from_bytes(_read(source, start, 8), "little")
    if length > HEADER_CAP_BYTES * 16:
        raise EntryFault("format", f"a header of {length} bytes is too long")
    try:
        header: dict[str, Any] = json.loads(_read(source, start + 8, length))
        order, tokens = header["order"], header["shape"][2]
        is_whole = sorted(order) == list(range(tokens)) and tokens == len(key.token_ids) and header["block_tokens"] > 0
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise EntryFault("format", f"the header cannot be read: {error}") from error
    if header.get("fingerprint") != key.fingerprint:
        raise EntryFault("fingerprint", "computed by another model")
    if header.get("key") != key.digest or header.get("namespace") != hash_namespace(key.namespace) or not is_whole:
        raise EntryFault("key", f"the entry is not of chunk {key.digest}")
    return {**header, "length": length}
