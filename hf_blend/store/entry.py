# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""One chunk as bytes and back: every byte is checked before it is handed out.

The file holds, in this order: token ids, sink ids, the rotary tables, then keys and values of one layer after the
other, so that a layer is one read. Each tensor has its own digest: layers can be read, checked and used one by one.
"""

import math
import struct
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..errors import ConfigError, StoreError
from .chunk import ChunkKey, ChunkKV, Layout, has_usable_values
from .header import DTYPES, HEADER_CAP_BYTES, Header, TensorPlan, hash_namespace
from .packing import Packing, layer_kinds, table_count
from .seal import content_hasher
from .tiers.base import EntryFault, Source, as_fault

__all__ = ["EntryReader", "encode_entry", "read_key"]

_MAX_BYTES_PER_TOKEN = 64 << 20  # ten times the KV of the widest models known; more is not a chunk
_MAX_IDS = 1 << 24
_BLOCK_BYTES = 1 << 19  # a part of what a processor's second cache holds
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def encode_entry(chunk: ChunkKV, secret: bytes | None = None, codec: str = "raw") -> list[memoryview]:
    """Write a chunk as an entry; equal chunks give equal bytes."""
    key, packing = chunk.key, Packing.of_chunk(chunk, codec)
    ids = [
        ("token_ids", torch.tensor(key.token_ids)),
        ("chunk_prefix_ids", torch.tensor(key.chunk_prefix_ids, dtype=torch.int64)),
    ]
    named = [*ids, *packing.named_tensors(chunk)]
    views = [_bytes_of(tensor) for _, tensor in named]
    plans = tuple(
        TensorPlan(name, _dtype_name(name, tensor), tuple(tensor.shape), _digest(view, secret))
        for (name, tensor), view in zip(named, views, strict=True)
    )
    about = (key.digest, key.fingerprint, hash_namespace(key.namespace), packing.text)
    header = Header(*about, chunk.layer_table, plans, chunk.canary, chunk.tokenizer)
    return [memoryview(header.encode(secret)), *views]


def read_key(source: Source, namespace: str, secret: bytes | None = None) -> ChunkKey:
    """Find out which chunk an entry holds, without reading its KV."""
    raw = _read_raw_header(source)
    digest, fingerprint, space, tokens, sinks = Header.peek(raw, secret)
    if space != hash_namespace(namespace):
        raise EntryFault("namespace", f"the entry {digest} belongs to another namespace", corrupt=False)
    if tokens + sinks > _MAX_IDS:
        raise EntryFault("format", f"{tokens + sinks} token ids are not a chunk")
    if len(raw) + 8 * (tokens + sinks) > source.stat.nbytes:
        raise EntryFault("truncated", f"{source.stat.nbytes} bytes cannot hold {tokens + sinks} token ids")
    ids = bytearray(8 * (tokens + sinks))
    source.read_into(len(raw), memoryview(ids))
    try:
        values = struct.unpack(f"<{tokens + sinks}q", ids)
        key = ChunkKey(fingerprint, values[tokens:], values[:tokens], namespace)
    except (struct.error, ConfigError) as error:
        raise EntryFault("key", f"the entry holds no token ids ({error})") from None
    if key.digest != digest:
        raise EntryFault("key", f"the token ids are not those of {digest}")
    return key


class EntryReader:
    """An entry whose header was checked against its key; tensors are read and checked when asked for."""

    def __init__(
        self, source: Source, key: ChunkKey, secret: bytes | None = None, layout: Layout | None = None
    ) -> None:
        self._source = source
        self.key = key
        self._secret = secret
        self._expected = layout
        self.header, data_start = _read_header(source, secret)
        with as_fault("the header"):
            self._packing = _check_header(self.header, key)
            self.layout = self._packing.layout(self.header)
        if layout is not None and layout != self.layout:
            raise EntryFault("layout", f"{self.layout!r:.160} is not what the model has: {layout!r:.160}")
        self._kinds = layer_kinds(self.header)
        self._places: dict[str, tuple[TensorPlan, int]] = {}
        for plan in self.header.tensors:
            self._places[plan.name] = (plan, data_start)
            data_start += plan.nbytes
        self._end = data_start
        if self._read_ids() != (key.token_ids, key.chunk_prefix_ids):
            raise EntryFault("key", f"the entry holds other tokens than those of {key.digest}")

    @property
    def nbytes(self) -> int:
        """Size of the chunk in memory, in bytes."""
        return self._packing.unpacked_nbytes(self.header.tensors)

    @torch.inference_mode(False)  # tensors that count what is written to them: see `Guard`
    def read(self) -> ChunkKV:
        """Read everything into one buffer."""
        take = self._taker(self._places["token_ids"][1], self.header.nbytes)
        with as_fault("the entry"):
            layers = tuple(self._states(take, place) for place in range(len(self.header.layer_table)))
            return self.chunk(layers, self._checked_tables(take))

    def chunk(self, layers: Sequence[tuple[Tensor, ...]], tables: tuple[tuple[Tensor, Tensor], ...]) -> ChunkKV:
        """Make the chunk of tensors that were read."""
        about = (self.header.layer_table, self.header.canary, self.header.tokenizer)
        chunk = ChunkKV(self.key, layers, tables, *about)
        chunk.__dict__["layout"] = self.layout  # a cached property
        return chunk

    @torch.inference_mode(False)  # tensors that count what is written to them: see `Guard`
    def layers(self, first: int, least_bytes: int = 0) -> list[tuple[Tensor, ...]]:
        """Read the states of one layer or a few, each `[kv_heads, tokens, head_dim]` as in `ChunkKV.layers`."""
        start, stop, last = self._layer_start(first), self._layer_start(first + 1), first + 1
        while stop - start < least_bytes and last < len(self.header.layer_table):
            last += 1
            stop = self._layer_start(last)
        take = self._taker(start, stop - start)
        with as_fault("the entry"):
            return [self._states(take, place) for place in range(first, last)]

    @torch.inference_mode(False)  # tensors that count what is written to them: see `Guard`
    def tables(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """Read the rotary tables, as in `ChunkKV.tables`; raises as `layers` does."""
        start = self._places["token_ids"][1]
        with as_fault("the entry"):
            return self._checked_tables(self._taker(start, self._layer_start(0) - start))

    def _checked_tables(self, take: Callable[[str], Tensor]) -> tuple[tuple[Tensor, Tensor], ...]:
        tables = tuple(_table(take, place) for place in range(table_count(self.header)))
        usable = all(has_usable_values(part) for pair in tables for part in pair)
        if not usable or (self._expected is not None and not self._expected.fits_norms(tables)):
            raise EntryFault("values", f"a table of {len(tables)} holds NaN or infinity, or stretches what it turns")
        return tables

    def _layer_start(self, place: int) -> int:
        """Where the tensors of a layer begin in the file; the end of all for the layer behind the last."""
        for later, kinds in enumerate(self._kinds[place:], place):
            if kinds:
                first = next(iter(self._packing.codec.parts(kinds[0]))).suffix
                return self._places[f"layer.{later}.{kinds[0]}{first}"][1]
        return self._end

    def _taker(self, start: int, nbytes: int) -> Callable[[str], Tensor]:
        """Reads the tensors of a stretch of the file into one buffer, which is filled as far as they need it."""
        buffer, fetched = _allocate(-(-nbytes // 64) * 64), 0
        whole, typed = memoryview(buffer.numpy())[:nbytes], {}

        def take(name: str) -> Tensor:
            nonlocal fetched
            plan, place = self._places[name]
            known, end = place - start, place - start + plan.nbytes
            digest = content_hasher(self._secret)
            while known < end:  # by blocks that are checked before they leave the processor's cache
                while fetched <= known:
                    block = whole[fetched : fetched + _BLOCK_BYTES]
                    self._source.read_into(start + fetched, block)
                    fetched += len(block)
                digest.update(whole[known : min(fetched, end)])
                known = min(fetched, end)
            if digest.hexdigest() != plan.digest:
                raise EntryFault("digest", f"{plan.name} is not what was stored")
            dtype, first = DTYPES[plan.dtype], place - start
            if first % dtype.itemsize:
                return buffer[first:end].clone().view(dtype).view(plan.shape)
            if dtype not in typed:
                typed[dtype] = buffer.view(dtype)
            return typed[dtype].as_strided(plan.shape, _strides(plan.shape), first // dtype.itemsize)

        return take

    def _read_ids(self) -> tuple[tuple[int, ...], ...]:
        plans = [self._places[name] for name in ("token_ids", "chunk_prefix_ids")]
        for plan, _ in plans:
            if plan.dtype != "I64":
                raise EntryFault("format", f"{plan.name} are {plan.dtype}, expected I64")
        take = self._taker(plans[0][1], sum(plan.nbytes for plan, _ in plans))
        return tuple(tuple(take(plan.name).tolist()) for plan, _ in plans)

    def _states(self, take: Callable[[str], Tensor], place: int) -> tuple[Tensor, ...]:
        return tuple(self._packing.states(take, place, kind) for kind in self._kinds[place])


def _table(take: Callable[[str], Tensor], place: int) -> tuple[Tensor, Tensor]:
    return take(f"table.{place}.cos"), take(f"table.{place}.sin")


def _read_header(source: Source, secret: bytes | None) -> tuple[Header, int]:
    """The header and where the data begins; nothing is allocated before its size is known to be sane."""
    raw = _read_raw_header(source)
    header = Header.decode(raw, secret)
    excess = source.stat.nbytes - len(raw) - header.nbytes
    if excess:
        reason = "truncated" if excess < 0 else "format"
        raise EntryFault(reason, f"{abs(excess)} bytes too {'few' if excess < 0 else 'many'}")
    return header, len(raw)


def _read_raw_header(source: Source) -> bytes:
    length = bytearray(8)
    source.read_into(0, memoryview(length))
    size = int.from_bytes(length, "little")
    if size > HEADER_CAP_BYTES:
        raise EntryFault("format", f"a header of {size} bytes, at most {HEADER_CAP_BYTES} are read")
    if 8 + size > source.stat.nbytes:
        raise EntryFault("truncated", f"{source.stat.nbytes} bytes cannot hold a header of {size}")
    raw = bytearray(8 + size)
    source.read_into(0, memoryview(raw))
    return bytes(raw)


def _check_header(header: Header, key: ChunkKey) -> Packing:
    if header.fingerprint != key.fingerprint:
        raise EntryFault("fingerprint", f"computed by model {header.fingerprint}, not by {key.fingerprint}")
    if header.key != key.digest or header.namespace != hash_namespace(key.namespace):
        raise EntryFault("key", f"the entry is of chunk {header.key}")
    packing = Packing.of_header(header)
    packing.check(header, key)
    if header.nbytes > (len(key.token_ids) + len(key.chunk_prefix_ids)) * _MAX_BYTES_PER_TOKEN:
        raise EntryFault("format", f"{header.nbytes} bytes are too many for {len(key.token_ids)} tokens")
    return packing


def _allocate(nbytes: int) -> Tensor:
    try:
        return torch.empty(nbytes, dtype=torch.uint8)
    except RuntimeError as error:  # so torch says that memory is short
        raise MemoryError(str(error)) from error


def _dtype_name(name: str, tensor: Tensor) -> str:
    if tensor.dtype not in _DTYPE_NAMES:
        raise StoreError(f"{name} is {tensor.dtype}, expected one of {', '.join(DTYPES)}. Convert it before storing.")
    return _DTYPE_NAMES[tensor.dtype]


def _bytes_of(tensor: Tensor) -> memoryview:
    return memoryview(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _digest(data: memoryview, secret: bytes | None) -> str:
    digest = content_hasher(secret)
    digest.update(data)
    found: str = digest.hexdigest()
    return found
