# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What a rotary style says: which dimensions of a key form a pair, and how a pair turns.

Keys move by composing the model's own cos/sin tables, old against new, never by an angle of our own: that carries
scaled, partial and per-layer frequencies and stays exact at any distance (1e-7 at 100 000 positions, where a rotation
by a difference of angles is off by 4e-3). An attention factor (YaRN, longrope) multiplies both tables, so it is in the
stored key once; the composition divides by the old table's and applies the new table's: it is never applied twice.
"""

from abc import ABC, abstractmethod
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor


class RotaryStyle(ABC):
    """One way of pairing the dimensions of a key. Stateless: every method is a function of its arguments.

    `slot` says which of the two tensors that a layer hands to its cache turns: 0, the keys, for nearly all models.
    `turns` is False for the one that leaves keys as they are. `beside` is the style of what a layer stores of each
    token beside K and V, such as the keys of an indexer; None where there is nothing.
    """

    slot: ClassVar[int] = 0
    turns: ClassVar[bool] = True
    beside: "ClassVar[type[RotaryStyle] | None]" = None

    @staticmethod
    def pairs(table: Tensor) -> Tensor:
        """Reduce cos or sin, as the model gives it, to one entry per pair: to the half that the other repeats.

        Shapes: `[…, tokens, width]` → `[…, tokens, pairs]`.
        """
        return table[..., : table.shape[-1] // 2]

    @staticmethod
    @abstractmethod
    def split(keys: Tensor, pairs: int) -> tuple[Tensor, Tensor]:
        """View the two members of each pair; writing to them writes to `keys`. What is beyond the pairs does not turn.

        Shapes: `[…, tokens, head_dim]` → two of `[…, tokens, pairs]`.
        """

    @classmethod
    @torch.no_grad()
    def move(cls, keys: Tensor, turn: tuple[Tensor, Tensor], out: Tensor) -> None:
        """Turn stored keys by what `compose` gives to their new positions, in float32, cast once.

        Shapes: keys `[…, tokens, head_dim]`, rotated for their old positions, not the memory of `out`; turn two of
        `[…, tokens, pairs]` float32.
        """
        cos, sin = turn
        pairs = cos.shape[-1]
        if 2 * pairs < keys.shape[-1]:
            out.copy_(keys)
        first, second = (half.float() for half in cls.split(keys, pairs))
        to_first, to_second = cls.split(out, pairs)
        if out.dtype == torch.float32:  # computed in place
            torch.mul(first, cos, out=to_first).addcmul_(second, sin, value=-1)
            torch.mul(second, cos, out=to_second).addcmul_(first, sin)
            return
        to_first.copy_(torch.mul(first, cos).addcmul_(second, sin, value=-1))
        to_second.copy_(torch.mul(second, cos).addcmul_(first, sin))


class HalfStyle(RotaryStyle):
    """A dimension of the first half of those that turn, and the one as far into the second, form a pair."""

    @staticmethod
    def split(keys: Tensor, pairs: int) -> tuple[Tensor, Tensor]:
        """View `[…, tokens, head_dim]` as its first and second `pairs` dimensions."""
        return keys[..., :pairs], keys[..., pairs : 2 * pairs]


class InterleavedStyle(RotaryStyle):
    """Neighbouring dimensions form a pair."""

    @staticmethod
    def split(keys: Tensor, pairs: int) -> tuple[Tensor, Tensor]:
        """View `[…, tokens, head_dim]` as its even and odd dimensions, as far as they turn."""
        return keys[..., 0 : 2 * pairs : 2], keys[..., 1 : 2 * pairs : 2]


@cache
def in_values(style: type[RotaryStyle]) -> type[RotaryStyle]:
    """The same style for a layer whose rotary key is handed to the cache instead of the values.

    Latent attention (DeepSeek-V2 and -V3, MiniCPM3) does so; what does not turn is handed over as the keys.
    """
    return type(f"{style.__name__}InValues", (style,), {"slot": 1, "__doc__": style.__doc__})


@cache
def at_the_end(style: type[RotaryStyle]) -> type[RotaryStyle]:
    """The same style for keys whose last dimensions turn, and not their first."""

    def split(keys: Tensor, pairs: int) -> tuple[Tensor, Tensor]:
        return style.split(keys[..., keys.shape[-1] - 2 * pairs :], pairs)

    return type(f"{style.__name__}AtTheEnd", (style,), {"split": staticmethod(split), "__doc__": style.__doc__})


@cache
def with_style_beside(style: type[RotaryStyle], beside: type[RotaryStyle]) -> type[RotaryStyle]:
    """The same style for a layer that stores something beside K and V, such as the keys of an indexer."""
    return type(style.__name__, (style,), {"beside": beside, "__doc__": style.__doc__})


def compose(style: type[RotaryStyle], old: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The turn that takes a key from its old position to its new one.

    Shapes: (cos, sin) tables `[…, tokens, width]` → `[…, tokens, pairs]`, float32; exactly (1, 0) for equal tables.
    """
    cos_old, sin_old = (style.pairs(table.float()) for table in old)
    cos_new, sin_new = (style.pairs(table.float()) for table in new)
    norm = cos_old * cos_old + sin_old * sin_old
    cos = (cos_new * cos_old + sin_new * sin_old) / norm
    sin = (sin_new * cos_old - cos_new * sin_old) / norm
    return cos, sin
