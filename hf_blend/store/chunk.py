# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What is stored: the identity of a chunk, and its keys and values."""

import hashlib
import operator
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ..errors import ConfigError, StoreError

__all__ = ["ChunkKV", "ChunkKey"]

_KEY_FORMAT = b"hf_blend.key/1"
_MAX_TOKEN_ID = 2**31 - 1


@dataclass(frozen=True)
class ChunkKey:
    """Everything that chunk KV depends on: two chunks with equal keys have the same KV.

    Attributes:
        fingerprint: identity of the model (`hf_blend.fingerprint`).
        sink_ids: the tokens that stood before the chunk when it was computed.
        token_ids: the chunk itself, at least one token.
        namespace: who may read it; stores of different namespaces never see each other's chunks.
    """

    fingerprint: str
    sink_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    namespace: str = ""

    def __post_init__(self) -> None:
        for name in ("sink_ids", "token_ids"):
            object.__setattr__(self, name, _checked_ids(name, getattr(self, name)))
        if not self.token_ids:
            raise ConfigError("a chunk needs tokens, got none. Drop empty chunks before storing them.")

    @cached_property
    def digest(self) -> str:
        """The name of the chunk: 64 lowercase hex digits, the same in every process and on every machine."""
        parts = (text.encode("utf-8", "surrogatepass") for text in (self.fingerprint, self.namespace))
        state = hashlib.sha256()
        for part in (_KEY_FORMAT, *parts, _packed(self.sink_ids), _packed(self.token_ids)):
            state.update(len(part).to_bytes(8, "little"))
            state.update(part)
        return state.hexdigest()


@dataclass(frozen=True, eq=False)
class ChunkKV:
    """The keys and values of one chunk computed alone behind the sink, with the sink cut off.

    The tensors are shared with whoever asked for the chunk: never write to them.

    Attributes:
        key: what it was computed from.
        layers: `(keys, values)` of each layer, each `[kv_heads, tokens, head_dim]` in the model's dtype; keys already
            rotated for positions `len(sink_ids) … len(sink_ids) + tokens - 1`. Heads and width may differ between
            keys, values and layers.
        tables: the distinct `(cos, sin)` of the model for those positions, each `[tokens, rotary_width]` in float32.
        layer_table: for each layer its place in `tables`, or -1 if it does not rotate.
        canary: what the model that computed it says of itself, stored with it; the store does not look at it.
    """

    key: ChunkKey
    layers: tuple[tuple[Tensor, Tensor], ...]
    tables: tuple[tuple[Tensor, Tensor], ...]
    layer_table: tuple[int, ...]
    canary: str = ""

    @property
    def tokens(self) -> int:
        """Length of the chunk in tokens."""
        return len(self.key.token_ids)

    @cached_property
    def nbytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(tensor.nbytes for _, tensor in self.named_tensors())

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Walk over the tensors in stored order: tables first, then keys and values of one layer after the other."""
        for kind, pairs, parts in (("table", self.tables, ("cos", "sin")), ("layer", self.layers, ("k", "v"))):
            for place, pair in enumerate(pairs):
                for part, tensor in zip(parts, pair, strict=True):
                    yield f"{kind}.{place}.{part}", tensor

    def map(self, change: Callable[[Tensor], Tensor]) -> "ChunkKV":
        """Apply a function to every tensor.

        Args:
            change: what to do, for example `lambda tensor: tensor.to("cuda")`.

        Returns:
            A new chunk; this one is left as it is.
        """
        layers = tuple((change(keys), change(values)) for keys, values in self.layers)
        tables = tuple((change(cos), change(sin)) for cos, sin in self.tables)
        return replace(self, layers=layers, tables=tables)

    def check(self) -> None:
        """Refuse KV that must not be stored: shapes that do not fit the tokens, NaN or infinity.

        Raises:
            StoreError: naming the tensor, what it is and what it should be.
        """
        if len(self.layer_table) != len(self.layers) or not set(self.layer_table) <= {-1, *range(len(self.tables))}:
            raise StoreError(
                f"layer_table is {self.layer_table} for {len(self.layers)} layers and {len(self.tables)} tables: it "
                "needs one entry per layer, each -1 or a place in tables. Capture the chunk again."
            )
        for name, tensor in self.named_tensors():
            axes, tokens_axis = (3, 1) if name.startswith("layer") else (2, 0)
            if tensor.ndim != axes or tensor.shape[tokens_axis] != self.tokens:
                raise StoreError(
                    f"{name} of chunk {self.key.digest} has shape {tuple(tensor.shape)}, wanted {axes} axes with "
                    f"{self.tokens} tokens on axis {tokens_axis}. Capture the chunk again, without the sink."
                )
            if not _is_finite(tensor):
                raise StoreError(
                    f"{name} of chunk {self.key.digest} holds NaN or infinity: nothing is stored. Check the model's "
                    f"weights, or run it in another dtype than {tensor.dtype}."
                )


def _checked_ids(name: str, ids: Sequence[int]) -> tuple[int, ...]:
    try:
        checked = tuple(map(operator.index, ids))
    except TypeError as error:
        raise ConfigError(f"{name} must be integers, got {ids!r:.80}. Tokenize the text first.") from error
    if checked and not 0 <= min(checked) <= max(checked) <= _MAX_TOKEN_ID:
        raise ConfigError(
            f"{name} has {min(checked)} … {max(checked)}, wanted 0 … {_MAX_TOKEN_ID}. Use the tokenizer's own ids."
        )
    return checked


def _packed(ids: tuple[int, ...]) -> bytes:
    return struct.pack(f"<{len(ids)}q", *ids)


def _is_finite(tensor: Tensor) -> bool:
    """Aminmax lets NaN through to both ends and is 20 times faster than isfinite().all()."""
    if not tensor.numel() or not tensor.is_floating_point():
        return True
    if tensor.element_size() == 1:  # float8 has no min and max
        tensor = tensor.float()
    low, high = torch.aminmax(tensor)
    return bool(torch.isfinite(low) & torch.isfinite(high))
