# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The one format of stored entries, whatever their kind: named tensors under a sealed header.

An entry is a safetensors file, so any safetensors reader opens it. Its header begins with the kind and a seal, at a
fixed position, over all other bytes of the header: the seal is compared before anything is parsed. Then the header
must be, byte for byte, what we would have written for what it says, so that renamed, reordered, repeated or padded
content cannot pass. It holds a digest of each tensor: tensors can be read, checked and used one by one.

A kind is a text such as "hf_blend.chunk/2"; the room that writes it checks what the header says besides.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
import xxhash
from torch import Tensor

from ..errors import StoreError
from .tiers.base import EntryFault, Source, as_fault

__all__ = ["DTYPES", "EntryFile", "Header", "TensorPlan", "digest_of", "hash_namespace", "pack_entry"]

tensor_digest = xxhash.xxh3_128  # against accidents; a sealed header binds it
HEADER_CAP_BYTES = 1 << 20
KNOWN_HEADERS = 256  # parsed ones that are remembered: the same bytes say the same
_MOST_AXES = 8
_OPENING = b'{"__metadata__":{'
_SEALED_BY = b"sha256:"
_SEAL_BYTES = len(_SEALED_BY) + 2 * hashlib.sha256().digest_size
DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
    "U8": torch.uint8,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorPlan:
    """One tensor of an entry: its safetensors dtype, its shape and the digest of its bytes in hex."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: str

    @cached_property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Header:
    """What an entry says about itself: texts by name, the digests of the tensors among them, and the tensors."""

    kind: str
    about: Mapping[str, str]
    tensors: tuple[TensorPlan, ...]

    def encode(self) -> bytes:
        """The only form of this header: length and JSON, padded so that the data begins at a multiple of 64 bytes."""
        digests = compact([plan.digest for plan in self.tensors])
        rows: dict[str, object] = {"__metadata__": {**self.about, "digests": digests}}
        start = 0
        for plan in self.tensors:
            stop = start + plan.nbytes
            rows[plan.name] = {"dtype": plan.dtype, "shape": plan.shape, "data_offsets": [start, stop]}
            start = stop
        begin = _beginning(self.kind)
        rest = b'",' + compact(rows).encode()[len(_OPENING) :]
        size = len(begin) + _SEAL_BYTES + len(rest)
        rest += b" " * (-(8 + size) % 64)
        size += -(8 + size) % 64
        if size > HEADER_CAP_BYTES:
            raise StoreError(
                f"the header of {self.about.get('key', 'an entry')} takes {size} bytes, at most {HEADER_CAP_BYTES} "
                f"are read back: {len(self.tensors)} tensors are too many for one entry."
            )
        begin = size.to_bytes(8, "little") + begin
        return begin + _seal(begin, rest) + rest

    @classmethod
    @lru_cache(maxsize=KNOWN_HEADERS)
    def decode(cls, raw: bytes, kind: str) -> "Header":
        """Read a header."""
        _check_sealed(raw, kind)
        with as_fault("the header"):
            rows = json.loads(raw[8:])
            about = {name: _checked_text(text) for name, text in rows.pop("__metadata__").items()}
            del about["format"], about["seal"]
            plans = zip(rows.items(), json.loads(about["digests"]), strict=True)
            tensors = tuple(
                TensorPlan(name, row["dtype"], _checked_shape(row["shape"]), _checked_text(digest))
                for (name, row), digest in plans
            )
            header = cls(kind, about, tensors)
            canonical = header.encode()
        if canonical != raw:
            raise EntryFault("format", f"the header of {len(raw)} bytes is not what its content says")
        return header

    @staticmethod
    def peek(raw: bytes, kinds: Sequence[str]) -> dict[str, Any]:
        """Parse a header whose seal fits; what it says is still to be proved."""
        _check_sealed(raw, _kind_of(raw, kinds))
        with as_fault("the header"):
            rows: dict[str, Any] = json.loads(raw[8:])
            return rows

    @cached_property
    def nbytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(plan.nbytes for plan in self.tensors)


def pack_entry(kind: str, about: Mapping[str, str], tensors: Iterable[tuple[str, Tensor]]) -> list[memoryview]:
    """Write tensors as an entry; equal content gives equal bytes.

    A text of `about` may be named "digests" for its position among the others; those of the tensors take it.
    """
    plans, views = list[TensorPlan](), list[memoryview]()
    for name, tensor in tensors:
        if tensor.dtype not in NAMES:
            expected = ", ".join(DTYPES)
            raise StoreError(f"{name} is {tensor.dtype}, expected one of {expected}. Convert it before storing.")
        views.append(bytes_of(tensor))
        digest = digest_of(views[-1]).hex()
        plans.append(TensorPlan(name, NAMES[tensor.dtype], tuple(tensor.shape), digest))
    return [memoryview(Header(kind, about, tuple(plans)).encode()), *views]


class EntryFile:
    """An opened entry of a kind, whose header was checked; tensors are read and checked when they are asked for."""

    def __init__(self, source: Source, kind: str | Sequence[str], most_bytes: int | None = None) -> None:
        raw, kinds = read_raw_header(source), (kind,) if isinstance(kind, str) else kind
        self.source, self.header = source, Header.decode(raw, _kind_of(raw, kinds))
        excess = source.stat.nbytes - len(raw) - self.header.nbytes
        if excess:
            reason = "truncated" if excess < 0 else "format"
            raise EntryFault(reason, f"{abs(excess)} bytes too {'few' if excess < 0 else 'many'}")
        if most_bytes is not None and self.header.nbytes > most_bytes:
            raise EntryFault("layout", f"its tensors take {self.header.nbytes} bytes, expected at most {most_bytes}")
        self.start = self.end = len(raw)
        self.plans: dict[str, tuple[TensorPlan, int]] = {}  # with the offset in the file
        for plan in self.header.tensors:
            self.plans[plan.name] = plan, self.end
            self.end += plan.nbytes

    def tensors(self) -> dict[str, Tensor]:
        """Read everything."""
        try:
            take = self.taker(self.start, self.header.nbytes)
        except MemoryError as error:
            raise EntryFault("format", f"its {self.header.nbytes} bytes are larger than the memory") from error
        with as_fault("the entry"):
            return {name: take(name) for name in self.plans}

    def taker(self, start: int, nbytes: int) -> Callable[[str], Tensor]:
        """Read the tensors of a stretch of the file into one buffer, which is filled as far as they need it."""
        buffer = _allocate(-(-nbytes // 64) * 64)
        view = memoryview(buffer.numpy())[:nbytes]
        fetched = 0

        def take(name: str) -> Tensor:
            nonlocal fetched
            plan, offset = self.plans[name]
            first = offset - start
            end = first + plan.nbytes
            if fetched < end:
                self.source.read_into(start + fetched, view[fetched:end])
                fetched = end
            if tensor_digest(view[first:end]).hexdigest() != plan.digest:
                raise EntryFault("digest", f"{plan.name} is not what was stored")
            dtype = DTYPES[plan.dtype]
            content = buffer[first:end]
            if first % dtype.itemsize:
                content = content.clone()
            return content.view(dtype).view(plan.shape)

        return take


def read_raw_header(source: Source) -> bytes:
    """Read length and header; nothing is allocated before its size is known to be sane."""
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


@lru_cache(maxsize=64)
def hash_namespace(namespace: str) -> str:
    """Name a namespace without its text."""
    return hashlib.sha256(b"hf_blend.namespace/1\0" + namespace.encode("utf-8", "surrogatepass")).hexdigest()


def digest_of(data: memoryview) -> bytes:
    """Digest some bytes as an entry does."""
    digest: bytes = tensor_digest(data).digest()
    return digest


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor on the CPU."""
    return memoryview(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())


def compact(value: object) -> str:
    """Write JSON without white space."""
    return json.dumps(value, separators=(",", ":"))


def _checked_text(text: object) -> str:
    """Refuse anything but a text, by ValueError."""
    if not isinstance(text, str):
        raise ValueError(text)
    return text


def _beginning(kind: str) -> bytes:
    return _OPENING + f'"format":"{kind}","seal":"'.encode()


def _kind_of(raw: bytes, kinds: Sequence[str]) -> str:
    """The one of some kinds that a header says; the first where it says none of them."""
    return next((kind for kind in kinds if raw[8:].startswith(_beginning(kind))), kinds[0])


def _seal(*content: bytes) -> bytes:
    state = hashlib.sha256(b"hf_blend.seal\0")
    for piece in content:
        state.update(piece)
    return _SEALED_BY + state.hexdigest().encode()


def _check_sealed(raw: bytes, kind: str) -> None:
    """Compare the seal of a header, which is at a fixed position, with all other bytes of the header."""
    begin = _beginning(kind)
    start = 8 + len(begin)
    if raw[8:].startswith(_OPENING + b'"format":"hf_blend.') and raw[8:start] != begin:
        raise EntryFault("kind", f"the entry is none of {kind}: {raw[8:64]!r}", corrupt=False)
    if raw[8:start] != begin:
        raise EntryFault("format", f"the entry does not begin as one of {kind}: {raw[8:48]!r}")
    stop = start + _SEAL_BYTES
    if raw[start:stop] != _seal(raw[:start], raw[stop:]):
        raise EntryFault("format", f"the seal {raw[start:stop]!r:.40} does not fit the {len(raw)} bytes of the header")


def _checked_shape(shape: Sequence[Any]) -> tuple[int, ...]:
    """Refuse what is no shape of a tensor, by ValueError; torch ends the process over thousands of axes."""
    if len(shape) > _MOST_AXES or not all(type(size) is int and 0 <= size < 1 << 40 for size in shape):
        raise ValueError(shape)
    return tuple(shape)


def _allocate(nbytes: int) -> Tensor:
    try:
        return torch.empty(nbytes, dtype=torch.uint8)
    except RuntimeError as error:  # so torch says that memory is short
        raise MemoryError(str(error)) from error
