# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Which tensors an entry holds, by its codec, and how states become parts and parts states.

The header names the codec, and the dtype of the states where the parts have another: `raw`, or `int8:BF16`.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .. import plugins
from ..errors import PluginNotFoundError, StoreError
from .chunk import ChunkKey, ChunkKV, Layout, has_usable_values, kinds_of
from .codecs.base import Codec
from .header import DTYPES, Header, TensorPlan
from .tiers.base import EntryFault, as_fault

__all__ = ["Packing", "layer_kinds", "stored_as", "table_count"]

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def stored_as(chunk: ChunkKV, codec: str) -> ChunkKV:
    """Give a chunk as it will be read again."""
    packing = Packing(codec, plugins.load("store.codecs", codec)(), None)
    if packing.codec.is_exact:
        return chunk
    layers = tuple(
        tuple(packing.again(kind, one) for kind, one in zip(kinds_of(states), states, strict=True))
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
    def of_header(cls, header: Header) -> "Packing":
        """The packing that an entry names; raises EntryFault("codec") if there is none of that name."""
        name, _, dtype = header.codec.partition(":")
        try:
            packing = cls(name, plugins.load("store.codecs", name)(), DTYPES[dtype] if dtype else None)
        except (PluginNotFoundError, KeyError):
            raise _unknown(header) from None
        if packing.text != header.codec:
            raise _unknown(header)
        return packing

    @property
    def text(self) -> str:
        """What the header says."""
        return self.name if self.codec.is_exact else f"{self.name}:{_NAMES.get(self.dtype)}"

    def named_tensors(self, chunk: ChunkKV) -> Iterator[tuple[str, Tensor]]:
        """Walk over the tensors that are stored for a chunk, in stored order."""
        for name, tensor in chunk.named_tensors():
            kind = name.rpartition(".")[2]
            if not name.startswith("layer."):
                yield name, tensor
                continue
            for part, packed in zip(self.codec.parts(kind), self.codec.pack(kind, tensor), strict=True):
                yield name + part.suffix, packed

    def states(self, take: Callable[[str], Tensor], place: int, kind: str) -> Tensor:
        """Unpack keys, values or projections of one layer.

        Shape: `[kv_heads, tokens, head_dim]`.
        """
        packed = {part.suffix: take(f"layer.{place}.{kind}{part.suffix}") for part in self.codec.parts(kind)}
        with as_fault(f"layer {place}"):
            states = self.codec.unpack(kind, packed, self.dtype)
        if not has_usable_values(states):
            raise EntryFault("values", f"layer {place} holds NaN, infinity or absurd values in {kind}")
        return states

    def again(self, kind: str, states: Tensor) -> Tensor:
        """Pack and unpack states."""
        packed = zip(self.codec.parts(kind), self.codec.pack(kind, states), strict=True)
        return self.codec.unpack(kind, {part.suffix: tensor for part, tensor in packed}, states.dtype)

    def unpacked_nbytes(self, tensors: Sequence[TensorPlan]) -> int:
        """Size of a chunk in memory, from the plans of its tensors, in bytes."""
        if self.codec.is_exact:
            return sum(plan.nbytes for plan in tensors)
        itemsize = DTYPES[self.text.partition(":")[2]].itemsize * self.codec.values_per_item
        sizes = {plan.name: math.prod(plan.shape) * itemsize for plan in tensors if plan.name.startswith("layer.")}
        layers = sum(size for name, size in sizes.items() if name.count(".") == 2)
        return layers + sum(plan.nbytes for plan in tensors if plan.name not in sizes)

    def layout(self, header: Header) -> Layout:
        """What the chunk of a header that was checked looks like."""
        plans = {plan.name: plan for plan in header.tensors}

        def form(place: int, kind: str) -> tuple[int, int, torch.dtype]:
            plan = plans[f"layer.{place}.{kind}{self.codec.parts(kind)[0].suffix}"]
            width = plan.shape[2] * self.codec.values_per_item
            return plan.shape[0], width, self.dtype or DTYPES[plan.dtype]

        def table(place: int) -> tuple[int, int, torch.dtype]:
            cos, sin = (plans[f"table.{place}.{part}"] for part in ("cos", "sin"))
            return cos.shape[1], sin.shape[1], DTYPES[cos.dtype]

        layers = tuple(tuple(form(place, kind) for kind in kinds) for place, kinds in enumerate(layer_kinds(header)))
        return Layout(layers, tuple(map(table, range(table_count(header)))), header.layer_table)

    def check(self, header: Header, key: ChunkKey) -> None:
        """Refuse a header whose tensors are not those of a chunk of this length, packed so."""
        expected = list(self._expected(header, len(key.token_ids), len(key.chunk_prefix_ids)))
        if len(expected) != len(header.tensors) or not all(map(_fits, header.tensors, expected)):
            raise EntryFault("format", f"names or shapes are not those of a chunk of {len(key.token_ids)} tokens")
        tables = {DTYPES[plan.dtype] for plan in header.tensors if plan.name.startswith("table.")}
        states = {dtype for layer in self.layout(header).layers for _, _, dtype in layer}
        odd = [dtype for dtype in tables | states if not dtype.is_floating_point]
        if odd:
            raise EntryFault("format", f"K, V or tables are said to be {odd[0]}, expected floats")

    def _expected(self, header: Header, tokens: int, sinks: int) -> Iterator[tuple[str, int, int | None, int]]:
        """Name, number of axes, which of them counts tokens, and how many."""
        tables = table_count(header)
        if not all(-1 <= table < tables for table in header.layer_table):
            raise EntryFault("format", f"layer_table names a table that is not there: {header.layer_table!r:.80}")
        yield ("token_ids", 1, 0, tokens)
        yield ("chunk_prefix_ids", 1, 0, sinks)
        for place in range(tables):
            yield from ((f"table.{place}.{part}", 2, 0, tokens) for part in ("cos", "sin"))
        for place, kinds in enumerate(layer_kinds(header)):
            for kind in kinds:
                for part in self.codec.parts(kind):
                    yield (f"layer.{place}.{kind}{part.suffix}", part.axes, part.tokens_axis, tokens)


def layer_kinds(header: Header) -> tuple[tuple[str, ...], ...]:
    """Which states an entry holds of each layer, by the names of its tensors; see `kinds_of`."""
    named = {plan.name for plan in header.tensors}
    marks = [(f"layer.{place}.k" in named, f"layer.{place}.p" in named) for place in range(len(header.layer_table))]
    return tuple(kinds_of(range(2 * has_keys + has_projections)) for has_keys, has_projections in marks)


def table_count(header: Header) -> int:
    """How many pairs of rotary tables an entry holds."""
    return sum(plan.name.startswith("table.") for plan in header.tensors) // 2


def _fits(plan: TensorPlan, expected: tuple[str, int, int | None, int]) -> bool:
    name, axes, axis, tokens = expected
    return plan.name == name and len(plan.shape) == axes and (axis is None or plan.shape[axis] == tokens)


def _unknown(header: Header) -> EntryFault:
    return EntryFault("codec", f"packed by {header.codec!r:.40}, which this version cannot read", corrupt=False)
