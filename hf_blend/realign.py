# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Stored KV at its place in a prompt: keys moved to their new positions, always from the stored original."""

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from .plan import Slot
from .report import BlendReport
from .rotary.base import RotaryStyle, compose
from .rotary.tables import Table


class Realigner:
    """Lays stored chunks into a layer's buffers. The turn of a chunk is composed once per rotary table and kept."""

    def __init__(self, styles: Sequence[type[RotaryStyle]], report: BlendReport) -> None:
        self._styles, self._report = styles, report
        self._turns: dict[tuple[object, ...], tuple[Tensor, Tensor] | None] = {}
        self._tables: dict[int, Table | None] = {}

    @property
    def num_layers(self) -> int:
        """How many layers the model has."""
        return len(self._styles)

    def learn(self, layer: int, table: Table | None) -> None:
        """Remember the rotary table that the model hands to a layer for the new tokens; the first is kept.

        Args:
            layer: which layer.
            table: (cos, sin), `[batch or 1, tokens, width]`, at the positions of the prompt.
        """
        self._tables.setdefault(layer, table)

    def lay(self, layer: int, slots: Sequence[Slot], keys: Tensor, values: Tensor) -> None:
        """Write stored chunks to their columns.

        Args:
            layer: which layer.
            slots: the chunks to lay.
            keys: `[batch, kv_heads, tokens, head_dim]`; the chunks' columns receive keys rotated for this prompt.
            values: likewise; values carry no position and are copied.
        """
        started = time.perf_counter()
        for slot in slots:
            places = (keys[slot.row, :, slot.columns], values[slot.row, :, slot.columns])
            turning = self._styles[layer].slot
            self._move(layer, slot, places[turning])
            places[1 - turning].copy_(slot.states(layer)[1 - turning])
        self._report.realign_ms += 1e3 * (time.perf_counter() - started)

    def moved(self, layer: int, slot: Slot, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """A chunk's stored K and V as they would be laid.

        Args:
            layer: which layer.
            slot: the chunk.
            keys: `[kv_heads, tokens, head_dim]`, for shape, dtype and device only.
            values: likewise.

        Returns:
            New keys, rotated for this prompt, and the stored values.
        """
        turning = self._styles[layer].slot
        stored = [part.to(keys.device) for part in slot.states(layer)]
        stored[turning] = torch.empty_like((keys, values)[turning])
        self._move(layer, slot, stored[turning])
        return stored[0], stored[1]

    def turned(self, layer: int, slot: Slot, keys: Tensor, tokens: Tensor) -> Tensor:
        """Some of a chunk's keys as they would be laid.

        Args:
            layer: which layer; its keys are what its rotary style turns.
            slot: the chunk.
            keys: `[heads, tokens, head_dim]`, rotated for the chunk's own positions.
            tokens: which of the chunk's tokens these are.

        Returns:
            New keys, rotated for this prompt.
        """
        turn = self._turn(layer, slot)
        if turn is None:
            return keys
        out = torch.empty_like(keys)
        self._styles[layer].move(keys, (turn[0][tokens], turn[1][tokens]), out=out)
        return out

    def turns_keys(self, layer: int) -> bool:
        """Whether a layer rotates its keys, or nothing; not what stands in the place of values."""
        return self._styles[layer].slot == 0

    def unturned(self, layer: int, keys: Tensor, back: bool = False) -> Tensor:
        """Keys of all new tokens as they would be at position 0.

        Args:
            layer: which layer.
            keys: `[batch, kv_heads, tokens, head_dim]`, rotated for the prompt's positions.
            back: the other way round: from position 0 to the prompt's positions.

        Returns:
            New keys; the same where the layer does not rotate.
        """
        table = self._tables.get(layer)
        if table is None:
            return keys.clone()
        zero = (torch.ones_like(table[0]), torch.zeros_like(table[1]))
        turn = compose(self._styles[layer], *((zero, table) if back else (table, zero)))
        out = torch.empty_like(keys)
        self._styles[layer].move(keys, (turn[0][:, None], turn[1][:, None]), out=out)
        return out

    def _move(self, layer: int, slot: Slot, out: Tensor) -> None:
        stored, turn = slot.states(layer)[self._styles[layer].slot], self._turn(layer, slot)
        if turn is None:
            out.copy_(stored)
        else:
            turn = (turn[0].to(out.device), turn[1].to(out.device))
            self._styles[layer].move(stored.to(out.device), turn, out=out)

    def _turn(self, layer: int, slot: Slot) -> tuple[Tensor, Tensor] | None:
        """The turn of a chunk's keys in a layer, `[tokens, pairs]` each; None where they stay as they are."""
        table = self._tables.get(layer)
        number = slot.chunk.layer_table[layer]
        if table is None or number < 0:
            return None
        place = (slot.row, slot.start, number, id(table[0]), self._styles[layer])
        if place not in self._turns:
            row = slot.row if table[0].shape[0] > 1 else 0
            new = tuple(part[row, slot.columns] for part in table)
            old = tuple(part.to(new[0].device) for part in slot.table(number))
            cos, sin = compose(self._styles[layer], old, (new[0], new[1]))
            stays = bool((sin == 0).all() and (cos == 1).all())
            self._turns[place] = None if stays else (cos, sin)
        return self._turns[place]


@torch.no_grad()
def mismatch(fresh: tuple[Tensor, Tensor], stored: tuple[Tensor, Tensor]) -> float:
    """How far stored K/V are from fresh ones, as a share of the fresh ones' size, at the token where it is most.

    One token that stands for an image is seen among hundreds of text.

    Args:
        fresh: (K, V) as computed in this prompt, `[kv_heads, tokens, head_dim]` each.
        stored: (K, V) from the store at the same places, realigned.

    Returns:
        The larger of the two relative differences (norms over heads and width); NaN counts as infinite.
    """
    shares = [_worst_share(new.float(), old.float()) for new, old in zip(fresh, stored, strict=True)]
    return max(share if share == share else float("inf") for share in shares)


def _worst_share(new: Tensor, old: Tensor) -> float:
    sizes, errors = (torch.linalg.vector_norm(part, dim=(0, 2)) for part in (new, new - old))
    return float((errors / sizes.maximum(sizes.square().mean().sqrt()).clamp_min(1e-20)).max())
