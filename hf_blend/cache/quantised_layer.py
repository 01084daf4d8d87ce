# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""One layer of a blend cache that keeps what is decoded from in 8 or 4 bits: K by channel, V by token.

KIVI (https://arxiv.org/abs/2402.02750), section 3: keys have a few large channels and are scaled by channel, over
groups of tokens; values have none and are scaled by token; the last tokens stay as they are.
Differs: 8 bits, symmetric, so that no entry is off by more than 1/254 of the largest of its group, and half a rounding
of the dtype; or 4 bits with a least value for each group, as with the codec int4. The prefill, and every forward over
its own tokens, is computed with K and V as they are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError
from ..store import nibbles
from .layers import BlendLayer

GROUP_TOKENS = 32  # share a scale per channel of K; the last 32 to 63 tokens stay as they are
LARGEST = 127


@dataclass(frozen=True)
class Packed:
    """Tokens of K and V in 8 bits, never changed."""

    keys: Tensor
    key_scales: Tensor
    values: Tensor
    value_scales: Tensor

    @classmethod
    def of(cls, keys: Tensor, values: Tensor) -> "Packed":
        """Quantise whole groups, `[batch, kv_heads, tokens, head_dim]` each."""
        return cls(*_packed(keys.unflatten(2, (-1, GROUP_TOKENS)), 3), *_packed(values, -1))

    @classmethod
    def from_parts(cls, parts: Sequence[Tensor]) -> "Packed":
        """Take up what `parts` gave."""
        return cls(*parts)

    @property
    def tokens(self) -> int:
        """How many tokens it holds."""
        return self.values.shape[2]

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """All tensors, the first half of them of K; their first axis is the batch."""
        return self.keys, self.key_scales, self.values, self.value_scales

    def map(self, change: Callable[[Tensor], Tensor]) -> "Packed":
        """The same of every tensor changed."""
        return Packed.from_parts([*map(change, self.parts)])

    def unpack(self, keys: Tensor, values: Tensor) -> None:
        """Write the tokens to `[batch, kv_heads, tokens, head_dim]` each, in the dtype of these."""
        keys.unflatten(2, self.keys.shape[2:4]).copy_(self.keys).mul_(self.key_scales)
        values.copy_(self.values).mul_(self.value_scales)


@dataclass(frozen=True)
class Pairs:
    """Tokens of K and V in 4 bits, never changed."""

    keys: tuple[Tensor, Tensor, Tensor]
    values: tuple[Tensor, Tensor, Tensor]

    @classmethod
    def of(cls, keys: Tensor, values: Tensor) -> "Pairs":
        """Quantise whole groups, `[batch, kv_heads, tokens, head_dim]` each."""
        for states in (keys, values):
            if states.shape[3] % 2:
                raise ConfigError(
                    f"kv_bits=4 came with heads of width {states.shape[3]}, but two values share a byte, so an even "
                    "width is expected. Use kv_bits=8."
                )
        groups = values.unflatten(3, (-1, nibbles.group_width(values.shape[3])))
        return cls(nibbles.packed(keys.unflatten(2, (-1, GROUP_TOKENS)), 3), nibbles.packed(groups, 4))

    @classmethod
    def from_parts(cls, parts: Sequence[Tensor]) -> "Pairs":
        """Take up what `parts` gave."""
        first, second, third, *values = parts
        return cls((first, second, third), (values[0], values[1], values[2]))

    @property
    def tokens(self) -> int:
        """How many tokens it holds."""
        return self.values[0].shape[2]

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """All tensors, the first half of them of K; their first axis is the batch."""
        return *self.keys, *self.values

    def map(self, change: Callable[[Tensor], Tensor]) -> "Pairs":
        """The same of every tensor changed."""
        return Pairs.from_parts([*map(change, self.parts)])

    def unpack(self, keys: Tensor, values: Tensor) -> None:
        """Write the tokens to `[batch, kv_heads, tokens, head_dim]` each, in the dtype of these."""
        nibbles.unpacked(*self.keys, out=keys.unflatten(2, self.keys[0].shape[2:4]))
        nibbles.unpacked(*self.values, out=values.unflatten(3, (self.values[0].shape[3], -1)))


PACKINGS: dict[int, type[Packed] | type[Pairs]] = {8: Packed, 4: Pairs}


def _packed(states: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    fine = torch.float32 if states.dtype == torch.float16 else states.dtype  # whose small ones are fine too
    scales = (states.abs().amax(dim=axis, keepdim=True).float() / LARGEST).to(fine)
    scales = torch.where(scales > 0, scales, 1.0)
    return (states.float() / scales).round_().clamp_(-LARGEST, LARGEST).to(torch.int8), scales


class QuantisedLayer(BlendLayer):
    """K and V of one decoder layer in few bits, unpacked for as long as a forward looks at them.

    What it holds is `_packed`, then `_recent`, the last tokens as they came. `keys` and `values` are unpacked anew at
    every look, except while a forward has opened them.
    """

    keeps_all = False

    def __init__(self, bits: int = 8) -> None:
        """Begin empty; `bits` is 8 or 4."""
        self._packing = PACKINGS[bits]
        self._packed: tuple[Packed | Pairs, ...] = ()
        self._recent: tuple[Tensor, Tensor] | None = None
        self._opened: tuple[Tensor, Tensor] | None = None
        super().__init__()

    @property
    def keys(self) -> Tensor | None:
        """All K, `[batch, kv_heads, tokens, head_dim]`, rotated for their positions."""
        return self._shown(0)

    @keys.setter
    def keys(self, value: Any) -> None:
        """Nothing: what is held is packed."""

    @property
    def values(self) -> Tensor | None:
        """All V, `[batch, kv_heads, tokens, head_dim]`."""
        return self._shown(1)

    @values.setter
    def values(self, value: Any) -> None:
        """Nothing: what is held is packed."""

    @property
    def packed_tokens(self) -> int:
        """How many of the tokens are held in few bits."""
        return sum(part.tokens for part in self._packed)

    @property
    def batch_size(self) -> int:
        """How many batch entries there are; 0 in an empty layer."""
        return self._recent[0].shape[0] if self._recent is not None else 0

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        held = [tensor for packed in self._packed for tensor in packed.parts]
        return sum(tensor.nbytes for tensor in (*held, *(self._opened or self._recent or ())))

    def open(self, tokens: int, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """See `BlendLayer.open`; everything is unpacked until `settle`."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._opened = self._unpacked(tokens, key_states, value_states)
        self.length += tokens
        return self._opened[0][:, :, -tokens:], self._opened[1][:, :, -tokens:]

    def settle(self) -> None:
        """Pack whole groups, but for the last tokens."""
        if self._opened is None:
            return
        held = self.packed_tokens
        groups = max(0, (self.length - held) // GROUP_TOKENS - 1)
        end = held + groups * GROUP_TOKENS
        if groups:
            self._packed += (self._packing.of(*(states[:, :, held:end] for states in self._opened)),)
            self.unchanged_tokens = min(self.unchanged_tokens, held)
        self._recent = (self._opened[0][:, :, end:].clone(), self._opened[1][:, :, end:].clone())
        self._opened = None

    def snapshot(self) -> Any:
        """What `restore` needs; nothing of it is ever written to."""
        return self.length, self._packed, self._recent

    def restore(self, snapshot: Any) -> None:
        """Forget the tokens that came since a snapshot."""
        self.length, self._packed, self._recent = snapshot
        self._opened, self.is_initialized = None, self._recent is not None
        self.unchanged_tokens = min(self.unchanged_tokens, self.length)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens; those in front of them in a packed group are unpacked for good."""
        removed = self.check_crop(tokens_to_remove)
        if not self.is_initialized or not removed:
            return
        length = self.length + removed
        whole = self._unpacked(0, *self._recent)  # type: ignore[misc]
        ends = accumulate(part.tokens for part in self._packed)
        self._packed = tuple(part for part, end in zip(self._packed, ends, strict=True) if end <= length)
        kept = self.packed_tokens
        self.length, self.unchanged_tokens = length, min(self.unchanged_tokens, length)
        self._recent = (whole[0][:, :, kept:length].clone(), whole[1][:, :, kept:length].clone())

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self._packed, self._recent, self._opened = (), None, None

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every batch entry `repeats` times in a row."""
        self._map(lambda states: states.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only some batch entries; `indices` is `[kept]`."""
        self._map(lambda states: states.index_select(0, indices.to(states.device)))

    def _map(self, change: Any) -> None:
        if self._recent is not None:
            self._packed = tuple(part.map(change) for part in self._packed)
            self._recent = (change(self._recent[0]), change(self._recent[1]))
            self.unchanged_tokens = 0

    def _shown(self, place: int) -> Tensor | None:
        if self._opened is None and self._recent is not None:
            return self._unpacked(0, *self._recent)[place]
        return None if self._opened is None else self._opened[place]

    def _unpacked(self, room: int, *like: Tensor) -> tuple[Tensor, Tensor]:
        """All tokens and room for some more, in the form of some K and V."""
        keys, values = (one.new_empty((*one.shape[:2], self.length + room, one.shape[3])) for one in like)
        start = 0
        for part in self._packed:
            place = (slice(None), slice(None), slice(start, start + part.tokens))
            part.unpack(keys[place], values[place])
            start += part.tokens
        if self._recent is not None:
            for whole, recent in zip((keys, values), self._recent, strict=True):
                whole[:, :, start : self.length] = recent
        return keys, values
