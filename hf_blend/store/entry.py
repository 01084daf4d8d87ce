# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""One chunk as an entry and back: every byte is checked before it is handed out.

The entry holds, in this order: token ids, the ids of the chunk prefix, the rotary tables, then the states of one layer
after the other, so that a layer is one read. The header names the codec of the states, and their dtype where it packs
them into another one: `raw`, or `int8:BF16`.

An entry in blocks can be read in part, too: its tokens are in another order, which stands behind the ids, with the
digests of all blocks: a block has the keys, or the values, of some tokens in one layer and one KV head.
"""

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from .. import plugins
from ..errors import ConfigError, PluginNotFoundError, StoreError
from .chunk import ChunkKey, ChunkKV, Layout, has_usable_values, kinds_of
from .codecs.base import Codec
from .format import (
    DTYPES,
    NAMES,
    EntryFile,
    Header,
    TensorPlan,
    bytes_of,
    compact,
    digest_of,
    hash_namespace,
    pack_entry,
    read_raw_header,
    tensor_digest,
)
from .tiers.base import EntryFault, Source, as_fault

__all__ = ["EntryReader", "Packing", "encode_entry", "read_key", "stored_as"]

KIND = "hf_blend.chunk/2"
BLOCKS = "hf_blend.blocks/4"
KINDS = (KIND, BLOCKS)
PROVENANCE = "isolated"  # computed from the chunk alone; KV cut out of a live request has no way into the store
_TEXTS = ("provenance", "key", "fingerprint", "namespace", "codec", "canary", "layer_table", "digests")
_MAX_BYTES_PER_TOKEN = 64 << 20  # ten times the KV of the widest models known; more is not a chunk
_MAX_IDS = 1 << 24


def stored_as(chunk: ChunkKV, codec: str) -> ChunkKV:
    """Give a chunk as it will be read again."""
    packing = Packing(codec, plugins.load("store.codecs", codec)(), None)
    if packing.codec.is_exact:
        return chunk
    layers = tuple(
        tuple(packing.again(kind, tensor) for kind, tensor in zip(kinds_of(states), states, strict=True))
        for states in chunk.layers
    )
    return replace(chunk, layers=layers)


@dataclass(frozen=True)
class Packing:
    """A codec, and the dtype of what it packs."""

    name: str
    codec: Codec
    dtype: torch.dtype | None

    @classmethod
    def of_chunk(cls, chunk: ChunkKV, codec: str) -> "Packing":
        """The packing of a chunk that is to be stored; raises StoreError if its states are of several dtypes."""
        dtypes = {states.dtype for layer in chunk.layers for states in layer}
        packing = cls(codec, plugins.load("store.codecs", codec)(), min(dtypes, key=str, default=None))
        if len(dtypes) > 1 and not packing.codec.is_exact:
            raise StoreError(
                f"the K and V of chunk {chunk.key.digest} are {', '.join(sorted(map(str, dtypes)))}, but the codec "
                f"{codec} packs one dtype. Open the store with codec='raw'."
            )
        return packing

    @classmethod
    def of_text(cls, text: str) -> "Packing":
        """The packing that an entry names; raises EntryFault("codec") if there is none of that name."""
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

    def named_tensors(self, chunk: ChunkKV) -> Iterator[tuple[str, Tensor]]:
        """Walk over the tensors that are stored for a chunk, in stored order."""
        for name, tensor in chunk.named_tensors():
            kind = name.rpartition(".")[2]
            if not name.startswith("layer."):
                yield name, tensor
                continue
            for field, packed in zip(self.codec.parts(kind), self.codec.pack(kind, tensor), strict=True):
                yield name + field.suffix, packed

    def states(self, take: Callable[[str], Tensor], index: int, kind: str) -> Tensor:
        """Unpack keys, values or projections of one layer.

        Shape: `[kv_heads, tokens, head_dim]`.
        """
        packed = {field.suffix: take(f"layer.{index}.{kind}{field.suffix}") for field in self.codec.parts(kind)}
        with as_fault(f"layer {index}"):
            states = self.codec.unpack(kind, packed, self.dtype)
        if not has_usable_values(states):
            raise EntryFault("values", f"layer {index} holds NaN, infinity or absurd values in {kind}")
        return states

    def again(self, kind: str, states: Tensor) -> Tensor:
        """Pack and unpack states."""
        packed = zip(self.codec.parts(kind), self.codec.pack(kind, states), strict=True)
        return self.codec.unpack(kind, {field.suffix: tensor for field, tensor in packed}, states.dtype)


def encode_entry(
    chunk: ChunkKV,
    codec: str = "raw",
    order: Sequence[int] | None = None,
    block_tokens: int = 0,
) -> list[memoryview]:
    """Write a chunk as an entry, in blocks where an order of its tokens is given; equal arguments give equal bytes."""
    key, packing = chunk.key, Packing.of_chunk(chunk, codec)
    about = {
        "provenance": PROVENANCE,
        "key": key.digest,
        "fingerprint": key.fingerprint,
        "namespace": hash_namespace(key.namespace),
        "codec": packing.text,
        "canary": chunk.canary,
        "layer_table": compact(chunk.layer_table),
        "digests": "",
        **({"tokenizer": chunk.tokenizer} if chunk.tokenizer else {}),
    }
    first = [
        ("token_ids", torch.tensor(key.token_ids)),
        ("chunk_prefix_ids", torch.tensor(key.chunk_prefix_ids, dtype=torch.int64)),
    ]
    if order is None:
        return pack_entry(KIND, about, [*first, *packing.named_tensors(chunk)])
    index = torch.tensor(list(order))
    layers = [tuple(states.index_select(1, index) for states in pair) for pair in chunk.layers]
    heads = [head for pair in layers for states in pair for head in states]
    digests = [digest_of(bytes_of(block)) for head in heads for block in head.split(block_tokens)]
    packed = torch.frombuffer(bytearray(b"".join(digests)), dtype=torch.uint8).view(len(digests), -1)
    first += [("order", index), ("block_digests", packed)]
    about["block_tokens"] = str(block_tokens)
    return pack_entry(BLOCKS, about, [*first, *replace(chunk, layers=layers).named_tensors()])


def read_key(source: Source, namespace: str) -> ChunkKey:
    """Find out which chunk an entry holds, without reading its KV, from the sealed header and ids that prove it.

    Listing does this for each entry; the whole header is checked when its chunk is read.
    """
    raw = read_raw_header(source)
    rows = Header.peek(raw, KINDS)
    with as_fault("the header"):
        digest, fingerprint, space = (str(rows["__metadata__"][name]) for name in ("key", "fingerprint", "namespace"))
        tokens, prefix = (int(rows[name]["shape"][0]) for name in ("token_ids", "chunk_prefix_ids"))
    if space != hash_namespace(namespace):
        raise EntryFault("namespace", f"the entry {digest} belongs to another namespace", corrupt=False)
    if not (tokens >= 0 and prefix >= 0 and tokens + prefix <= _MAX_IDS):
        raise EntryFault("format", f"{tokens + prefix} token ids are not those of a chunk")
    if len(raw) + 8 * (tokens + prefix) > source.stat.nbytes:
        raise EntryFault("truncated", f"{source.stat.nbytes} bytes cannot hold {tokens + prefix} token ids")
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

    def __init__(self, source: Source, key: ChunkKey, layout: Layout | None = None) -> None:
        self._file = EntryFile(source, KINDS)
        self.key, self.header, self._expected = key, self._file.header, layout
        self.in_blocks = self.header.kind == BLOCKS
        self._back: Tensor | None = None  # where each token is, of an entry in blocks
        with as_fault("the header"):
            self._check_header()
        if layout is not None and layout != self.layout:
            raise EntryFault("layout", f"{self.layout!r:.160} is not what the model has: {layout!r:.160}")
        if self._read_ids() != (key.token_ids, key.chunk_prefix_ids):
            raise EntryFault("key", f"the entry holds other tokens than those of {key.digest}")
        if self.in_blocks:
            self._read_order()

    @property
    def nbytes(self) -> int:
        """Size of the chunk in memory, in bytes."""
        values = sum(heads * width * dtype.itemsize for forms in self.layout.layers for heads, width, dtype in forms)
        tables = sum((cos + sin) * dtype.itemsize for cos, sin, dtype in self.layout.tables)
        return len(self.key.token_ids) * (values + tables)

    @torch.inference_mode(False)  # tensors that count what is written to them: see `Guard`
    def read(self) -> ChunkKV:
        """Read everything into one buffer."""
        take = self._file.taker(self._file.start, self.header.nbytes)
        with as_fault("the entry"):
            layers = tuple(self._states(take, index) for index in range(len(self._kinds)))
            return self.chunk(layers, self._checked_tables(take))

    def chunk(self, layers: Sequence[tuple[Tensor, ...]], tables: tuple[tuple[Tensor, Tensor], ...]) -> ChunkKV:
        """Make the chunk of tensors that were read."""
        about = self.header.about
        chunk = ChunkKV(self.key, layers, tables, self.layer_table, about["canary"], about.get("tokenizer", ""))
        chunk.__dict__["layout"] = self.layout  # a cached property
        return chunk

    @torch.inference_mode(False)  # tensors that count what is written to them: see `Guard`
    def layers(self, first: int, least_bytes: int = 0) -> list[tuple[Tensor, ...]]:
        """Read the states of one layer or a few, each `[kv_heads, tokens, head_dim]` as in `ChunkKV.layers`."""
        start, stop, last = self._layer_start(first), self._layer_start(first + 1), first + 1
        while stop - start < least_bytes and last < len(self._kinds):
            last += 1
            stop = self._layer_start(last)
        take = self._file.taker(start, stop - start)
        with as_fault("the entry"):
            return [self._states(take, index) for index in range(first, last)]

    @torch.inference_mode(False)  # tensors that count what is written to them: see `Guard`
    def tables(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """Read the rotary tables, as in `ChunkKV.tables`; raises as `layers` does."""
        with as_fault("the entry"):
            return self._checked_tables(self._file.taker(self._file.start, self._layer_start(0) - self._file.start))

    def _check_header(self) -> None:
        """Refuse a header that is not that of the key's chunk, and find out what the entry holds."""
        about, plans, key = self.header.about, self._file.plans, self.key
        if about["fingerprint"] != key.fingerprint:
            raise EntryFault("fingerprint", f"computed by model {about['fingerprint']}, not by {key.fingerprint}")
        if about["key"] != key.digest or about["namespace"] != hash_namespace(key.namespace):
            raise EntryFault("key", f"the entry is of chunk {about['key']}")
        self._packing = Packing.of_text(about["codec"])
        self.layer_table = tuple(map(int, json.loads(about["layer_table"])))
        texts = (*_TEXTS, *(["tokenizer"] if about.get("tokenizer") else []), *["block_tokens"] * self.in_blocks)
        if tuple(about) != texts or about["provenance"] != PROVENANCE:
            raise EntryFault("format", f"the header says {', '.join(about)!r:.200}, as no entry of a chunk does")
        tables = sum(name.startswith("table.") for name in plans) // 2
        are_there = all(-1 <= table < tables for table in self.layer_table)
        if not are_there or compact(self.layer_table) != about["layer_table"]:
            raise EntryFault("format", f"layer_table names a table that is not there: {self.layer_table!r:.80}")
        self._kinds = tuple(
            kinds_of(range(2 * (f"layer.{index}.k" in plans) + (f"layer.{index}.p" in plans)))
            for index in range(len(self.layer_table))
        )
        self._tables = tables
        expected = list(self._forms())
        if len(expected) != len(plans) or not all(map(_fits, self.header.tensors, expected)):
            raise EntryFault("format", f"names or shapes are not those of a chunk of {len(key.token_ids)} tokens")
        self.layout = self._layout()
        dtypes = {form[2] for forms in (*self.layout.layers, self.layout.tables) for form in forms}
        odd = [dtype for dtype in dtypes if not dtype.is_floating_point]
        if odd:
            raise EntryFault("format", f"K, V or tables are said to be {odd[0]}, expected floats")
        if self.header.nbytes > (len(key.token_ids) + len(key.chunk_prefix_ids)) * _MAX_BYTES_PER_TOKEN:
            raise EntryFault("format", f"{self.header.nbytes} bytes are too many for {len(key.token_ids)} tokens")

    def _forms(self) -> Iterator[tuple[str, int, int | None, int]]:
        """Give name, number of axes, which of them counts tokens, and how many, of what the entry must hold."""
        tokens = len(self.key.token_ids)
        yield ("token_ids", 1, 0, tokens)
        yield ("chunk_prefix_ids", 1, 0, len(self.key.chunk_prefix_ids))
        if self.in_blocks:
            yield from (("order", 1, 0, tokens), ("block_digests", 2, None, 0))
        for index in range(self._tables):
            yield from ((f"table.{index}.{side}", 2, 0, tokens) for side in ("cos", "sin"))
        for index, kinds in enumerate(self._kinds):
            for kind in kinds:
                for field in self._packing.codec.parts(kind):
                    yield (f"layer.{index}.{kind}{field.suffix}", field.axes, field.tokens_axis, tokens)

    def _layout(self) -> Layout:
        packing, plans = self._packing, {plan.name: plan for plan in self.header.tensors}

        def form(index: int, kind: str) -> tuple[int, int, torch.dtype]:
            plan = plans[f"layer.{index}.{kind}{packing.codec.parts(kind)[0].suffix}"]
            width = plan.shape[2] * packing.codec.values_per_item
            return plan.shape[0], width, packing.dtype or DTYPES[plan.dtype]

        def table(index: int) -> tuple[int, int, torch.dtype]:
            cos, sin = (plans[f"table.{index}.{side}"] for side in ("cos", "sin"))
            return cos.shape[1], sin.shape[1], DTYPES[cos.dtype]

        layers = tuple(tuple(form(index, kind) for kind in kinds) for index, kinds in enumerate(self._kinds))
        return Layout(layers, tuple(map(table, range(self._tables))), self.layer_table)

    def _checked_tables(self, take: Callable[[str], Tensor]) -> tuple[tuple[Tensor, Tensor], ...]:
        """The rotary tables, none with absurd values or such as stretch what they rotate where the model's do not."""
        tables = tuple((take(f"table.{index}.cos"), take(f"table.{index}.sin")) for index in range(self._tables))
        are_usable = all(has_usable_values(tensor) for pair in tables for tensor in pair)
        if not are_usable or (self._expected is not None and not self._expected.fits_norms(tables)):
            raise EntryFault("values", f"a table of {len(tables)} holds NaN or infinity, or stretches what it turns")
        return tables

    def _layer_start(self, index: int) -> int:
        """Where the tensors of a layer begin in the file; the end of all for the layer behind the last."""
        for later, kinds in enumerate(self._kinds[index:], index):
            if kinds:
                first = self._packing.codec.parts(kinds[0])[0].suffix
                return self._file.plans[f"layer.{later}.{kinds[0]}{first}"][1]
        return self._file.end

    def _read_ids(self) -> tuple[tuple[int, ...], ...]:
        plans = self.header.tensors[:2]
        for plan in plans:
            if plan.dtype != "I64":
                raise EntryFault("format", f"{plan.name} are {plan.dtype}, expected I64")
        take = self._file.taker(self._file.start, sum(plan.nbytes for plan in plans))
        return tuple(tuple(take(plan.name).tolist()) for plan in plans)

    def _read_order(self) -> None:
        """Read the order of the tokens, and the digests of blocks, of which there must be so many."""
        start, plan = self._file.plans["order"][1], self._file.plans["block_digests"]
        with as_fault("the order of the tokens"):
            take = self._file.taker(start, plan[1] + plan[0].nbytes - start)
            self.order, self.block_digests = take("order"), bytes_of(take("block_digests"))
            self.block_tokens = int(self.header.about["block_tokens"])
            self.blocks = -(-len(self.key.token_ids) // self.block_tokens)
            if self.order.dtype != torch.int64 or sorted(self.order.tolist()) != list(range(len(self.key.token_ids))):
                raise EntryFault("format", f"the blocks do not hold each of {len(self.key.token_ids)} tokens once")
            forms = {*self.layout.layers}
            pair = forms.pop()
            count = sum(form[0] for form in pair) * len(self.layer_table) * self.blocks
            shape = (count, tensor_digest().digest_size)
            is_alike = not forms and len(pair) == 2 and pair[0][::2] == pair[1][::2] and self._packing.codec.is_exact
            if not is_alike or plan[0].shape != shape or min(self.block_tokens, count, *pair[0][:2], pair[1][1]) < 1:
                raise EntryFault("format", f"{plan[0].shape} digests of blocks are not those of {self.layout!r:.120}")
        self._back = self.order.argsort()

    def _states(self, take: Callable[[str], Tensor], index: int) -> tuple[Tensor, ...]:
        states = tuple(self._packing.states(take, index, kind) for kind in self._kinds[index])
        return states if self._back is None else tuple(tensor.index_select(1, self._back) for tensor in states)


def _fits(plan: TensorPlan, expected: tuple[str, int, int | None, int]) -> bool:
    name, axes, axis, tokens = expected
    return plan.name == name and len(plan.shape) == axes and (axis is None or plan.shape[axis] == tokens)
