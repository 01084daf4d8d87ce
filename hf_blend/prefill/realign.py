# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Stored KV at its columns in a prompt: keys rotated to their new positions, always from the stored original.

All chunks of a forward are moved together: their tokens side by side are one tensor, rotated by one composed table. So
a layer costs the host the same few kernels, however many chunks there are; small layers are written several at a time.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..model.anatomy import Spans
from ..rotary.base import RotaryStyle, Table, compose
from ..store.chunk import StackedLayers
from ..store.stream import LazyLayers
from .plan import PlacedChunk
from .report import BlendReport

BESIDE = -1  # among the parts of a layer: what is stored beside K (0) and V (1)
GROUP_BYTES = 4 << 20  # of keys that are written at a time: as many layers as fit, where all chunks are in memory
PIECE_BYTES = (1 << 20, 8 << 20)  # of keys that are rotated at a time, on a CPU and on a GPU: as much as caches hold

Turn = tuple[Tensor, Tensor]  # what moves the tokens of some chunks in a layer, `[tokens, pairs]` each


@dataclass(frozen=True, eq=False)
class Placement:
    """Where the tokens of some chunks are, side by side.

    Attributes:
        columns: a slice where the chunks are neighbours in one batch entry.
        rows: of several batch entries, that of each token.
        row: of one batch entry, its number.
        layer_bytes: of the K of one layer, where several layers of each chunk are one tensor; otherwise 0.
    """

    chunks: tuple[PlacedChunk, ...]
    columns: Tensor | slice
    rows: Tensor | None
    row: int
    layer_bytes: int

    def write(self, states: Tensor, pieces: Sequence[Tensor]) -> None:
        """Write `[layers, heads, tokens of one chunk, width]` to `[layers, batch, heads, columns, width]`."""
        is_slice = isinstance(self.columns, slice)
        is_one_dtype = all(piece.dtype == states.dtype for piece in pieces)
        # torch.cat writes nothing to a narrower view of a single token
        if is_slice and is_one_dtype and len(pieces) > 1 and not states.requires_grad:
            torch.cat([*pieces], dim=2, out=states[:, self.row, :, self.columns])
            return
        stored = _join(pieces)
        if self.rows is not None:
            states.permute(1, 3, 0, 2, 4).index_put_((self.rows, self.columns), stored.permute(2, 0, 1, 3))
        elif is_slice:
            states[:, self.row, :, self.columns] = stored
        else:
            states[:, self.row].index_copy_(2, self.columns, stored)

    def read(self, states: Tensor) -> Tensor:
        """`[heads, tokens, width]` of `[batch, heads, columns, width]`."""
        if self.rows is not None:
            return states.transpose(1, 2)[self.rows, self.columns].transpose(0, 1)
        if isinstance(self.columns, slice):
            return states[self.row, :, self.columns]
        return states[self.row].index_select(1, self.columns)


class Realigner:
    """Writes stored chunks into a layer's buffers. A rotation is composed once per rotary table and kept.

    Attributes:
        styles: by layer, how its keys are rotated.
        tables: by layer, the rotary table of the new tokens; the first that it was given.
    """

    def __init__(
        self, styles: Sequence[type[RotaryStyle]], report: BlendReport, chunks: Sequence[PlacedChunk] = ()
    ) -> None:
        """Prepare for one forward."""
        self.styles = styles
        self.tables: dict[int, Table | None] = {}
        self._report = report
        self._all = tuple(chunks)
        self._tokens: dict[PlacedChunk, slice] = {}  # where those of a chunk are among the tokens of all
        start = 0
        for chunk in self._all:
            self._tokens[chunk] = slice(start, start + chunk.tokens)
            start += chunk.tokens
        # What follows is keyed by objects as such, which stay alive in the keys
        self._placements: dict[tuple[torch.device, tuple[PlacedChunk, ...]], Placement] = {}
        self._turns: dict[tuple[Placement, int, Tensor, type[RotaryStyle]], Turn] = {}
        self._alike: dict[Tensor, Table] = {}  # cos of a table → the same table, made earlier

    def known_table(self, layer: int, table: Table | None) -> Table | None:
        """The first table of a layer whose table is made again, so that its rotations are found again."""
        if table is None:
            return None
        first = self.tables.get(layer)
        if first is not None:
            self._alike[table[0]] = first
        return self._alike.get(table[0], table)

    def group(self, layer: int, chunks: Sequence[PlacedChunk], ends: Sequence[int], device: torch.device) -> range:
        """This layer, and those behind it that can be written with it, up to the next one of `ends`."""
        stop = layer + 1
        layer_bytes = self._placed(chunks, device).layer_bytes if chunks else 0
        if not layer_bytes:
            return range(layer, stop)
        last = min(end for end in ends if end >= layer)
        tables = chunks[0].chunk.layer_table
        while stop <= last and layer_bytes * (stop - layer) < GROUP_BYTES:
            if self.styles[stop] is not self.styles[layer] or tables[stop] != tables[layer]:
                break
            stop += 1
        return range(layer, stop)

    def write(self, layer: int, chunks: Sequence[PlacedChunk], *parts: Tensor, first: int = 0) -> None:
        """Write stored K and V of chunks to their columns; the first given part is K (0) or V (1).

        `[batch, kv_heads, tokens, head_dim]` each, of several layers `[layers, batch, …]`.
        """
        if not chunks:
            return
        started_s = time.perf_counter()
        device = parts[0].device
        placed = self._placed(chunks, device)
        for which, states in enumerate(parts, first):
            if states.dim() == 4:
                states = states[None]
            stored = _stored(placed, range(layer, layer + states.shape[0]), which, device)
            style = self.styles[layer]
            turn = self._turn(layer, placed, which) if which == style.slot else None
            if turn is None:
                placed.write(states, stored)
            elif isinstance(placed.columns, slice) and not states.requires_grad:
                rotate(style, turn, stored, states[:, placed.row, :, placed.columns])
            else:
                placed.write(states, [rotated(style, turn, stored)])
        self._report.realign_ms += 1e3 * (time.perf_counter() - started_s)

    def write_beside(self, layer: int, chunks: Sequence[PlacedChunk], states: Tensor, spans: Spans = ()) -> None:
        """Write a mixer's projections, or an indexer's keys, moved, to columns of `[batch, 1, tokens, width]`."""
        if not chunks:
            return
        placed = self._placed(chunks, states.device)
        turn = self._turn(layer, placed, BESIDE)
        parts = _stored(placed, range(layer, layer + 1), BESIDE, states.device)
        if turn is not None:
            style: Any = self.styles[layer].beside
            placed.write(states[None], [rotated(style, turn, parts)])
            return
        for columns, stored in spans or ((slice(None), slice(None)),):
            placed.write(states[None, ..., columns], [state[..., stored] for state in parts])

    @torch.no_grad()
    def mismatches(self, layer: int, chunks: Sequence[PlacedChunk], *computed: Tensor) -> list[float]:
        """By chunk, the largest relative error of a token's stored K or V against those computed; or a mixer's.

        By token, as a wrong one has to be seen among hundreds. `[batch, kv_heads, tokens, head_dim]` each.
        """
        device = computed[0].device
        count = len(chunks)
        placed = self._placed(chunks, device)
        lengths = torch.tensor([chunk.tokens for chunk in chunks], device=device)
        total = sum(chunk.tokens for chunk in chunks)
        number = torch.arange(count, device=device).repeat_interleave(lengths, output_size=total)
        worst = torch.zeros(count, device=device)
        for which, states in enumerate(computed, 0 if len(computed) > 1 else BESIDE):
            fresh = placed.read(states).float()
            stored = self._realigned(layer, placed, which, device)
            error = torch.linalg.vector_norm((fresh - stored).float(), dim=(0, 2))
            # Relative to the token, or to the mean of its chunk where that is larger
            size = torch.linalg.vector_norm(fresh, dim=(0, 2)).square_()
            mean = torch.zeros(count, device=device).index_add_(0, number, size) / lengths
            share = (error / size.maximum(mean[number]).clamp_min(1e-30).sqrt_()).nan_to_num(nan=float("inf"))
            worst = worst.scatter_reduce(0, number, share, "amax")
        errors: list[float] = worst.tolist()
        return errors

    def rotated(self, layer: int, chunk: PlacedChunk, keys: Tensor, tokens: Tensor) -> Tensor:
        """Some of a chunk's keys, `[heads, tokens, head_dim]`, as they would be written."""
        style = self.styles[layer]
        turn = self._turn(layer, self._placed([chunk], keys.device), style.slot)
        if turn is None:
            return keys
        cos, sin = turn
        tokens = tokens.to(cos.device)
        return rotated(style, (cos[tokens], sin[tokens]), [keys[None]])[0]

    def _placed(self, chunks: Sequence[PlacedChunk], device: torch.device) -> Placement:
        """The placement of some chunks, made once, without asking the device."""
        key = (device, tuple(chunks))
        if key in self._placements:
            return self._placements[key]

        # Their columns
        row = chunks[0].row
        is_one_row = all(chunk.row == row for chunk in chunks)
        columns: Tensor | slice = slice(chunks[0].start, chunks[-1].columns.stop)
        if not is_one_row or any(chunk.columns.stop != other.start for chunk, other in pairwise(chunks)):
            ranges = [torch.arange(chunk.columns.start, chunk.columns.stop) for chunk in chunks]
            columns = torch.cat(ranges).to(device)

        # Their batch entries
        rows = None
        if not is_one_row:
            lengths = torch.tensor([chunk.tokens for chunk in chunks])
            rows = torch.tensor([chunk.row for chunk in chunks]).repeat_interleave(lengths).to(device)

        # The bytes of a layer
        layer_bytes = 0
        stacks = [chunk.chunk.layers for chunk in chunks]
        if all(type(stack) is StackedLayers for stack in stacks):
            keys = stacks[0].keys  # type: ignore[attr-defined]
            token_bytes = keys[0].nbytes // keys.shape[2]
            layer_bytes = max(1, token_bytes * sum(chunk.tokens for chunk in chunks))
        placed = Placement(key[1], columns, rows, row, layer_bytes)
        self._placements[key] = placed
        return placed

    def _realigned(self, layer: int, placed: Placement, which: int, device: torch.device) -> Tensor:
        """What is stored of all tokens of some chunks, `[heads, tokens, width]`, rotated for this prompt."""
        parts = _stored(placed, range(layer, layer + 1), which, device)
        style: Any = self.styles[layer].beside if which == BESIDE else self.styles[layer]
        turn = None
        if which in (BESIDE, self.styles[layer].slot):
            turn = self._turn(layer, placed, which)
        return (_join(parts) if turn is None else rotated(style, turn, parts))[0]

    def _turn(self, layer: int, placed: Placement, which: int) -> Turn | None:
        """What moves some chunks' K, of what is in the slot of V, or beside both; None if it has no position."""
        style = self.styles[layer].beside if which == BESIDE else self.styles[layer]
        table = self.tables.get(layer)
        number = placed.chunks[0].chunk.layer_table[layer]
        if style is None or not style.turns or table is None or number < 0:
            return None
        key = (placed, number, table[0], style)
        if key in self._turns:
            return self._turns[key]

        every = self._placed(self._all, table[0].device) if self._all else placed
        if placed.chunks == every.chunks:
            # From the positions in the chunks to those in the prompt
            cos, sin = table
            row: int | Tensor = 0
            if cos.shape[0] > 1:
                row = placed.row if placed.rows is None else placed.rows.to(cos.device)
            columns = placed.columns
            if isinstance(columns, Tensor):
                columns = columns.to(cos.device)
            new = cos[row, columns], sin[row, columns]
            old_cos, old_sin = [], []
            for chunk in placed.chunks:
                cos, sin = chunk.chunk.tables[chunk.chunk.layer_table[layer]]
                old_cos.append(cos[chunk.inside].to(new[0].device))
                old_sin.append(sin[chunk.inside].to(new[0].device))
            cos, sin = compose(style, (torch.cat(old_cos), torch.cat(old_sin)), new)
        else:
            # A part of what moves all chunks
            whole: Any = self._turn(layer, every, which)
            tokens = [self._tokens[chunk] for chunk in placed.chunks]
            cos, sin = (_join([table[part] for part in tokens], dim=0) for table in whole)
        self._turns[key] = cos, sin
        return self._turns[key]


def rotate(style: type[RotaryStyle], turn: Turn, parts: Sequence[Tensor], out: Tensor) -> None:
    """Rotate states `[layers, heads, tokens of one chunk, width]` into `out`, side by side.

    Some heads at a time, so that what lies between loading and storing stays in the caches: keys are joined as they
    are, and products are in float32.
    """
    cos, sin = (table.to(out.device) for table in turn)
    heads = out.shape[1]
    step = heads * PIECE_BYTES[out.is_cuda] // max(1, out.nbytes)
    if step >= heads:
        style.move(_join(parts), (cos, sin), out)
        return
    step = max(1, step)
    for start in range(0, heads, step):
        some = slice(start, start + step)
        style.move(_join([part[:, some] for part in parts]), (cos, sin), out[:, some])


def rotated(style: type[RotaryStyle], turn: Turn, parts: Sequence[Tensor]) -> Tensor:
    """As `rotate`, into a new tensor."""
    layers, heads, _, width = parts[0].shape
    out = parts[0].new_empty((layers, heads, sum(part.shape[2] for part in parts), width))
    rotate(style, turn, parts, out)
    return out


def _stored(placed: Placement, layers: range, which: int, device: torch.device) -> list[Tensor]:
    """K (0), V (1) or projections (-1) of some layers as stored, `[layers, heads, tokens, width]` by chunk."""
    parts = []
    for placed_chunk in placed.chunks:
        stored = placed_chunk.chunk.layers
        if type(stored) is StackedLayers:  # an instance check of a Sequence takes longer
            states = (stored.values if which else stored.keys)[layers.start : layers.stop]
        else:
            layer = stored.load(layers.start) if isinstance(stored, LazyLayers) else stored[layers.start]
            states = layer[which][None]
        if not placed_chunk.is_whole:
            states = states[:, :, placed_chunk.inside]
        if states.device != device:
            states = states.to(device, non_blocking=True)
        parts.append(states)
    return parts


def _join(parts: Sequence[Tensor], dim: int = 2) -> Tensor:
    """Tensors side by side along an axis; a single one as it is."""
    return parts[0] if len(parts) == 1 else torch.cat([*parts], dim=dim)
