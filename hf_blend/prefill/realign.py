# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Stored KV at its place in a prompt: keys moved to their new positions, always from the stored original.

All chunks of a forward are moved together: their tokens side by side are one tensor, rotated by one composed table. So
a layer costs the host the same few kernels, however many chunks there are; small layers are rotated several at a time.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from ..rotary.base import RotaryStyle, compose
from ..rotary.tables import Table
from .plan import Slot
from .report import BlendReport

KV = tuple[Tensor, Tensor]
GROUP_BYTES = 4 << 20  # of stored keys that are rotated at a time: as many layers as fit, where all are in memory


@dataclass
class Placement:
    """Where the tokens of some chunks stand, side by side.

    Attributes:
        slots: the chunks.
        columns: `[tokens]`, or a slice where they are neighbours in one batch entry.
        rows: `[tokens]`, the batch entry of each; None where all are in one.
        row: that one.
    """

    slots: tuple[Slot, ...]
    columns: Tensor | slice
    rows: Tensor | None
    row: int

    @cached_property
    def sources(self) -> list[tuple[Sequence[KV], slice | None]]:
        """The layers of each chunk, and which of its tokens are here; None for all."""
        return [(slot.chunk.layers, None if slot.is_whole else slot.inside) for slot in self.slots]

    def parts(self, layer: int, which: int) -> list[Tensor]:
        """K (0) or V (1) of a layer as stored, `[heads, tokens, width]` of each chunk."""
        found = [(layers[layer][which], inside) for layers, inside in self.sources]
        return [states if inside is None else states[:, inside] for states, inside in found]

    @classmethod
    def of(cls, slots: Sequence[Slot], device: torch.device) -> "Placement":
        """Find out where some chunks stand; their numbers are known to the host."""
        entries, row = {slot.row for slot in slots}, slots[0].row
        follows = all(one.columns.stop == other.start for one, other in pairwise(slots))
        if len(entries) == 1 and follows:
            return cls(tuple(slots), slice(slots[0].start, slots[-1].columns.stop), None, row)
        columns = torch.cat([torch.arange(slot.columns.start, slot.columns.stop) for slot in slots]).to(device)
        if len(entries) == 1:
            return cls(tuple(slots), columns, None, row)
        lengths = torch.tensor([slot.tokens for slot in slots])
        rows = torch.tensor([slot.row for slot in slots]).repeat_interleave(lengths).to(device)
        return cls(tuple(slots), columns, rows, row)

    def write(self, states: Tensor, stored: Tensor) -> None:
        """Write `[heads, tokens, width]` to its columns of `[batch, heads, columns, width]`."""
        if self.rows is not None:
            states.transpose(1, 2).index_put_((self.rows, self.columns), stored.transpose(0, 1))
        elif isinstance(self.columns, slice):
            states[self.row, :, self.columns] = stored
        else:
            states[self.row].index_copy_(1, self.columns, stored)

    def write_parts(self, states: Tensor, parts: Sequence[Tensor]) -> None:
        """As `write`, for tensors `[heads, tokens of one chunk, width]` side by side."""
        side_by_side = self.rows is None and isinstance(self.columns, slice) and not states.requires_grad
        if side_by_side and all(part.dtype == states.dtype and part.device == states.device for part in parts):
            torch.cat([*parts], dim=1, out=states[self.row, :, self.columns])
        else:
            self.write(states, _cat(parts, states.device))

    def read(self, states: Tensor) -> Tensor:
        """`[heads, tokens, width]` of `[batch, heads, columns, width]`."""
        if self.rows is not None:
            return states.transpose(1, 2)[self.rows, self.columns].transpose(0, 1)
        if isinstance(self.columns, slice):
            return states[self.row, :, self.columns]
        return states[self.row].index_select(1, self.columns)

    def take(self, table: Tensor) -> Tensor:
        """`[tokens, width]` of a rotary table `[batch or 1, columns, width]`."""
        if self.rows is not None and table.shape[0] > 1:
            return table[self.rows, self.columns]
        return table[self.row if table.shape[0] > 1 else 0][self.columns]


class Realigner:
    """Writes stored chunks into a layer's buffers. A rotation is composed once per rotary table and kept."""

    def __init__(self, styles: Sequence[type[RotaryStyle]], report: BlendReport) -> None:
        self._styles, self._report = styles, report
        self._placements: dict[tuple[int, ...], Placement] = {}
        self._turns: dict[tuple[object, ...], KV] = {}
        self._ahead: dict[tuple[int, int], tuple[object, Tensor]] = {}  # (placement, layer) → rotation, rotated keys
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
            slots: the chunks to write.
            keys: `[batch, kv_heads, tokens, head_dim]`; the chunks' columns receive keys rotated for this prompt.
            values: likewise; values carry no position and are copied.
        """
        if not slots:
            return
        started = time.perf_counter()
        placed, rotating = self._placed(slots, keys.device), self._styles[layer].slot
        turn = self._turn(layer, placed)
        for which, states in enumerate((keys, values)):
            if turn is None or which != rotating:
                placed.write_parts(states, placed.parts(layer, which))
            else:
                placed.write(states, self._rotated(layer, placed, turn, keys.device))
        self._report.realign_ms += 1e3 * (time.perf_counter() - started)

    def moved(self, layer: int, slot: Slot, keys: Tensor, values: Tensor) -> KV:
        """A chunk's stored K and V as they would be written.

        Args:
            layer: which layer.
            slot: the chunk.
            keys: `[kv_heads, tokens, head_dim]`, for dtype and device only.
            values: likewise.

        Returns:
            New keys, rotated for this prompt, and the stored values.
        """
        found = self._gathered(layer, self._placed([slot], keys.device), keys.device)
        return found[0].to(keys.dtype), found[1].to(values.dtype)

    @torch.no_grad()
    def mismatches(self, layer: int, slots: Sequence[Slot], keys: Tensor, values: Tensor) -> list[float]:
        """How far the stored K and V of some chunks are from those that were computed in this prompt.

        One token that stands for an image is seen among hundreds of text.

        Args:
            layer: which layer.
            slots: the chunks, at least one.
            keys: `[batch, kv_heads, tokens, head_dim]`, as computed.
            values: likewise.

        Returns:
            For each chunk the larger of the two differences at the token where it is most, as a share of the larger
            of that token's size and the chunk's mean size (norms over heads and width); NaN counts as infinite. The
            device is asked once.
        """
        placed, count, device = self._placed(slots, keys.device), len(slots), keys.device
        lengths = torch.tensor([slot.tokens for slot in slots], device=device)
        total = sum(slot.tokens for slot in slots)
        number = torch.arange(count, device=device).repeat_interleave(lengths, output_size=total)
        worst = torch.zeros(count, device=device)
        for states, stored in zip((keys, values), self._gathered(layer, placed, device), strict=True):
            fresh = placed.read(states).float()
            error, size = torch.stack((fresh - stored.float(), fresh)).square_().sum(dim=(1, 3))
            mean = torch.zeros(count, device=device).index_add_(0, number, size) / lengths
            share = (error / size.maximum(mean[number]).clamp_min(1e-30)).sqrt_().nan_to_num(nan=float("inf"))
            worst = worst.scatter_reduce(0, number, share, "amax")
        found: list[float] = worst.tolist()
        return found

    def turned(self, layer: int, slot: Slot, keys: Tensor, tokens: Tensor) -> Tensor:
        """Some of a chunk's keys as they would be written.

        Args:
            layer: which layer; its keys are what its rotary style rotates.
            slot: the chunk.
            keys: `[heads, tokens, head_dim]`, rotated for the chunk's own positions.
            tokens: which of the chunk's tokens these are.

        Returns:
            New keys, rotated for this prompt.
        """
        turn = self._turn(layer, self._placed([slot], keys.device))
        if turn is None:
            return keys
        out = torch.empty_like(keys)
        self._styles[layer].move(keys, (turn[0][tokens], turn[1][tokens]), out=out)
        return out

    def turns_keys(self, layer: int) -> bool:
        """Whether a layer rotates its keys, or nothing; not what is in the place of values."""
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

    def _placed(self, slots: Sequence[Slot], device: torch.device) -> Placement:
        place = tuple(map(id, slots))
        if place not in self._placements:
            self._placements[place] = Placement.of(slots, device)  # keeps the slots, so their ids are not used again
        return self._placements[place]

    def _gathered(self, layer: int, placed: Placement, device: torch.device) -> KV:
        """K and V of all tokens of some chunks, `[heads, tokens, width]` each, rotated for this prompt."""
        rotating, turn = self._styles[layer].slot, self._turn(layer, placed)
        if turn is None:
            return _cat(placed.parts(layer, 0), device), _cat(placed.parts(layer, 1), device)
        found = [Tensor(), Tensor()]
        found[1 - rotating] = _cat(placed.parts(layer, 1 - rotating), device)
        found[rotating] = self._rotated(layer, placed, turn, device)
        return found[0], found[1]

    def _rotated(self, layer: int, placed: Placement, turn: KV, device: torch.device) -> Tensor:
        """The rotating states of a layer; those of the next layers that rotate alike are made with them."""
        known, ahead = self._ahead.pop((id(placed), layer), (None, None))
        if known is turn and ahead is not None:
            return ahead
        layers, style = self._alike(layer, placed), self._styles[layer]
        states = _cat([part for one in layers for part in placed.parts(one, style.slot)], device)
        grouped = states.unflatten(1, (len(layers), -1))
        out = torch.empty_like(grouped)
        turn_here = (turn[0].to(device), turn[1].to(device))
        style.move(grouped, turn_here, out=out)
        for number, one in enumerate(layers[1:], 1):
            self._ahead[id(placed), one] = (turn, out[:, number])
        return out[:, 0]

    def _alike(self, layer: int, placed: Placement) -> list[int]:
        """This layer, and those behind it whose keys are in memory and rotate by the same table, up to a size."""
        first, style = placed.slots[0].chunk, self._styles[layer]
        if not all(isinstance(slot.chunk.layers, tuple) for slot in placed.slots):
            return [layer]
        like = first.layers[layer][style.slot]
        nbytes = like.nbytes // like.shape[1] * sum(slot.tokens for slot in placed.slots)
        found = [layer]
        for other in range(layer + 1, len(self._styles)):
            if nbytes * (len(found) + 1) > GROUP_BYTES:
                break
            states = first.layers[other][style.slot]
            same = (states.shape, states.dtype, states.device) == (like.shape, like.dtype, like.device)
            if same and self._styles[other] is style and first.layer_table[other] == first.layer_table[layer]:
                found.append(other)
        return found

    def _turn(self, layer: int, placed: Placement) -> KV | None:
        """The rotation of some chunks' keys in a layer, `[tokens, pairs]` each; None where the layer has none."""
        table, number = self._tables.get(layer), placed.slots[0].chunk.layer_table[layer]
        if table is None or number < 0:
            return None
        place = (id(placed), number, id(table[0]), self._styles[layer])
        if place not in self._turns:
            new = (placed.take(table[0]), placed.take(table[1]))
            parts = [slot.table(slot.chunk.layer_table[layer]) for slot in placed.slots]
            old = tuple(torch.cat([part[which].to(new[0].device) for part in parts]) for which in (0, 1))
            self._turns[place] = compose(self._styles[layer], (old[0], old[1]), new)
        return self._turns[place]


def _cat(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    if any(part.device != device for part in parts):
        parts = [part.to(device, non_blocking=True) for part in parts]
    return parts[0] if len(parts) == 1 else torch.cat([*parts], dim=1)
