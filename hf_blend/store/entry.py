# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Stored entries: named tensors under a sealed header; and one chunk as an entry and back.

An entry is a safetensors file, so any safetensors reader opens it. Its header begins with the kind and a seal, at a
fixed position, over all other bytes of the header: the seal is compared before anything is parsed. Then the header
must be, byte for byte, what we would have written for what it says, so that renamed, reordered, repeated or padded
content cannot pass. It holds a digest of each tensor: tensors can be read, checked and used one by one. A kind is a
text such as "hf_blend.chunk/2"; the room that writes it checks what the header says besides.

Of a chunk every byte is verified once, where it enters, before it is handed out. Its entry holds, in this order: token
ids, the ids of the chunk prefix, the importance of each token if it is known, the rotary tables, then the states of
one layer after the other, so that a layer is one read. The header names the codec of the states, and their dtype
where it packs them into another one: `raw`, or `int8:BF16`.

Each check finds what no other can: the seal of the header (damage, before anything is parsed), its canonical
form (no second reading of what it says), the ids and the fingerprint (the chunk that was asked for), the layout (the
model that asks), and the digest of each tensor (its bytes).
"""

import contextlib
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from .. import plugins
from ..errors import ConfigError, PluginNotFoundError, StoreError
from .chunk import ChunkKey, ChunkKV, Layout, is_importance, kinds_of
from .codecs.base import Codec
from .tiers.base import EntryFault, Source, as_fault

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
KIND = "hf_blend.chunk/2"
IMPORTANCE = "importance"
_MAX_IDS = 1 << 24
PROVENANCE = "isolated"  # computed from what its key names; what a caller's own forward computed has no way in


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

    def __init__(self, source: Source, kind: str | Sequence[str]) -> None:
        raw, kinds = read_raw_header(source), (kind,) if isinstance(kind, str) else kind
        self.source, self.header = source, Header.decode(raw, _kind_of(raw, kinds))
        excess = source.stat.nbytes - len(raw) - self.header.nbytes
        if excess:
            reason = "truncated" if excess < 0 else "format"
            raise EntryFault(reason, f"{abs(excess)} bytes too {'few' if excess < 0 else 'many'}")
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


@dataclass(frozen=True)
class Packing:
    """A codec, and the dtype of what it packs."""

    name: str
    codec: Codec
    dtype: torch.dtype | None

    @classmethod
    def of_chunk(cls, chunk: ChunkKV, codec: str) -> "Packing":
        """Choose the packing of a chunk to be stored; raises StoreError if its states are of several dtypes."""
        dtypes = {dtype for layer in chunk.layout.layers for _, _, dtype in layer}
        packing = cls(codec, plugins.load("store.codecs", codec)(), min(dtypes, key=str, default=None))
        if len(dtypes) > 1 and not packing.codec.is_exact:
            raise StoreError(
                f"the K and V of chunk {chunk.key.digest} are {', '.join(sorted(map(str, dtypes)))}, but the codec "
                f"{codec} packs one dtype. Open the store with codec='raw'."
            )
        return packing

    @classmethod
    def of_text(cls, text: str) -> "Packing":
        """Find the packing that an entry names; raises EntryFault("codec") if there is none of that name."""
        name, _, dtype = text.partition(":")
        with contextlib.suppress(PluginNotFoundError, KeyError):
            packing = cls(name, plugins.load("store.codecs", name)(), DTYPES[dtype] if dtype else None)
            if packing.text == text:
                return packing
        raise EntryFault("codec", f"packed by {text!r:.40}, which this version cannot read", corrupt=False)

    @property
    def text(self) -> str:
        """What the header says."""
        return self.name if self.codec.is_exact else f"{self.name}:{NAMES.get(self.dtype)}"

    def states(self, take: Callable[[str], Tensor], index: int, kind: str) -> Tensor:
        """Unpack keys, values or projections of one layer.

        Shape: `[kv_heads, tokens, head_dim]`.
        """
        packed = {part.suffix: take(f"layer.{index}.{kind}{part.suffix}") for part in self.codec.parts(kind)}
        with as_fault(f"layer {index}"):
            return self.codec.unpack(kind, packed, self.dtype)


class PackedChunk:
    """A chunk as it is written, and as it will be read again."""

    def __init__(self, chunk: ChunkKV, codec: str) -> None:
        packing = Packing.of_chunk(chunk, codec)
        self.key = chunk.key
        self.chunk = chunk  # as it will be read again
        self._codec = packing.text
        self._tensors: list[tuple[str, Tensor]] = []
        if packing.codec.is_exact:
            self._tensors += chunk.named_tensors()
            return
        for index, table in enumerate(chunk.tables):
            self._tensors += zip((f"table.{index}.cos", f"table.{index}.sin"), table, strict=True)
        layers = []
        for index, states in enumerate(chunk.layers):
            read_again = []
            for kind, tensor in zip(kinds_of(states), states, strict=True):
                packed = dict(zip(packing.codec.parts(kind), packing.codec.pack(kind, tensor), strict=True))
                by_suffix = {part.suffix: content for part, content in packed.items()}
                self._tensors += ((f"layer.{index}.{kind}{suffix}", part) for suffix, part in by_suffix.items())
                read_again.append(packing.codec.unpack(kind, by_suffix, tensor.dtype))
            layers.append(tuple(read_again))
        self.chunk = replace(chunk, layers=tuple(layers))

    @cached_property
    def parts(self) -> list[memoryview]:
        """The bytes of the entry; equal chunks give equal bytes."""
        return pack_entry(KIND, about_chunk(self.chunk, self._codec), [*leading_tensors(self.chunk), *self._tensors])


class EntryFormat:
    """What an entry of a store looks like."""

    kinds: tuple[str, ...] = (KIND,)  # that can be read

    def __init__(self, codec: str) -> None:
        self.codec = codec

    def pack(self, chunk: ChunkKV) -> PackedChunk:
        """Pack a chunk, which must not change until it was written."""
        return PackedChunk(chunk, self.codec)

    def open(self, source: Source, key: ChunkKey, layout: Layout | None) -> "EntryReader":
        """Check the header of an entry against a key and a layout; raises EntryFault."""
        return EntryReader(source, key, layout)


def about_chunk(chunk: ChunkKV, codec: str) -> dict[str, str]:
    """Give the texts of a chunk's header."""
    about = {
        "provenance": PROVENANCE,
        "key": chunk.key.digest,
        "fingerprint": chunk.key.fingerprint,
        "namespace": hash_namespace(chunk.key.namespace),
        "codec": codec,
        "canary": chunk.canary,
        "layer_table": compact(chunk.layer_table),
        "digests": "",
    }
    if chunk.tokenizer:
        about["tokenizer"] = chunk.tokenizer
    if chunk.importance is not None:
        about["question"] = chunk.question
    return about


def leading_tensors(chunk: ChunkKV) -> list[tuple[str, Tensor]]:
    """Give the first tensors of an entry."""
    prefix = torch.tensor(chunk.key.chunk_prefix_ids, dtype=torch.int64)
    leading = [("token_ids", torch.tensor(chunk.key.token_ids)), ("chunk_prefix_ids", prefix)]
    if chunk.importance is not None:
        padding = _padded(chunk.tokens) - chunk.tokens
        leading.append((IMPORTANCE, torch.nn.functional.pad(chunk.importance, (0, padding))))
    return leading


def _padded(tokens: int) -> int:
    """How many float16 keep what is behind them aligned to eight bytes."""
    return tokens + -tokens % 4


def read_key(source: Source, namespace: str, kinds: Sequence[str] = (KIND,)) -> ChunkKey:
    """Find out which chunk an entry holds, without reading its KV, from the sealed header and ids that prove it.

    Listing does this for each entry; the whole header is checked when its chunk is read.
    """
    raw = read_raw_header(source)
    _check_sealed(raw, _kind_of(raw, kinds))
    with as_fault("the header"):
        rows = json.loads(raw[8:])
        about = rows["__metadata__"]
        digest, fingerprint, space = str(about["key"]), str(about["fingerprint"]), str(about["namespace"])
        tokens, prefix = int(rows["token_ids"]["shape"][0]), int(rows["chunk_prefix_ids"]["shape"][0])
    if space != hash_namespace(namespace):
        raise EntryFault("namespace", f"the entry {digest} belongs to another namespace", corrupt=False)
    if not (tokens >= 0 and prefix >= 0 and tokens + prefix <= _MAX_IDS):
        raise EntryFault("format", f"{tokens + prefix} token ids are not those of a chunk")
    if len(raw) + 8 * (tokens + prefix) > source.stat.nbytes:
        raise EntryFault("truncated", f"{source.stat.nbytes} bytes cannot hold {tokens} and {prefix} token ids")
    ids = np.empty(tokens + prefix, "<i8")
    source.read_into(len(raw), ids.view(np.uint8).data)
    try:
        key = ChunkKey(fingerprint, ids[tokens:].tolist(), ids[:tokens].tolist(), namespace)
    except ConfigError as error:
        raise EntryFault("key", f"the entry holds no token ids ({error})") from None
    if key.digest != digest:
        raise EntryFault("key", f"the token ids are not those of {digest}")
    return key


class EntryReader:
    """An entry whose header was checked against its key; tensors are read and checked when they are asked for."""

    kinds: tuple[str, ...] = (KIND,)

    def __init__(self, source: Source, key: ChunkKey, layout: Layout | None = None) -> None:
        self._file = EntryFile(source, self.kinds)
        self.key = key
        self.header = self._file.header
        with as_fault("the header"):
            self._check_header()
        if layout is not None and layout != self.layout:
            raise EntryFault("layout", f"{self.layout!r:.160} is not what the model has: {layout!r:.160}")
        if self._read_leading() != (key.token_ids, key.chunk_prefix_ids):
            raise EntryFault("key", f"the entry holds other tokens than those of {key.digest}")

    @torch.inference_mode(False)  # requests in any mode share these tensors
    def read(self) -> ChunkKV:
        """Read everything into one buffer."""
        take = self._file.taker(self._file.start, self.header.nbytes)
        with as_fault("the entry"):
            layers = tuple(self._states(take, index) for index in range(len(self._kinds)))
            return self.chunk(layers, self._read_tables(take))

    def chunk(self, layers: Sequence[tuple[Tensor, ...]], tables: tuple[tuple[Tensor, Tensor], ...]) -> ChunkKV:
        """Make the chunk of tensors that were read."""
        about = self.header.about
        texts = about["canary"], about.get("tokenizer", "")
        question = about.get("question", "")
        chunk = ChunkKV(self.key, layers, tables, self.layer_table, *texts, self.importance, question)
        chunk.__dict__["layout"] = self.layout  # a cached property, which would read every layer
        return chunk

    @torch.inference_mode(False)  # requests in any mode share these tensors
    def layers(self, first: int, least_bytes: int = 0) -> list[tuple[Tensor, ...]]:
        """Read the states of one layer or a few, each `[kv_heads, tokens, head_dim]` as in `ChunkKV.layers`."""
        start = self._layer_start(first)
        last = first + 1
        while self._layer_start(last) - start < least_bytes and last < len(self._kinds):
            last += 1
        take = self._file.taker(start, self._layer_start(last) - start)
        with as_fault("the entry"):
            return [self._states(take, index) for index in range(first, last)]

    @torch.inference_mode(False)  # requests in any mode share these tensors
    def tables(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """Read the rotary tables, as in `ChunkKV.tables`; raises as `layers` does."""
        with as_fault("the entry"):
            return self._read_tables(self._file.taker(self._file.start, self._layer_start(0) - self._file.start))

    def leading_forms(self) -> Iterator[tuple[str, int, int | None, int]]:
        """Give name, number of axes, which of them counts tokens, and how many, of what is before the tables."""
        yield ("token_ids", 1, 0, len(self.key.token_ids))
        yield ("chunk_prefix_ids", 1, 0, len(self.key.chunk_prefix_ids))
        if IMPORTANCE in self._file.plans:
            yield (IMPORTANCE, 1, 0, _padded(len(self.key.token_ids)))

    def _check_header(self) -> None:
        """Refuse a header that is not that of the key's chunk, and find out what the entry holds."""
        about, plans, key = self.header.about, self._file.plans, self.key
        if about["fingerprint"] != key.fingerprint:
            raise EntryFault("fingerprint", f"computed by model {about['fingerprint']}, not by {key.fingerprint}")
        if about["key"] != key.digest or about["namespace"] != hash_namespace(key.namespace):
            raise EntryFault("key", f"the entry is of chunk {about['key']}")
        if about["provenance"] != PROVENANCE:
            raise EntryFault("format", f"its provenance is {about['provenance']!r:.40}, expected {PROVENANCE}")
        self._packing = Packing.of_text(about["codec"])
        self.layer_table = tuple(map(int, json.loads(about["layer_table"])))
        self._tables = sum(name.startswith("table.") for name in plans) // 2
        if not all(-1 <= table < self._tables for table in self.layer_table):
            raise EntryFault("format", f"layer_table names a table that is not there: {self.layer_table!r:.80}")
        self._kinds = []
        for index in range(len(self.layer_table)):
            count = 2 * (f"layer.{index}.k" in plans) + (f"layer.{index}.p" in plans)
            self._kinds.append(kinds_of(range(count)))
        expected = list(self._forms())
        if len(expected) != len(plans) or not all(map(_fits, self.header.tensors, expected)):
            raise EntryFault("format", f"names or shapes are not those of a chunk of {len(key.token_ids)} tokens")
        self.layout = self._layout()

    def _forms(self) -> Iterator[tuple[str, int, int | None, int]]:
        """Give the forms, as `leading_forms` does, of all that the entry must hold."""
        tokens = len(self.key.token_ids)
        yield from self.leading_forms()
        for index in range(self._tables):
            yield (f"table.{index}.cos", 2, 0, tokens)
            yield (f"table.{index}.sin", 2, 0, tokens)
        for index, kinds in enumerate(self._kinds):
            for kind in kinds:
                for part in self._packing.codec.parts(kind):
                    yield (f"layer.{index}.{kind}{part.suffix}", part.axes, part.tokens_axis, tokens)

    def _layout(self) -> Layout:
        """Say what the model must have: the number of heads, width and dtype of each tensor when it is unpacked."""
        codec = self._packing.codec
        layers = []
        for index, kinds in enumerate(self._kinds):
            forms = []
            for kind in kinds:
                plan = self._plan(f"layer.{index}.{kind}{codec.parts(kind)[0].suffix}")
                forms.append((plan.shape[0], plan.shape[2], _float_type(self._packing.dtype or DTYPES[plan.dtype])))
            layers.append(tuple(forms))
        tables = []
        for index in range(self._tables):
            cos = self._plan(f"table.{index}.cos")
            sin = self._plan(f"table.{index}.sin")
            tables.append((cos.shape[1], sin.shape[1], _float_type(DTYPES[cos.dtype])))
        return Layout(tuple(layers), tuple(tables), self.layer_table)

    def _plan(self, name: str) -> TensorPlan:
        return self._file.plans[name][0]

    def _layer_start(self, index: int) -> int:
        """Say where the tensors of a layer begin in the file; the end of all for the layer behind the last."""
        for later, kinds in enumerate(self._kinds[index:], index):
            if kinds:
                first = self._packing.codec.parts(kinds[0])[0].suffix
                return self._file.plans[f"layer.{later}.{kinds[0]}{first}"][1]
        return self._file.end

    @torch.inference_mode(False)  # requests in any mode share the importance
    def _read_leading(self) -> tuple[tuple[int, ...], ...]:
        """Read the ids of tokens and prefix, which it gives, and the importance of the tokens, in one read."""
        plans = self.header.tensors[: 3 if IMPORTANCE in self._file.plans else 2]
        for plan in plans[:2]:
            if plan.dtype != "I64":
                raise EntryFault("format", f"{plan.name} are {plan.dtype}, expected I64")
        take = self._file.taker(self._file.start, sum(plan.nbytes for plan in plans))
        self.importance = None
        if IMPORTANCE in self._file.plans:
            tokens = len(self.key.token_ids)
            self.importance = take(IMPORTANCE)[:tokens].clone()  # the last of these: the others are read with it
            if not is_importance(self.importance, tokens):
                raise EntryFault("format", f"the importance of tokens is {self.importance.dtype}, or no such numbers")
        return tuple(tuple(take(plan.name).tolist()) for plan in plans[:2])

    def _read_tables(self, take: Callable[[str], Tensor]) -> tuple[tuple[Tensor, Tensor], ...]:
        return tuple((take(f"table.{index}.cos"), take(f"table.{index}.sin")) for index in range(self._tables))

    def _states(self, take: Callable[[str], Tensor], index: int) -> tuple[Tensor, ...]:
        """Unpack the states of one layer, `[kv_heads, tokens, head_dim]` each."""
        return tuple(self._packing.states(take, index, kind) for kind in self._kinds[index])


def _fits(plan: TensorPlan, expected: tuple[str, int, int | None, int]) -> bool:
    name, axes, axis, tokens = expected
    return plan.name == name and len(plan.shape) == axes and (axis is None or plan.shape[axis] == tokens)


def _float_type(dtype: torch.dtype) -> torch.dtype:
    """Refuse whole numbers where floats are expected."""
    if not dtype.is_floating_point:
        raise EntryFault("format", f"K, V or tables are said to be {dtype}, expected floats")
    return dtype
