# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A chunk as blocks that can be read one by one: each has its own digest, so what is loaded is verified, and no more.

    magic | lengths of header and digests | seal | header (JSON) | digests of the blocks | blocks

A block holds the keys, or the values, of some tokens in one layer and one KV head. Inside a chunk tokens are in the
order of their importance, so that important ones share blocks; the header says where each came from. The seal covers
all raw bytes before the blocks, and is compared before the header is parsed.
"""

import base64
import json
import struct
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ...errors import UnsupportedModelError
from ...store.chunk import ChunkKey, ChunkKV, Layout, has_usable_values, kinds_of
from ...store.header import DTYPES, hash_namespace
from ...store.seal import check_seal, content_hasher, seal, seal_size
from ...store.tiers.base import EntryFault, Source, as_fault

MAGIC = b"hf_blend.blocks/2\n"
HEADER_CAP_BYTES = 1 << 26
_LENGTHS = struct.Struct("<QQ")
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def encode_blocks(
    chunk: ChunkKV, order: Sequence[int], block_tokens: int, secret: bytes | None = None
) -> list[memoryview]:
    """Write a chunk as blocks; equal chunks and orders give equal bytes.

    Args:
        chunk: on the CPU, all layers of one dtype and shape.
        order: the tokens, the most important first.
        block_tokens: tokens of a block; the last one may be shorter.
        secret: signs the entry.

    Returns:
        The bytes in pieces.

    Raises:
        UnsupportedModelError: a layer has something else than K and V.
    """
    _check_layers(chunk)
    index = torch.tensor(list(order))
    pieces, digests = [], []
    for keys, values in chunk.layers:
        for states in (keys, values):
            moved = states.index_select(1, index).contiguous()
            for head in moved:
                for part in head.split(block_tokens):
                    view = memoryview(part.contiguous().view(-1).view(torch.uint8).numpy())
                    pieces.append(view)
                    digests.append(_digest(view, secret))
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
    text = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    joined = b"".join(digests)
    begin = MAGIC + _LENGTHS.pack(len(text), len(joined))
    return [memoryview(begin + seal(secret, begin, text, joined) + text + joined), *pieces]


class BlockReader:
    """An open entry of blocks whose header was checked; blocks are read and checked when asked for.

    Args:
        source: an open entry; it stays open, and whoever opened it closes it.
        key: which chunk is expected.
        secret: that the entry must be signed with; None accepts only entries that are not signed.
        layout: of the model that will use the chunk; None compares the entry only with itself.

    Raises:
        EntryFault: the header is damaged, the entry is of another chunk or of another layout.
    """

    def __init__(
        self, source: Source, key: ChunkKey, secret: bytes | None = None, layout: Layout | None = None
    ) -> None:
        self._source, self._secret = source, secret
        text, self._digests = _unsealed(source, secret)
        self._data = self.loaded_bytes = len(MAGIC) + seal_size(secret) + _LENGTHS.size + len(text + self._digests)
        with as_fault("the header of the blocks"):
            self.header = _checked_header(json.loads(text), key)
            self.layers, self.heads, self.tokens, self.key_width, self.value_width = self.header["shape"]
            self.dtype = DTYPES[self.header["dtype"]]
            self.block_tokens = self.header["block_tokens"]
            self.blocks = -(-self.tokens // self.block_tokens)
            self.order = torch.tensor(self.header["order"])
            self.tables = _tables_of(self.header)
            self._asked: tuple[int, ...] = ()
            self._places = self.order[:0]
            self._check_sizes(layout)

    def _check_sizes(self, layout: Layout | None) -> None:
        digests = self.layers * 2 * self.heads * self.blocks * _digest_bytes(self._secret)
        if len(self._digests) != digests or self._data + self.nbytes != self._source.stat.nbytes:
            raise EntryFault("truncated", f"{self._source.stat.nbytes} bytes are not what the header says")
        pair = (self.heads, self.key_width, self.dtype), (self.heads, self.value_width, self.dtype)
        tables = tuple((cos.shape[1], sin.shape[1], cos.dtype) for cos, sin in self.tables)
        found = Layout((pair,) * self.layers, tables, tuple(self.header["layer_table"]))
        if layout is not None and layout != found:
            raise EntryFault("layout", f"{found!r:.160} is not what the model has: {layout!r:.160}")
        usable = all(has_usable_values(part) for pair in self.tables for part in pair)
        if not usable or (layout is not None and not layout.fits_norms(self.tables)):
            raise EntryFault(
                "values", f"a table of {len(self.tables)} holds NaN or infinity, or stretches what it turns"
            )

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return self.layers * self.heads * self.tokens * (self.key_width + self.value_width) * self.dtype.itemsize

    def tokens_of(self, blocks: Sequence[int]) -> Tensor:
        """The tokens of the chunk that some blocks hold, in the order in which `read` gives them."""
        return self.order[self.places_of(blocks)]

    def places_of(self, blocks: Sequence[int]) -> Tensor:
        """Where the tokens of some blocks stand in the order of the blocks."""
        asked = tuple(blocks)
        if self._asked != asked:  # keys and values are asked for one behind the other
            starts = torch.tensor(asked, dtype=torch.long) * self.block_tokens
            places = (starts[:, None] + torch.arange(self.block_tokens)).view(-1)
            self._asked, self._places = asked, places[places < self.tokens]  # the last block may be shorter
        return self._places

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
        """Read some blocks of some heads.

        Args:
            layer: which layer.
            part: 0 for keys, 1 for values.
            heads: which KV heads.
            blocks: increasing, the same of each head; neighbours are read together.

        Returns:
            `[heads, tokens of the blocks, width]`, keys rotated for the chunk's own positions.

        Raises:
            EntryFault: truncated; digest, a block is not what was stored; values, it holds absurd ones.
            OSError: it cannot be read now.
        """
        runs, sizes = self._runs(part, blocks), self._sizes(part, blocks)
        buffer = torch.empty(len(heads), sum(sizes), dtype=torch.uint8)
        for head, line in zip(heads, buffer, strict=True):
            base, view, place = self._base(layer, part, head), memoryview(line.numpy()), 0
            for start, nbytes in runs:
                self._source.read_into(base + start, view[place : place + nbytes])
                place += nbytes
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
        number, width = ((layer * 2 + part) * self.heads + head) * self.blocks, _digest_bytes(self._secret)
        place = 0
        for block, size in zip(blocks, sizes, strict=True):
            at = (number + block) * width
            if _digest(view[place : place + size], self._secret) != self._digests[at : at + width]:
                raise EntryFault("digest", f"block {block} of layer {layer}, head {head} is not what was stored")
            place += size

    def _width(self, part: int) -> int:
        return self.value_width if part else self.key_width

    def _base(self, layer: int, part: int, head: int) -> int:
        """Where the blocks of a head begin in the file."""
        per_head = [self.tokens * self._width(one) * self.dtype.itemsize for one in (0, 1)]
        return self._data + self.heads * (layer * sum(per_head) + part * per_head[0]) + head * per_head[part]

    def _sizes(self, part: int, blocks: Sequence[int]) -> list[int]:
        """Bytes of some blocks of a head."""
        token_bytes = self._width(part) * self.dtype.itemsize
        return [min(self.block_tokens, self.tokens - one * self.block_tokens) * token_bytes for one in blocks]

    def _runs(self, part: int, blocks: Sequence[int]) -> list[tuple[int, int]]:
        """Where each run of neighbours begins behind the base of a head, and its bytes."""
        cuts = [place for place in range(1, len(blocks)) if blocks[place] != blocks[place - 1] + 1]
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


def _text(table: Tensor) -> str:
    return base64.b64encode(table.float().contiguous().numpy().tobytes()).decode()


def _tables_of(header: dict[str, Any]) -> tuple[tuple[Tensor, Tensor], ...]:
    """The rotary tables in a header, as `ChunkKV.tables`."""
    made = [[_tensor(text).view(header["shape"][2], -1) for text in pair] for pair in header["tables"]]
    return tuple((cos, sin) for cos, sin in made)


def _tensor(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype=torch.float32)


def _read(source: Source, start: int, count: int) -> bytes:
    if start + count > source.stat.nbytes:
        raise EntryFault("truncated", f"{source.stat.nbytes} bytes, at least {start + count} are expected")
    found = bytearray(count)
    source.read_into(start, memoryview(found))
    return bytes(found)


def _unsealed(source: Source, secret: bytes | None) -> tuple[bytes, bytes]:
    """The text of the header and the digests of the blocks, once the seal was compared."""
    begin = _read(source, 0, len(MAGIC) + _LENGTHS.size)
    if not begin.startswith(MAGIC):
        raise EntryFault("format", f"{begin[: len(MAGIC)]!r} is not how an entry of blocks begins")
    text_bytes, digest_bytes = _LENGTHS.unpack(begin[len(MAGIC) :])
    if text_bytes + digest_bytes > HEADER_CAP_BYTES:
        raise EntryFault("format", f"a header of {text_bytes + digest_bytes} bytes is too long")
    stop = seal_size(secret)
    rest = _read(source, len(begin), stop + text_bytes + digest_bytes)
    check_seal(rest[:stop], secret, begin, rest[stop:])
    return rest[stop : stop + text_bytes], rest[stop + text_bytes :]


def _checked_header(header: dict[str, Any], key: ChunkKey) -> dict[str, Any]:
    """The header, once it was compared with the key, and every number in it is one that can be."""
    if header["fingerprint"] != key.fingerprint:
        raise EntryFault("fingerprint", "computed by another model")
    if header["key"] != key.digest or header["namespace"] != hash_namespace(key.namespace):
        raise EntryFault("key", f"the entry is not of chunk {key.digest}")
    layers, heads, tokens, *widths = header["shape"]
    tables, layer_table = len(header["tables"]), header["layer_table"]
    numbers = [layers, heads, tokens, *widths, header["block_tokens"], *layer_table, *header["order"]]
    is_whole = all(type(number) is int and -1 <= number < 1 << 31 for number in numbers)
    is_whole = is_whole and min(layers, heads, tokens, *widths, header["block_tokens"]) > 0 and len(widths) == 2
    is_whole = is_whole and tokens == len(key.token_ids) and sorted(header["order"]) == list(range(tokens))
    is_whole = is_whole and len(layer_table) == layers and max(layer_table) < tables
    if not is_whole or not DTYPES[header["dtype"]].is_floating_point:
        raise EntryFault("format", f"the header is not one of a chunk of {len(key.token_ids)} tokens")
    return header


def _digest(data: memoryview, secret: bytes | None) -> bytes:
    state = content_hasher(secret)
    state.update(data)
    found: bytes = state.digest()
    return found


def _digest_bytes(secret: bytes | None) -> int:
    return int(content_hasher(secret).digest_size)
