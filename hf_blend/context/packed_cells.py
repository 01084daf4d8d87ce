# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""K and V of one layer by cell: the first cells in 8 or 4 bits, the last as they were computed.

A cell is quantised once, with others that came just before or behind it, and its bits never change, whatever is
removed, shared or moved. A group is 32 cells that share the scales of K; where some are removed, the others keep them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..cache.quantised_layer import GROUP_TOKENS, PACKINGS, Packed, Pairs
from .sequence_layer import ROOM_TOKENS, Columns

Pair = tuple[Tensor, Tensor]  # K and V
Form = tuple[tuple[int, ...], torch.dtype]

GROUPS = "groups"  # of cells in few bits: by cell, which scales its key has


@dataclass(frozen=True)
class _Held:
    """How many cells are in few bits, how many groups they have, and the cells behind them as they were computed."""

    packed: int
    groups: int
    recent: Pair


class PackedCells:
    """K and V of cells 0, 1, 2 …; what `append` brings counts from `commit` on."""

    def __init__(self, bits: int, keys: Tensor, values: Tensor) -> None:
        """Take heads, widths, dtype and device from `[1, kv_heads, tokens, width]` each; hold nothing."""
        self._packing = PACKINGS[bits]
        zeros = (one.new_zeros((1, one.shape[1], GROUP_TOKENS, one.shape[3])) for one in (keys, values))
        parts = _named(self._packing.of(*zeros))
        self._parts = {
            name: Columns(part, ROOM_TOKENS // GROUP_TOKENS if _is_by_group(name) else ROOM_TOKENS)
            for name, part in parts.items()
        }
        self._parts[GROUPS] = Columns(torch.empty((1, 1, 0), dtype=torch.int32, device=keys.device))
        self._held = self._next = _Held(0, 0, (keys[:, :, :0].clone(), values[:, :, :0].clone()))

    @property
    def packed_cells(self) -> int:
        """How many cells are in few bits: the first ones."""
        return self._held.packed

    @property
    def nbytes(self) -> int:
        """Bytes of every buffer, spare room included."""
        return sum(states.nbytes for states in (*(part.buffer for part in self._parts.values()), *self._held.recent))

    def like(self, tokens: int) -> Pair:
        """K and V for so many tokens, `[1, kv_heads, tokens, width]`, contents undefined."""
        keys, values = (part.new_empty((*part.shape[:2], tokens, part.shape[3])) for part in self._held.recent)
        return keys, values

    def append(self, cell: int, keys: Tensor, values: Tensor, sequences: int = 1) -> None:
        """Put new cells behind the first `cell` ones, and quantise what is no longer recent.

        Shapes: keys `[1, kv_heads, tokens, width]`.
        """
        held = self._cut(cell)
        whole = tuple(torch.cat(pair, 2) for pair in zip(held.recent, (keys, values), strict=True))
        groups = max(0, whole[0].shape[2] // GROUP_TOKENS - sequences)
        tokens = groups * GROUP_TOKENS
        if groups:
            of = torch.arange(groups, dtype=torch.int32, device=keys.device).repeat_interleave(GROUP_TOKENS)
            packed = _named(self._packing.of(*(part[:, :, :tokens] for part in whole)))
            self._write(held, {**packed, GROUPS: of[None, None]})
            whole = tuple(part[:, :, tokens:].clone() for part in whole)
        self._next = _Held(held.packed + tokens, held.groups + groups, (whole[0], whole[1]))

    def commit(self) -> None:
        """Hold what was appended last."""
        self._held = self._next

    def read(self, start: int, stop: int, out: Sequence[Tensor]) -> None:
        """Write the cells `start <= cell < stop` to `[1, kv_heads, cells, width]` each, in the dtype of these."""
        held = self._held
        end = min(max(held.packed, start), stop)
        if end > start:
            self._unpack(slice(start, end), [part[:, :, : end - start] for part in out])
        for part, recent in zip(out, held.recent, strict=True):
            part[:, :, end - start :] = recent[:, :, end - held.packed : stop - held.packed]

    def gather(self, cells: Tensor, at: Tensor, out: Sequence[Tensor]) -> None:
        """Write some cells to `[1, kv_heads, cells, width]` each.

        Shapes: cells `[cells]`.
        """
        held = self._held
        count = int(torch.searchsorted(cells, held.packed))
        if count:
            self._unpack(at[:count], [part[:, :, :count] for part in out])
        for part, recent in zip(out, held.recent, strict=True):
            part[:, :, count:] = recent.index_select(2, at[count:] - held.packed)

    def parts(self, cells: Tensor) -> dict[str, Tensor]:
        """All that is held of some cells, by name, without the first axis.

        Shapes: cells `[cells]` → `[kv_heads, groups, width]`.
        """
        held, at = self._held, cells.to(self._held.recent[0].device)
        count = int(torch.searchsorted(cells, held.packed))
        chosen = {name: part.buffer[0] for name, part in self._parts.items()}
        used, groups = chosen.pop(GROUPS)[0].index_select(0, at[:count]).unique(return_inverse=True)
        found = {
            name: part.index_select(1, used if _is_by_group(name) else at[:count]) for name, part in chosen.items()
        }
        recent = (part[0].index_select(1, at[count:] - held.packed) for part in held.recent)
        return {**found, GROUPS: groups.int(), **dict(zip("kv", recent, strict=True))}

    def extend(self, cell: int, parts: Mapping[str, Tensor]) -> None:
        """Take up what `parts` gave: cells in few bits behind those that are held, recent ones at the end."""
        recent, device = [parts[name][None] for name in "kv"], self._held.recent[0].device
        if GROUPS not in parts:
            self.append(cell, *(part.to(device) for part in recent))
            return self.commit()
        held, packed, groups = self._cut(cell), len(parts[GROUPS]), parts["k.scale"].shape[1]
        new = {name: parts[name][None].to(device) for name in self._parts}
        self._write(held, {**new, GROUPS: new[GROUPS][None]})
        whole = [torch.cat([one, part.to(device)], 2) for one, part in zip(held.recent, recent, strict=True)]
        self._held = self._next = _Held(held.packed + packed, held.groups + groups, (whole[0], whole[1]))

    def _cut(self, cell: int) -> _Held:
        """What is held of the first `cell` cells."""
        held = self._held
        if cell >= held.packed:
            return _Held(held.packed, held.groups, _first(held.recent, cell - held.packed))
        last = self._parts[GROUPS].buffer[0, 0, cell - 1 : cell]
        return _Held(cell, int(last) + 1 if cell else 0, _first(held.recent, 0))

    def _write(self, held: _Held, parts: Mapping[str, Tensor]) -> None:
        """Put parts behind what is held; their groups are counted from 0."""
        for name, part in parts.items():
            start = held.groups if _is_by_group(name) else held.packed
            self._parts[name].write(start, part + held.groups if name == GROUPS else part)

    def _unpack(self, cells: slice | Tensor, out: Sequence[Tensor]) -> None:
        """Unpack cells in few bits: whole groups that follow each other as such, others as groups of one."""
        buffers = {name: part.buffer for name, part in self._parts.items()}
        chosen = {name: _cells_of(part, cells) for name, part in buffers.items() if not _is_by_group(name)}
        groups = chosen.pop(GROUPS)[0, 0]
        whole = self._whole_groups(cells)
        for name in filter(_is_by_group, buffers):
            scales = buffers[name]
            chosen[name] = (scales[:, :, whole] if whole else scales.index_select(2, groups)).unsqueeze(3)
        chosen["k.bytes"] = chosen["k.bytes"].unflatten(2, (-1, GROUP_TOKENS if whole else 1))
        self._packing.from_parts([chosen[name] for name in buffers if name != GROUPS]).unpack(*out)

    def _whole_groups(self, cells: slice | Tensor) -> slice | None:
        """The groups that some cells are, where all groups have all of their cells; None where that is not sure."""
        held = self._held
        if not isinstance(cells, slice) or held.packed != held.groups * GROUP_TOKENS:
            return None
        is_whole = cells.start % GROUP_TOKENS == cells.stop % GROUP_TOKENS == 0
        return slice(cells.start // GROUP_TOKENS, cells.stop // GROUP_TOKENS) if is_whole else None


def forms(
    bits: int | None, layer: Sequence[tuple[int, int, torch.dtype]], counts: tuple[int, int, int]
) -> dict[str, Form]:
    """Shape and dtype of what a layer's `parts` gives."""
    packed, groups, recent = counts
    found: dict[str, Form] = {
        name: ((heads, recent, width), dtype) for name, (heads, width, dtype) in zip("kv", layer, strict=True)
    }
    if bits is None:
        return found
    like = (torch.empty((1, heads, GROUP_TOKENS, width), dtype=dtype, device="meta") for heads, width, dtype in layer)
    for name, part in _named(PACKINGS[bits].of(*like)).items():
        found[name] = (part.shape[1], groups if _is_by_group(name) else packed, *part.shape[3:]), part.dtype
    return {**found, GROUPS: ((packed,), torch.int32)}


def is_grouping(groups: Tensor, count: int) -> bool:
    """Whether cells, `[cells]`, can be of so many groups: in their order, and no more in one than share scales."""
    in_order = bool((groups.diff() >= 0).all() and (groups >= 0).all() and (groups < count).all())
    return in_order and bool((groups.bincount(minlength=count) <= GROUP_TOKENS).all())


def _named(packed: Packed | Pairs) -> dict[str, Tensor]:
    """The parts of packed tokens by name, their third axis the cells, or the groups for scales of K."""
    parts, half = packed.parts, len(packed.parts) // 2
    names = [f"{kind}.{name}" for kind in "kv" for name in ("bytes", "scale", "least")[:half]]
    flat = (parts[0].flatten(2, 3), *(part.squeeze(3) for part in parts[1:half]), *parts[half:])
    return dict(zip(names, flat, strict=True))


def _is_by_group(name: str) -> bool:
    return name in ("k.scale", "k.least")


def _cells_of(part: Tensor, cells: slice | Tensor) -> Tensor:
    return part[:, :, cells] if isinstance(cells, slice) else part.index_select(2, cells)


def _first(pair: Pair, cells: int) -> Pair:
    return pair[0][:, :, :cells], pair[1][:, :, :cells]
