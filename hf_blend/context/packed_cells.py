# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""K and V of one layer by cell: the first cells in 8 or 4 bits, the last as they were computed.

A cell is quantised once, with others that came just before or behind it, and its bits never change, whatever is
removed, shared or moved. Where some of a group are removed, the others keep its scales.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..cache.layers import Columns, Pair
from ..cache.quantised_layer import GROUP_TOKENS, is_by_group, pack, unpack

GROUPS = "groups"  # of packed cells: by cell, which scales its key has
Form = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class Held:
    """How many tokens are packed, how many groups they have, and the tokens behind them as they were computed."""

    packed: int
    groups: int
    recent: Pair


class PackedCells:
    """K and V of tokens 0, 1, 2 …, `[batch, kv_heads, tokens, width]`; what `append` adds counts from `commit` on."""

    def __init__(self, bits: int, keys: Tensor, values: Tensor) -> None:
        """Take batch, heads, widths, dtype and device from K and V; hold nothing."""
        self._bits = bits
        zeros = (one.new_zeros((*one.shape[:2], GROUP_TOKENS, one.shape[3])) for one in (keys, values))
        self._parts = {
            name: Columns(part, 1 if is_by_group(name) else GROUP_TOKENS) for name, part in pack(bits, *zeros).items()
        }
        self._parts[GROUPS] = Columns(torch.empty((1, 1, 0), dtype=torch.int32, device=keys.device))
        self.held = self._next = Held(0, 0, (keys[:, :, :0].clone(), values[:, :, :0].clone()))

    @property
    def nbytes(self) -> int:
        """Bytes of every buffer, spare room included."""
        return sum(one.nbytes for one in (*(part.buffer for part in self._parts.values()), *self.held.recent))

    def like(self, tokens: int) -> Pair:
        """K and V for so many tokens, contents undefined."""
        keys, values = (part.new_empty((*part.shape[:2], tokens, part.shape[3])) for part in self.held.recent)
        return keys, values

    def append(self, start: int, keys: Tensor, values: Tensor, sequences: int = 1) -> None:
        """Put new tokens behind the first `start` ones, and pack all whole groups but one for each sequence."""
        held = self._first(start)
        recent = [torch.cat(pair, 2) for pair in zip(held.recent, (keys, values), strict=True)]
        groups = max(0, recent[0].shape[2] // GROUP_TOKENS - sequences)
        tokens = groups * GROUP_TOKENS
        if groups:
            of = torch.arange(groups, dtype=torch.int32, device=keys.device).repeat_interleave(GROUP_TOKENS)
            packed = pack(self._bits, *(part[:, :, :tokens] for part in recent))
            self._write(held, {**packed, GROUPS: of[None, None]})
            recent = [part[:, :, tokens:].clone() for part in recent]
        self._next = Held(held.packed + tokens, held.groups + groups, (recent[0], recent[1]))

    def commit(self) -> None:
        """Hold what was appended last."""
        self.held = self._next

    def restore(self, held: Held) -> None:
        """Hold what was held before, since when tokens were only appended."""
        self.held = self._next = held

    def read(self, start: int, stop: int, out: Sequence[Tensor]) -> None:
        """Write the tokens `start <= token < stop` to K and V of so many, in the dtype of these."""
        held = self.held
        end = min(max(held.packed, start), stop)
        if end > start:
            self._unpack(slice(start, end), [part[:, :, : end - start] for part in out])
        for part, recent in zip(out, held.recent, strict=True):
            part[:, :, end - start :] = recent[:, :, end - held.packed : stop - held.packed]

    def gather(self, tokens: Tensor, at: Tensor, out: Sequence[Tensor]) -> None:
        """Write some tokens to K and V of so many; `tokens` ascend, on the CPU, and are `at` on the device."""
        held = self.held
        count = int(torch.searchsorted(tokens, held.packed))
        if count:
            self._unpack(at[:count], [part[:, :, :count] for part in out])
        for part, recent in zip(out, held.recent, strict=True):
            part[:, :, count:] = recent.index_select(2, at[count:] - held.packed)

    def parts(self, tokens: Tensor) -> dict[str, Tensor]:
        """All that is held of some tokens of the first batch entry, by name, `[kv_heads, tokens or groups, width]`."""
        held, at = self.held, tokens.to(self.held.recent[0].device)
        count = int(torch.searchsorted(tokens, held.packed))
        chosen = {name: part.buffer[0] for name, part in self._parts.items()}
        used, groups = chosen.pop(GROUPS)[0].index_select(0, at[:count]).unique(return_inverse=True)
        found = {
            name: part.index_select(1, used if is_by_group(name) else at[:count]) for name, part in chosen.items()
        }
        recent = (part[0].index_select(1, at[count:] - held.packed) for part in held.recent)
        return {**found, GROUPS: groups.int(), **dict(zip("kv", recent, strict=True))}

    def extend(self, start: int, parts: Mapping[str, Tensor]) -> None:
        """Hold what `parts` gave: packed tokens behind those that are, recent ones at the end."""
        device = self.held.recent[0].device
        keys, values = (parts[name][None].to(device) for name in "kv")
        if GROUPS not in parts:
            self.append(start, keys, values)
            return self.commit()
        held, packed, groups = self._first(start), len(parts[GROUPS]), parts["k.scale"].shape[1]
        new = {name: parts[name][None].to(device) for name in self._parts}
        self._write(held, {**new, GROUPS: new[GROUPS][None]})
        recent = torch.cat([held.recent[0], keys], 2), torch.cat([held.recent[1], values], 2)
        self.restore(Held(held.packed + packed, held.groups + groups, recent))

    def _first(self, tokens: int) -> Held:
        """What is held of the first tokens."""
        held, recent = self.held, max(0, tokens - self.held.packed)
        keys, values = (part[:, :, :recent] for part in held.recent)
        if tokens >= held.packed:
            return Held(held.packed, held.groups, (keys, values))
        last = self._parts[GROUPS].buffer[0, 0, tokens - 1 : tokens]
        return Held(tokens, int(last) + 1 if tokens else 0, (keys, values))

    def _write(self, held: Held, parts: Mapping[str, Tensor]) -> None:
        """Put parts behind what is held; their groups are counted from 0."""
        for name, part in parts.items():
            start = held.groups if is_by_group(name) else held.packed
            self._parts[name].write(start, part + held.groups if name == GROUPS else part)

    def _unpack(self, tokens: slice | Tensor, out: Sequence[Tensor]) -> None:
        """Unpack whole groups that follow each other with their scales, other tokens each with its own."""
        buffers = {name: part.buffer for name, part in self._parts.items()}
        groups = _columns(buffers.pop(GROUPS), tokens)[0, 0]
        scales = self._whole_groups(tokens) or groups
        chosen = {name: _columns(part, scales if is_by_group(name) else tokens) for name, part in buffers.items()}
        unpack(chosen, out[0], out[1])

    def _whole_groups(self, tokens: slice | Tensor) -> slice | None:
        """The groups that some tokens are, where all groups have all of their tokens; None where that is not sure."""
        held = self.held
        if not isinstance(tokens, slice) or held.packed != held.groups * GROUP_TOKENS:
            return None
        is_whole = tokens.start % GROUP_TOKENS == tokens.stop % GROUP_TOKENS == 0
        return slice(tokens.start // GROUP_TOKENS, tokens.stop // GROUP_TOKENS) if is_whole else None


def forms(
    bits: int | None, layer: Sequence[tuple[int, int, torch.dtype]], counts: tuple[int, int, int]
) -> dict[str, Form]:
    """Shape and dtype of what a layer's `parts` gives, for so many packed tokens, groups and recent tokens."""
    packed, groups, recent = counts
    found: dict[str, Form] = {
        name: ((heads, recent, width), dtype) for name, (heads, width, dtype) in zip("kv", layer, strict=True)
    }
    if bits is None:
        return found
    like = (torch.empty((1, heads, GROUP_TOKENS, width), dtype=dtype, device="meta") for heads, width, dtype in layer)
    for name, part in pack(bits, *like).items():
        found[name] = (part.shape[1], groups if is_by_group(name) else packed, *part.shape[3:]), part.dtype
    return {**found, GROUPS: ((packed,), torch.int32)}


def is_grouping(groups: Tensor, count: int) -> bool:
    """Return True if tokens can be of so many groups: in their order, and no more in one than share scales."""
    in_order = bool((groups.diff() >= 0).all() and (groups >= 0).all() and (groups < count).all())
    return in_order and bool((groups.bincount(minlength=count) <= GROUP_TOKENS).all())


def _columns(part: Tensor, columns: slice | Tensor) -> Tensor:
    return part[:, :, columns] if isinstance(columns, slice) else part.index_select(2, columns)
