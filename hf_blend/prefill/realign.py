# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Stored KV at its columns in a prompt: keys moved to their new positions, always from the stored original.

All chunks of a forward are moved together: their tokens side by side are one tensor, rotated by one composed table. So
a layer costs the host the same few kernels, however many chunks there are; small layers are written several at a time.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from ..model.extras import Spans
from ..rotary.base import RotaryStyle, compose
from ..rotary.tables import Table
from ..store.chunk import StackedLayers
from ..store.stream import LazyLayers, StreamedLayers
from .copies import Copies
from .plan import PlacedChunk
from .report import BlendReport

BESIDE = -1  # among the parts of a layer: what is stored beside K (0) and V (1)
AHEAD = (StackedLayers, StreamedLayers, tuple)  # layers that are read ahead; others have to be computed
MANY = 8
GROUP_BYTES = 4 << 20  # of keys that are written at a time: as many layers as fit, where all chunks are in memory


@dataclass
class Placement:
    """Where the tokens of some chunks stand, side by side."""

    chunks: tuple[PlacedChunk, ...]
    columns: Tensor | slice  # a slice where the chunks are neighbours in one batch entry
    rows: Tensor | None  # of several batch entries, that of each token
    row: int
    tokens: int
    layer_bytes: int  # of the K of one layer, where several layers of each chunk are one tensor; otherwise 0
    span: slice | None = None  # where their tokens are among those of all chunks, if they are neighbours there

    def write(self, states: Tensor, pieces: Sequence[Tensor]) -> None:
        """Write `[layers, heads, tokens of one chunk, width]` to `[layers, batch, heads, columns, width]`."""
        # torch.cat writes nothing to a narrower view of a single token
        fits = isinstance(self.columns, slice) and not states.requires_grad and len(pieces) > 1
        if fits and all(piece.dtype == states.dtype for piece in pieces):
            torch.cat([*pieces], dim=2, out=states[:, self.row, :, self.columns])
            return
        stored = pieces[0] if len(pieces) == 1 else torch.cat([*pieces], dim=2)
        if self.rows is not None:
            states.permute(1, 3, 0, 2, 4).index_put_((self.rows, self.columns), stored.permute(2, 0, 1, 3))
        elif isinstance(self.columns, slice):
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

    def take(self, table: Table) -> Table:
        """`[tokens, width]` of cos and sin of a rotary table, `[batch or 1, columns, width]` each."""
        cos, sin = table
        row = self.row if self.rows is None else self.rows.to(cos.device)
        row = 0 if cos.shape[0] == 1 else row
        columns = self.columns.to(cos.device) if isinstance(self.columns, Tensor) else self.columns
        return cos[row, columns], sin[row, columns]


@dataclass(frozen=True)
class Rotation:
    """What moves the tokens of some chunks in a layer, `[tokens, pairs]` each."""

    style: type[RotaryStyle]
    cos: Tensor
    sin: Tensor

    def move(self, parts: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
        """Rotate states `[layers, heads, tokens of one chunk, width]` side by side."""
        states = parts[0] if len(parts) == 1 else torch.cat([*parts], dim=2)
        out = torch.empty_like(states) if out is None else out
        self.style.move(states, (self.cos.to(states.device), self.sin.to(states.device)), out=out)
        return out


class Realigner:
    """Writes stored chunks into a layer's buffers. A rotation is composed once per rotary table and kept."""

    def __init__(
        self, styles: Sequence[type[RotaryStyle]], report: BlendReport, chunks: Sequence[PlacedChunk] = ()
    ) -> None:
        """Prepare for one forward."""
        self.styles, self._report = styles, report
        self._all, self._starts = tuple(chunks), [0, *accumulate(chunk.tokens for chunk in chunks)]
        self._first = {id(chunk): number for number, chunk in enumerate(self._all)}
        self._joined_states: dict[tuple[int, torch.device], Tensor | None] = {}
        self._placements: dict[tuple[object, ...], Placement] = {}
        self._rotations: dict[tuple[object, ...], Rotation] = {}
        self.tables: dict[int, Table | None] = {}  # by layer, of the new tokens; the first that it was given
        self._alike: dict[int, Table] = {}  # id of a table → the same one, made earlier
        self._alive: list[Table] = []
        self._copies: Copies | None = None  # opened where there is something to bring
        self.keeps_copies = False  # see `Copies.keeps_used`

    def known_table(self, layer: int, table: Table | None) -> Table | None:
        """The first table of a layer whose table is made again, so that its rotations are found again."""
        first = self.tables.get(layer)
        if table is None:
            return None
        if first is not None:
            self._alike[id(table[0])] = first
            self._alive.append(table)
        return self._alike.get(id(table[0]), table)

    def group(self, layer: int, chunks: Sequence[PlacedChunk], ends: Sequence[int], device: torch.device) -> range:
        """This layer, and those behind it that can be written with it, up to the next one of `ends`."""
        placed = self._placed(chunks, device) if chunks else None
        stop, last = layer + 1, min(end for end in ends if end >= layer)
        if placed is None or not placed.layer_bytes:
            return range(layer, stop)
        chunk, style = placed.chunks[0].chunk, self.styles[layer]
        while stop <= last and placed.layer_bytes * (stop - layer) < GROUP_BYTES:
            if self.styles[stop] is not style or chunk.layer_table[stop] != chunk.layer_table[layer]:
                break
            stop += 1
        return range(layer, stop)

    def prefetch(self, layers: range, device: torch.device) -> None:
        """Begin to copy all chunks' K and V of some layers to a device; nothing for a CPU."""
        if not self._all or device.type == "cpu":
            return
        placed = self._placed(self._all, device)
        self._copies = self._copies or Copies()
        self._copies.keeps_used = self.keeps_copies
        if (placed.layer_bytes or len(layers) == 1) and all(isinstance(own.chunk.layers, AHEAD) for own in self._all):
            for which in (0, 1):
                bring = partial(self._parts, placed, layers, which)
                self._copies.ahead((layers.start, layers.stop, which), device, bring)

    def close(self) -> None:
        """Bring nothing more."""
        if self._copies is not None:
            self._copies.close()

    def write(self, layer: int, chunks: Sequence[PlacedChunk], *parts: Tensor, first: int = 0) -> None:
        """Write stored K and V of chunks to their columns, or with `first` what is there from V (1) on.

        `[batch, kv_heads, tokens, head_dim]` each, of several layers `[layers, batch, …]`.
        """
        if not chunks:
            return
        started, device = time.perf_counter(), parts[0].device
        placed = self._placed(chunks, device)
        for which, states in enumerate(parts, first):
            states = states if states.dim() == 5 else states[None]
            stored = self._parts(placed, range(layer, layer + states.shape[0]), which, device)
            rotation = self._rotation(layer, placed, which) if which == self.styles[layer].slot else None
            if rotation is None:
                placed.write(states, stored)
            elif isinstance(placed.columns, slice) and not states.requires_grad:
                rotation.move(stored, states[:, placed.row, :, placed.columns])
            else:
                placed.write(states, [rotation.move(stored)])
        self._report.realign_ms += 1e3 * (time.perf_counter() - started)

    def write_beside(self, layer: int, chunks: Sequence[PlacedChunk], states: Tensor, spans: Spans = ()) -> None:
        """Write a mixer's projections, or an indexer's keys, moved, to columns of `[batch, 1, tokens, width]`."""
        if not chunks:
            return
        placed = self._placed(chunks, states.device)
        rotation = self._rotation(layer, placed, BESIDE)
        parts = self._parts(placed, range(layer, layer + 1), BESIDE, states.device)
        if rotation is not None:
            placed.write(states[None], [rotation.move(parts)])
            return
        for columns, stored in spans or ((slice(None), slice(None)),):
            placed.write(states[None, ..., columns], [state[..., stored] for state in parts])

    def moved(self, layer: int, chunk: PlacedChunk, *states: Tensor) -> tuple[Tensor, ...]:
        """A chunk's stored K and V, `[kv_heads, tokens, head_dim]`, or projections of a mixer, as they are written."""
        placed = self._placed([chunk], states[0].device)
        parts = enumerate(states, 0 if len(states) > 1 else BESIDE)
        return tuple(self._stored(layer, placed, which, state).to(state.dtype) for which, state in parts)

    @torch.no_grad()
    def mismatches(self, layer: int, chunks: Sequence[PlacedChunk], *computed: Tensor) -> list[float]:
        """By chunk, the largest relative error of a token's stored K or V against those computed; or a mixer's.

        By token, as one of an image has to be seen among hundreds of text. `[batch, kv_heads, tokens, head_dim]` each.
        """
        device, count = computed[0].device, len(chunks)
        placed = self._placed(chunks, device)
        lengths = torch.tensor([chunk.tokens for chunk in chunks], device=device)
        total = sum(chunk.tokens for chunk in chunks)
        number = torch.arange(count, device=device).repeat_interleave(lengths, output_size=total)
        worst = torch.zeros(count, device=device)
        for which, states in enumerate(computed, 0 if len(computed) > 1 else BESIDE):
            fresh, stored = placed.read(states).float(), self._stored(layer, placed, which, states)
            error = torch.linalg.vector_norm(fresh - stored, dim=(0, 2), dtype=torch.float32)
            size = torch.linalg.vector_norm(fresh, dim=(0, 2)).square_()
            mean = torch.zeros(count, device=device).index_add_(0, number, size) / lengths
            share = (error / size.maximum(mean[number]).clamp_min(1e-30).sqrt_()).nan_to_num(nan=float("inf"))
            worst = worst.scatter_reduce(0, number, share, "amax")
        errors: list[float] = worst.tolist()
        return errors

    def rotated(self, layer: int, chunk: PlacedChunk, keys: Tensor, tokens: Tensor) -> Tensor:
        """Some of a chunk's keys, `[heads, tokens, head_dim]`, as they would be written."""
        style = self.styles[layer]
        rotation = self._rotation(layer, self._placed([chunk], keys.device), style.slot)
        if rotation is None:
            return keys
        tokens = tokens.to(rotation.cos.device)
        return Rotation(style, rotation.cos[tokens], rotation.sin[tokens]).move([keys])

    def _placed(self, chunks: Sequence[PlacedChunk], device: torch.device) -> Placement:
        """The placement of some chunks, made once, without asking the device."""
        key = (device, *map(id, chunks))
        if key in self._placements:
            return self._placements[key]
        row, lengths = chunks[0].row, [chunk.tokens for chunk in chunks]
        columns: Tensor | slice = slice(chunks[0].start, chunks[-1].columns.stop)
        rows, is_one = None, all(chunk.row == row for chunk in chunks)
        if not is_one or any(chunk.columns.stop != other.start for chunk, other in pairwise(chunks)):
            columns = torch.cat([torch.arange(chunk.columns.start, chunk.columns.stop) for chunk in chunks]).to(device)
        if not is_one:
            rows = torch.tensor([chunk.row for chunk in chunks]).repeat_interleave(torch.tensor(lengths)).to(device)
        tokens, layer_bytes, layers = sum(lengths), 0, [chunk.chunk.layers for chunk in chunks]
        if all(type(stack) is StackedLayers for stack in layers):
            keys = layers[0].keys  # type: ignore[attr-defined]
            layer_bytes = max(1, keys[0].nbytes // keys.shape[2] * tokens)
        # keeps the chunks, so their ids are not used again
        placed = Placement(tuple(chunks), columns, rows, row, tokens, layer_bytes)
        start = self._first.get(id(chunks[0]), 0)
        if self._all and self._all[start : start + len(chunks)] == placed.chunks:
            placed.span = slice(self._starts[start], self._starts[start + len(chunks)])
        self._placements[key] = placed
        return placed

    def _stored(self, layer: int, placed: Placement, which: int, like: Tensor) -> Tensor:
        """What is stored of all tokens of some chunks, `[heads, tokens, width]`, rotated for this prompt."""
        parts = self._parts(placed, range(layer, layer + 1), which, like.device)
        turns = which in (BESIDE, self.styles[layer].slot)
        rotation = self._rotation(layer, placed, which) if turns else None
        if rotation is not None:
            return rotation.move(parts)[0]
        return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=2))[0]

    def _rotation(self, layer: int, placed: Placement, which: int) -> Rotation | None:
        """The rotation of some chunks' K, of what is in the place of V, or beside both; None if it has no position."""
        style = self.styles[layer].beside if which == BESIDE else self.styles[layer]
        table, number = self.tables.get(layer), placed.chunks[0].chunk.layer_table[layer]
        if style is None or not style.turns or table is None or number < 0:
            return None
        key = (id(placed), number, id(table[0]), style)
        if key not in self._rotations:
            if placed.span is None or len(placed.chunks) == len(self._all):
                new = placed.take(table)
                old = [(chunk.chunk.tables[chunk.chunk.layer_table[layer]], chunk.inside) for chunk in placed.chunks]
                cos, sin = (torch.cat([pair[n][inside].to(new[0].device) for pair, inside in old]) for n in (0, 1))
                self._rotations[key] = Rotation(style, *compose(style, (cos, sin), new))
            else:
                every: Any = self._rotation(layer, self._placed(self._all, table[0].device), which)
                self._rotations[key] = Rotation(style, every.cos[placed.span], every.sin[placed.span])
        return self._rotations[key]

    def _parts(self, placed: Placement, layers: range, which: int, device: torch.device | None = None) -> list[Tensor]:
        """K (0), V (1) or projections (-1) of some layers as stored, `[layers, heads, tokens, width]` by chunk.

        With a device: one tensor if all is there already. Without: nothing is computed, and the list is full or empty.
        """
        if device is not None and placed.span is not None and (len(self._all) >= MANY or self._copies is not None):
            ready = self._ready(placed.span, layers, which, device)
            if ready is not None:
                return [ready]
        parts = []
        for chunk in placed.chunks:
            stored = chunk.chunk.layers
            if type(stored) is StackedLayers:  # an instance check of a Sequence takes longer
                states = (stored.values if which else stored.keys)[layers.start : layers.stop]
            elif device is not None:
                layer = stored.load(layers.start) if isinstance(stored, LazyLayers) else stored[layers.start]
                states = layer[which][None]
            else:
                pair = stored.peek(layers.start) if isinstance(stored, StreamedLayers) else stored[layers.start]
                if pair is None or len(pair) < 2:
                    return []
                states = pair[which][None]
            parts.append(states if chunk.is_whole else states[:, :, chunk.inside])
        is_there = device is None or all(state.device == device for state in parts)
        return parts if is_there else [state.to(device, non_blocking=True) for state in parts]

    def _ready(self, span: slice, layers: range, which: int, device: torch.device) -> Tensor | None:
        """The tokens in `span` of all chunks, from what was joined, or copied to the device; None if neither was."""
        if which >= 0 and len(self._all) >= MANY and (joined := self._joined(which, device)) is not None:
            return joined[layers.start : layers.stop, :, span]
        copied = None if self._copies is None else self._copies.take((layers.start, layers.stop, which), device)
        return None if copied is None else copied[:, :, span]

    def _joined(self, which: int, device: torch.device) -> Tensor | None:
        """K (0) or V (1) of all layers of all chunks side by side, `[layers, heads, tokens, width]`, if it is small.

        One more copy takes less time than writing many chunks.
        """
        key = (which, device)
        if key not in self._joined_states:
            placed = self._placed(self._all, device)
            is_small = 0 < placed.layer_bytes * len(self.styles) <= GROUP_BYTES
            parts = self._parts(placed, range(len(self.styles)), which) if is_small else []
            here = [state.to(parts[0].device) for state in parts]
            self._joined_states[key] = torch.cat(here, dim=2).to(device) if parts else None
        return self._joined_states[key]
