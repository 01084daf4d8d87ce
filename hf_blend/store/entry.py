# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""One chunk as bytes and back: every byte is checked before it is handed out.

The file holds, in this order: token ids, sink ids, the rotary tables, then keys and values of one layer after the
other, so that a layer is one read. Each tensor has its own digest: layers can be read, checked and used one by one.
"""

import hashlib
import struct
from collections.abc import Callable

import torch
import xxhash
from torch import Tensor

from ..errors import ConfigError, StoreError
from .chunk import ChunkKey, ChunkKV
from .header import DTYPES, HEADER_CAP_BYTES, Header, TensorPlan, hash_namespace
from .packing import Packing
from .tiers.base import EntryFault, Source

__all__ = ["EntryReader", "encode_entry", "read_key"]

_MAX_BYTES_PER_TOKEN = 64 << 20  # ten times the KV of the widest models known; more is not a chunk
_MAX_IDS = 1 << 24
_BLOCK_BYTES = 1 << 20  # about what a processor's second cache holds
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def encode_entry(chunk: ChunkKV, secret: bytes | None = None, codec: str = "raw") -> list[memoryview]:
    """Write a chunk as an entry; equal chunks give equal bytes.

    Args:
        chunk: on the CPU.
        secret: signs the entry; its digests are then sha256, which nobody can meet with other bytes.
        codec: how K and V are packed.

    Returns:
        The bytes in pieces: the header, then each tensor without a copy.

    Raises:
        StoreError: a dtype that cannot be stored, or too many layers.
    """
    key, packing = chunk.key, Packing.of_chunk(chunk, codec)
    ids = [("token_ids", torch.tensor(key.token_ids)), ("sink_ids", torch.tensor(key.sink_ids, dtype=torch.int64))]
    named = [*ids, *packing.named_tensors(chunk)]
    views = [_bytes_of(tensor) for _, tensor in named]
    plans = tuple(
        TensorPlan(name, _dtype_name(name, tensor), tuple(tensor.shape), _digest(view, secret))
        for (name, tensor), view in zip(named, views, strict=True)
    )
    header = Header(key.digest, key.fingerprint, hash_namespace(key.namespace), packing.text, chunk.layer_table, plans)
    return [memoryview(header.encode(secret)), *views]


def read_key(source: Source, namespace: str) -> ChunkKey:
    """Find out which chunk an entry holds, without reading its KV.

    Args:
        source: an open entry.
        namespace: of the store.

    Returns:
        The key, whose digest is the one that the entry claims.

    Raises:
        EntryFault: namespace, if the entry belongs to another; otherwise as in `EntryReader`.
    """
    raw = _read_raw_header(source)
    digest, fingerprint, space, tokens, sinks = Header.peek(raw)
    if space != hash_namespace(namespace):
        raise EntryFault("namespace", f"the entry {digest} belongs to another namespace", corrupt=False)
    if tokens + sinks > _MAX_IDS:
        raise EntryFault("format", f"{tokens + sinks} token ids are not a chunk")
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
    """An entry whose header was checked against its key; tensors are read and checked when asked for.

    Args:
        source: an open entry; it stays open, and whoever opened it closes it.
        key: which chunk is wanted.
        secret: that the entry must be signed with; None accepts only entries that are not signed.

    Raises:
        EntryFault: the header is damaged, belongs to another chunk, or was not signed with the secret (auth).
    """

    def __init__(self, source: Source, key: ChunkKey, secret: bytes | None = None) -> None:
        self._source = source
        self._key = key
        self._secret = secret
        self.header, data_start = _read_header(source, secret)
        self._packing = _check_header(self.header, key)
        self._places: dict[str, tuple[TensorPlan, int]] = {}
        for plan in self.header.tensors:
            self._places[plan.name] = (plan, data_start)
            data_start += plan.nbytes
        if self._read_ids() != (key.token_ids, key.sink_ids):
            raise EntryFault("key", "the entry holds other tokens than its key")

    @property
    def nbytes(self) -> int:
        """Size of the chunk in memory, in bytes."""
        return self._packing.unpacked_nbytes(self.header.tensors)

    def read(self) -> ChunkKV:
        """Read everything into one buffer.

        Returns:
            The chunk, bit for bit as it was stored, or as near as its codec says.

        Raises:
            EntryFault: truncated or digest.
            OSError: it cannot be read now.
            MemoryError: there is no room for it.
        """
        buffer = _allocate(self.header.nbytes)
        whole, start = memoryview(buffer.numpy()), self._places["token_ids"][1]

        fetched = 0

        def take(name: str) -> Tensor:
            nonlocal fetched
            plan, place = self._places[name]
            inside = slice(place - start, place - start + plan.nbytes)
            if fetched < inside.stop:  # several small tensors by one call, checked before they leave the cache
                block = slice(fetched, min(len(whole), max(inside.stop, fetched + _BLOCK_BYTES)))
                self._source.read_into(start + block.start, whole[block])
                fetched = block.stop
            return self._checked(plan, buffer[inside], whole[inside])

        layers = tuple(self._states(take, place) for place in range(len(self.header.layer_table)))
        tables = tuple(_table(take, place) for place in range(_table_count(self.header)))
        return ChunkKV(self._key, layers, tables, self.header.layer_table)

    def layer(self, place: int) -> tuple[Tensor, Tensor]:
        """Read keys and values of one layer, each `[kv_heads, tokens, head_dim]` as in `ChunkKV.layers`.

        Args:
            place: number of the layer.

        Returns:
            Keys and values.

        Raises:
            EntryFault: truncated or digest.
            OSError: it cannot be read now.
            MemoryError: there is no room for it.
        """

        def take(name: str) -> Tensor:
            plan, start = self._places[name]
            return self._fill(plan, start, _allocate(plan.nbytes))

        return self._states(take, place)

    def tables(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """Read the rotary tables, as in `ChunkKV.tables`; raises as `layer` does."""

        def take(name: str) -> Tensor:
            plan, start = self._places[name]
            return self._fill(plan, start, _allocate(plan.nbytes))

        return tuple(_table(take, place) for place in range(_table_count(self.header)))

    def _read_ids(self) -> tuple[tuple[int, ...], ...]:
        ids = []
        for name in ("token_ids", "sink_ids"):
            plan, start = self._places[name]
            if plan.dtype != "I64":
                raise EntryFault("format", f"{plan.name} are {plan.dtype}, wanted I64")
            ids.append(tuple(self._fill(plan, start, _allocate(plan.nbytes)).tolist()))
        return tuple(ids)

    def _fill(self, plan: TensorPlan, start: int, buffer: Tensor) -> Tensor:
        """Fill `buffer` and check it while it is still in the processor's cache."""
        view = memoryview(buffer.numpy())
        self._source.read_into(start, view)
        return self._checked(plan, buffer, view)

    def _checked(self, plan: TensorPlan, buffer: Tensor, view: memoryview) -> Tensor:
        """The tensor in a buffer, if it is the one that was stored."""
        if _digest(view, self._secret) != plan.digest:
            raise EntryFault("digest", f"{plan.name} is not what was stored")
        dtype = DTYPES[plan.dtype]
        if buffer.storage_offset() % dtype.itemsize:
            buffer = buffer.clone()
        return buffer.view(dtype).view(plan.shape)

    def _states(self, take: Callable[[str], Tensor], place: int) -> tuple[Tensor, Tensor]:
        return self._packing.states(take, place, "k"), self._packing.states(take, place, "v")


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
    if header.nbytes > (len(key.token_ids) + len(key.sink_ids)) * _MAX_BYTES_PER_TOKEN:
        raise EntryFault("format", f"{header.nbytes} bytes are too many for {len(key.token_ids)} tokens")
    return packing


def _table_count(header: Header) -> int:
    return sum(plan.name.startswith("table.") for plan in header.tensors) // 2


def _allocate(nbytes: int) -> Tensor:
    try:
        return torch.empty(nbytes, dtype=torch.uint8)
    except RuntimeError as error:  # so torch says that memory is short
        raise MemoryError(str(error)) from error


def _dtype_name(name: str, tensor: Tensor) -> str:
    if tensor.dtype not in _DTYPE_NAMES:
        raise StoreError(f"{name} is {tensor.dtype}, wanted one of {', '.join(DTYPES)}. Convert it before storing.")
    return _DTYPE_NAMES[tensor.dtype]


def _bytes_of(tensor: Tensor) -> memoryview:
    return memoryview(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())


def _digest(data: memoryview, secret: bytes | None) -> str:
    """Fast against accidents; where someone may do it on purpose, cryptographic and bound by the signed header."""
    return xxhash.xxh3_128_hexdigest(data) if secret is None else hashlib.sha256(data).hexdigest()
