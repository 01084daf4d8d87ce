# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What is stored: the identity of a chunk, and its keys and values."""

import hashlib
import operator
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import ConfigError, StoreError

_KEY_FORMAT = b"hf_blend.key/1"
_MAX_TOKEN_ID = 2**31 - 1
_LARGEST = 2.0**30  # of a value; K and V of models stay below 10^4, and products of larger ones soon overflow
_KINDS: tuple[tuple[str, ...], ...] = ((), ("p",), ("k", "v"), ("k", "v", "p"))  # by the number of tensors of a layer
CHAIN = "/chain"  # behind the fingerprint of what was computed behind all tokens of a prompt before it
KV = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class ChunkKey:
    """Everything that chunk KV depends on: two chunks with equal keys have the same KV."""

    fingerprint: str
    chunk_prefix_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    namespace: str = ""

    def __post_init__(self) -> None:
        for name in ("chunk_prefix_ids", "token_ids"):
            object.__setattr__(self, name, _checked_ids(name, getattr(self, name)))
        if not self.token_ids:
            raise ConfigError("a chunk needs tokens, got none. Drop empty chunks before storing them.")

    @cached_property
    def digest(self) -> str:
        """The name of the chunk: 64 lowercase hex digits, the same in every process and on every machine."""
        state = _hashed(self.fingerprint, self.namespace, self.chunk_prefix_ids).copy()
        _feed(state, _packed(self.token_ids))
        return str(state.hexdigest())


class ChunkSpan(NamedTuple):
    """A run of a prompt that has the tokens of a stored chunk, or of a part of it."""

    start: int  # number in the prompt of its first token
    key: ChunkKey
    first: int  # number in the chunk of the same token
    tokens: int


@dataclass(frozen=True)
class Layout:
    """What the KV of one model looks like, whatever the chunk: what is stored under its fingerprint must match."""

    layers: tuple[tuple[tuple[int, int, torch.dtype], ...], ...]
    tables: tuple[tuple[int, int, torch.dtype], ...]
    layer_table: tuple[int, ...]

    def to_json(self) -> list[Any]:
        """Write it as lists; `of_json` reads them."""
        return [list(map(_forms_to_json, self.layers)), _forms_to_json(self.tables), list(self.layer_table)]

    @classmethod
    def of_json(cls, rows: list[Any]) -> "Layout":
        """Read what `to_json` wrote."""
        layers, tables, layer_table = rows
        return cls(tuple(map(_forms_of_json, layers)), _forms_of_json(tables), tuple(map(int, layer_table)))


class StackedLayers(Sequence[KV]):
    """K and V of layers that are all alike, as two tensors; a layer is a view.

    Shapes: keys `[layers, kv_heads, tokens, head_dim]`.
    """

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values

    @classmethod
    @torch.inference_mode(False)  # requests in any mode share these tensors
    def of(cls, layers: Sequence[tuple[Tensor, ...]]) -> "StackedLayers | None":
        """Copy layers into two tensors on the CPU; None where they differ in kind, shape or dtype."""
        pairs = list(layers)
        if not pairs or any(len(pair) != 2 for pair in pairs):
            return None
        stacks = []
        for parts in zip(*pairs, strict=True):  # all keys, then all values
            if len({(tensor.shape, tensor.dtype) for tensor in parts}) > 1:
                return None
            stacks.append(torch.stack([tensor.detach().cpu() for tensor in parts]))
        return cls(*stacks)

    def __len__(self) -> int:
        return self.keys.shape[0]

    def __getitem__(self, index: Any) -> Any:
        """(K, V) of a layer, `[kv_heads, tokens, head_dim]` each."""
        number = operator.index(index)  # no slices
        return self.keys[number], self.values[number]


@dataclass(frozen=True, eq=False)
class ChunkKV:
    """The keys and values of one chunk computed alone behind its chunk prefix, which is cut off.

    The tensors are shared by all that fetched the chunk: never write to them.

    Attributes:
        key: what it was computed from.
        layers: the states of each layer, `[kv_heads, tokens, width]` each.
        tables: cosines and sines with which its keys are rotated, `[tokens, width]`.
        layer_table: by layer the index of its table, or -1.
        canary: what its model computed from a few fixed tokens.
        tokenizer: digest of the one that made its ids; may be empty.
        importance: what a question without content takes of each token, `[tokens]` float16 on the CPU; None: unknown.
        question: digest of that question's ids: numbers of one question can be compared.
    """

    key: ChunkKey
    layers: Sequence[tuple[Tensor, ...]]
    tables: tuple[tuple[Tensor, Tensor], ...]
    layer_table: tuple[int, ...]
    canary: str = ""
    tokenizer: str = ""
    importance: Tensor | None = None
    question: str = ""
    tokens: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", len(self.key.token_ids))

    @cached_property
    def nbytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(tensor.nbytes for _, tensor in self.named_tensors())

    @cached_property
    def layout(self) -> Layout:
        """What its tensors look like, for comparing with what a model's look like."""
        if isinstance(self.layers, StackedLayers):  # all alike
            states = (self.layers.keys, self.layers.values)
            forms = tuple((tensor.shape[1], tensor.shape[3], tensor.dtype) for tensor in states)
            layers = (forms,) * states[0].shape[0]
        else:
            layers = tuple(tuple(map(_form, states)) for states in self.layers)
        tables = tuple((cos.shape[1], sin.shape[1], cos.dtype) for cos, sin in self.tables)
        return Layout(layers, tables, self.layer_table)

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Walk over the tensors in stored order: tables first, then the states of one layer after the other."""
        for index, table in enumerate(self.tables):
            cos, sin = table
            yield from ((f"table.{index}.cos", cos), (f"table.{index}.sin", sin))
        for index, states in enumerate(self.layers):
            kinds = kinds_of(states)
            yield from ((f"layer.{index}.{kind}", tensor) for kind, tensor in zip(kinds, states, strict=True))

    def map(self, change: Callable[[Tensor], Tensor]) -> "ChunkKV":
        """Apply a function to every tensor."""
        layers = tuple(tuple(map(change, states)) for states in self.layers)
        tables = tuple((change(cos), change(sin)) for cos, sin in self.tables)
        return replace(self, layers=layers, tables=tables)

    def dense_copy(self) -> "ChunkKV":
        """A dense copy on the CPU: what happens to these tensors later cannot reach it. Alike layers are stacked."""
        layers = StackedLayers.of(self.layers) or tuple(tuple(map(_dense_copy, states)) for states in self.layers)
        tables = tuple(tuple(map(_dense_copy, pair)) for pair in self.tables)
        importance = None if self.importance is None else _dense_copy(self.importance)
        return replace(self, layers=layers, tables=tables, importance=importance)

    def stacked(self) -> "ChunkKV":
        """The same chunk with alike layers in two tensors; itself where they are, or cannot be.

        A table that was read from a file is a part of one buffer of the whole file, which it would keep: it is copied.
        """
        if isinstance(self.layers, StackedLayers) or (stacked := StackedLayers.of(self.layers)) is None:
            return self
        return replace(self, layers=stacked, tables=tuple(tuple(map(_dense_copy, pair)) for pair in self.tables))

    def check(self) -> None:
        """Refuse KV that must not be stored: shapes that do not fit the tokens, no floats, NaN or absurd values."""
        if len(self.layer_table) != len(self.layers) or not set(self.layer_table) <= {-1, *range(len(self.tables))}:
            raise StoreError(
                f"layer_table is {self.layer_table} for {len(self.layers)} layers and {len(self.tables)} tables: it "
                "needs one entry per layer, each -1 or an index of tables. Capture the chunk again."
            )
        if self.importance is not None and not is_importance(self.importance, self.tokens):
            raise StoreError(
                f"importance of chunk {self.key.digest} is {self.importance.dtype} {tuple(self.importance.shape)}, "
                f"expected finite float16 from 0 on, ({self.tokens},). Leave it out, or capture the chunk again."
            )
        for name, tensor in self.named_tensors():
            axes, tokens_axis = (3, 1) if name.startswith("layer") else (2, 0)
            if tensor.ndim != axes or tensor.shape[tokens_axis] != self.tokens:
                raise StoreError(
                    f"{name} of chunk {self.key.digest} has shape {tuple(tensor.shape)}, expected {axes} axes with "
                    f"{self.tokens} tokens on axis {tokens_axis}. Capture the chunk again, without the chunk prefix."
                )
            if not tensor.is_floating_point() or not has_usable_values(tensor):
                raise StoreError(
                    f"{name} of chunk {self.key.digest} ({tensor.dtype}) holds NaN or infinity, values beyond "
                    f"{_LARGEST:g}, or no floats: nothing is stored. Check the model's weights, or run it in another "
                    "dtype."
                )


def kinds_of(states: Sequence[object]) -> tuple[str, ...]:
    """Name the tensors of a layer: "k" and "v", "p" for the projections of a mixer, all three, or none."""
    return _KINDS[len(states)]


@torch.inference_mode(False)  # requests in any mode share these tensors
def _dense_copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def _checked_ids(name: str, ids: Sequence[int]) -> tuple[int, ...]:
    try:
        checked = tuple(map(operator.index, ids))
    except TypeError as error:
        raise ConfigError(f"{name} must be integers, got {ids!r:.80}. Tokenize the text first.") from error
    if checked and not 0 <= min(checked) <= max(checked) <= _MAX_TOKEN_ID:
        raise ConfigError(
            f"{name} has {min(checked)} … {max(checked)}, expected 0 … {_MAX_TOKEN_ID}. Use the tokenizer's own ids."
        )
    return checked


@lru_cache(maxsize=64)
def _hashed(fingerprint: str, namespace: str, chunk_prefix_ids: tuple[int, ...]) -> Any:
    """The hash of what the keys of many chunks have in common; to be copied."""
    state = hashlib.sha256()
    for content in (_KEY_FORMAT, *(text.encode("utf-8", "surrogatepass") for text in (fingerprint, namespace))):
        _feed(state, content)
    _feed(state, _packed(chunk_prefix_ids))
    return state


def _feed(state: Any, content: bytes) -> None:
    state.update(len(content).to_bytes(8, "little"))
    state.update(content)


def _packed(ids: tuple[int, ...]) -> bytes:
    return struct.pack(f"<{len(ids)}q", *ids)


def has_usable_values(states: Tensor) -> bool:
    """Say whether all values are finite and none is absurdly large."""
    if not states.numel():
        return True
    least, greatest = states.detach().float().aminmax()
    return bool(least >= -_LARGEST and greatest <= _LARGEST)  # NaN is neither


def is_importance(numbers: Tensor, tokens: int) -> bool:
    """Say whether numbers are one of each token, finite and from 0 on, in float16."""
    is_formed = numbers.dtype == torch.float16 and numbers.shape == (tokens,)
    return is_formed and bool((numbers.isfinite() & (numbers >= 0)).all())


def _forms_to_json(forms: Sequence[tuple[int, int, torch.dtype]]) -> list[Any]:
    return [[first, second, str(dtype).removeprefix("torch.")] for first, second, dtype in forms]


def _forms_of_json(rows: Sequence[Any]) -> tuple[tuple[int, int, torch.dtype], ...]:
    return tuple((int(first), int(second), getattr(torch, name)) for first, second, name in rows)


def _form(states: Tensor) -> tuple[int, int, torch.dtype]:
    return states.shape[0], states.shape[2], states.dtype
