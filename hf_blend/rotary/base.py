# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What a rotary style says: which dimensions of a key form a pair, and how a pair turns.

Keys move by composing the model's own cos/sin tables, old against new, never by an angle of our own: that carries
scaled, partial and per-layer frequencies and stays exact at any distance (1e-7 at 100 000 positions, where a rotation
by a difference of angles is off by 4e-3). An attention factor (YaRN, longrope) multiplies both tables, so it is in the
stored key once; the composition divides by the old table's and applies the new table's: it is never applied twice.

Most models make one table and hand it to every layer. Some layers make their own, from positions that they are handed.
"""

from abc import ABC
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ..errors import PromptError


class RotaryStyle(ABC):  # noqa: B024 (to mypy a class without a metaclass is no key of a cache)
    """One way of pairing the dimensions of a key. Stateless: every method is a function of its arguments.

    Here a dimension of the first half of those that turn, and the one as far into the second, form a pair.

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
    def split(keys: Tensor, pairs: int) -> tuple[Tensor, Tensor]:
        """View the two members of each pair; writing to them writes to `keys`. What is beyond the pairs does not turn.

        Shapes: `[…, tokens, head_dim]` → two of `[…, tokens, pairs]`.
        """
        return keys[..., :pairs], keys[..., pairs : 2 * pairs]

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
        first, second = cls.split(keys, pairs)
        to_first, to_second = cls.split(out, pairs)
        if keys.device.type == "cpu":  # elsewhere kernels cast what they load, without a copy
            first = first.float()
            second = second.float()
        product = torch.mul(first, cos)
        torch.addcmul(product, second, sin, value=-1, out=to_first)
        torch.mul(second, cos, out=product)
        torch.addcmul(product, first, sin, out=to_second)


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


Table = tuple[Tensor, Tensor]

_parts = WeakIdKeyDictionary()  # layers that share a complex table share its parts, which are known by identity


def rotary_table(arguments: dict[str, Any], layer: nn.Module | None = None) -> Table | None:
    """Find the rotary table of a decoder layer.

    Shapes: (cos, sin), each `[batch or 1, tokens, width]`, scaling factors included; None where none is known.
    """
    table = arguments.get("position_embeddings")
    if table is None and layer is not None:
        table = own_table(layer, arguments.get("position_ids"))
    if isinstance(table, Tensor) and table.is_complex() and table.dim() == 3:
        return _parts.setdefault(table, (table.real, table.imag))
    if not isinstance(table, tuple | list) or len(table) != 2:
        return None
    cos, sin = table
    if not isinstance(cos, Tensor) or not isinstance(sin, Tensor) or cos.shape != sin.shape:
        return None
    return (cos, sin) if cos.dim() == 3 and cos.is_floating_point() else None


@torch.no_grad()
def own_table(layer: nn.Module, positions: Any) -> Any:
    """The table of a layer that makes its own: with a rotary module (Moshi) or a buffer of sines and cosines (GPT-J).

    Shapes: positions `[batch, tokens]` → (cos, sin), each `[batch, tokens, width]`.
    """
    if not isinstance(positions, Tensor) or positions.dim() != 2:
        return None
    for module in layer.modules():
        if isinstance(getattr(module, "inv_freq", None), Tensor):
            return module(module.inv_freq, positions.to(module.inv_freq.device))
        buffer = getattr(module, "embed_positions", None)
        if not isinstance(buffer, Tensor) or buffer.dim() != 2:
            continue
        if positions.device.type == "cpu" and int(positions.max()) >= len(buffer):  # elsewhere the look-up says it
            raise PromptError(
                f"a key is at position {int(positions.max())}, but the model's rotary buffer has {len(buffer)} "
                "positions. Keep the sequence below that length."
            )
        sin, cos = buffer.to(positions.device)[positions].chunk(2, dim=-1)
        return cos, sin
    return None


SCALES = ("attn_temperature_tuning", "log_scaling_n_floor")


def frequency_regime(config: Any, tokens: int) -> tuple[int, ...]:
    """Which set of frequencies a model rotates by in a forward of some length; most models have one for all lengths.

    With longrope there are two sets, with dynamic scaling one for each length beyond the trained one. Stored K and V
    are those of a full prefill only if both were computed with the same set.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    by_layer_type = [parameters for parameters in rope.values() if isinstance(parameters, dict)]
    longest = getattr(config, "max_position_embeddings", 0)
    sets = []
    for parameters in by_layer_type or [rope]:
        name = str(parameters.get("rope_type", ""))
        if name == "longrope":
            trained = parameters.get("original_max_position_embeddings") or longest
            sets.append(int(tokens > trained))
        elif "dynamic" in name and tokens >= longest:
            sets.append(tokens)
        else:
            sets.append(0)
    return tuple(sets)


def stretches(config: Any) -> bool:
    """Whether a model works beyond the positions of its config, because its frequencies adapt to the length."""
    return frequency_regime(config, 1 << 40) != frequency_regime(config, 1 << 41)


def scales_by_position(config: Any) -> bool:
    """Whether attention of a model depends on where its tokens are, and not only on how far apart.

    Llama 4, Ministral 3, Mistral 4 and Inkling scale their queries by steps of the position, or of the column.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    scales = [rope.get("llama_4_scaling_beta")]
    scales += [getattr(config, name, None) for name in SCALES]
    return any(scale is not None and scale is not False for scale in scales)
