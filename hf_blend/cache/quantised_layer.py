# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""K and V of a layer in 8 or 4 bits, K by channel, V by token: the first tokens packed, the last as computed.

KIVI (https://arxiv.org/abs/2402.02750), section 3: keys have a few large channels and are scaled by channel, over
groups of tokens; values have none and are scaled by token; the last tokens stay as they are.
Differs: 8 bits, symmetric, so that no entry is off by more than 1/254 of the largest of its group, and half a rounding
of the dtype; or 4 bits with a least value for each group, as with the codec int4. Every forward sees its own tokens as
they are.

A cell is quantised once, with others that came just before or behind it, and its bits never change, whatever is
removed, shared or moved. Where some of a group are removed, the others keep its scales.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError
from ..store import nibbles
from .layers import BlendLayer, Columns, MadeStates, Pair

GROUP_TOKENS = 32  # share a scale per channel of K
LARGEST = 127
PARTS = ("bytes", "scale", "least")  # of K and of V; the last one in 4 bits only
GROUPS = "groups"  # of packed cells: by cell, which scales its key has
Form = tuple[tuple[int, ...], torch.dtype]


def pack(bits: int, keys: Tensor, values: Tensor) -> dict[str, Tensor]:
    """Quantise whole groups, `[batch, kv_heads, tokens, width]` each.

    Returns parts by name, whose third axis is the tokens, or the groups for what K is scaled by.
    """
    if bits == 4 and (keys.shape[3] % 2 or values.shape[3] % 2):
        raise ConfigError(
            f"kv_bits=4 came with heads of width {keys.shape[3]} and {values.shape[3]}, but two values share a byte, "
            "so an even width is expected. Use kv_bits=8."
        )
    keys = keys.unflatten(2, (-1, GROUP_TOKENS))
    k: tuple[Tensor, ...]
    v: tuple[Tensor, ...]
    if bits == 4:
        k, v = nibbles.packed(keys, 3), nibbles.packed(_channel_groups(values), 4)
    else:
        k, v = _steps(keys, 3), _steps(values, 3)
    k = k[0].flatten(2, 3), *(scale.squeeze(3) for scale in k[1:])
    pairs = (("k", k), ("v", v))
    return {f"{kind}.{name}": part for kind, parts in pairs for name, part in zip(PARTS, parts, strict=False)}


def unpack(parts: Mapping[str, Tensor], keys: Tensor, values: Tensor) -> None:
    """Write packed tokens to `[batch, kv_heads, tokens, width]` each; as many tokens in a row share a scale of K."""
    groups = parts["k.scale"].shape[2]
    keys, steps = (one.unflatten(2, (groups, -1)) for one in (keys, parts["k.bytes"]))
    if "k.least" in parts:
        nibbles.unpacked(steps, parts["k.scale"].unsqueeze(3), parts["k.least"].unsqueeze(3), out=keys)
        nibbles.unpacked(parts["v.bytes"], parts["v.scale"], parts["v.least"], out=_channel_groups(values))
    else:
        keys.copy_(steps).mul_(parts["k.scale"].unsqueeze(3))
        values.copy_(parts["v.bytes"]).mul_(parts["v.scale"])


def _channel_groups(values: Tensor) -> Tensor:
    return values.unflatten(3, (-1, nibbles.group_width(values.shape[3])))


def _steps(states: Tensor, axis: int) -> tuple[Tensor, ...]:
    """Symmetric steps of 8 bits, and their size."""
    fine = torch.float32 if states.dtype == torch.float16 else states.dtype  # whose small ones are fine too
    scales = (states.abs().amax(dim=axis, keepdim=True).float() / LARGEST).to(fine)
    scales = torch.where(scales > 0, scales, 1.0)
    return (states.float() / scales).round_().clamp_(-LARGEST, LARGEST).to(torch.int8), scales


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
        self.columns = {
            name: Columns(part, 1 if is_by_group(name) else GROUP_TOKENS) for name, part in pack(bits, *zeros).items()
        }
        self.columns[GROUPS] = Columns(torch.empty((1, 1, 0), dtype=torch.int32, device=keys.device))
        self.held = self._next = Held(0, 0, (keys[:, :, :0].clone(), values[:, :, :0].clone()))

    @property
    def length(self) -> int:
        """How many tokens are held."""
        return self.held.packed + self.held.recent[0].shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of every buffer, spare room included."""
        return sum(one.nbytes for one in (*(part.buffer for part in self.columns.values()), *self.held.recent))

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

    def crop(self, tokens: int) -> None:
        """Hold the first tokens only."""
        self.restore(self._first(tokens))

    def map(self, change: Callable[[Tensor], Tensor]) -> None:
        """Change all that is held along its first axis, in place where its shape stays."""
        for name, part in self.columns.items():
            if name != GROUPS:
                changed = change(part.buffer)
                same = changed.shape == part.buffer.shape
                part.buffer = part.buffer.copy_(changed) if same else changed
        keys, values = map(change, self.held.recent)
        self.restore(Held(self.held.packed, self.held.groups, (keys, values)))

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
        chosen = {name: part.buffer[0] for name, part in self.columns.items()}
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
        new = {name: parts[name][None].to(device) for name in self.columns}
        self._write(held, {**new, GROUPS: new[GROUPS][None]})
        recent = torch.cat([held.recent[0], keys], 2), torch.cat([held.recent[1], values], 2)
        self.restore(Held(held.packed + packed, held.groups + groups, recent))

    def _first(self, tokens: int) -> Held:
        """What is held of the first tokens."""
        held, recent = self.held, max(0, tokens - self.held.packed)
        keys, values = (part[:, :, :recent] for part in held.recent)
        if tokens >= held.packed:
            return Held(held.packed, held.groups, (keys, values))
        last = self.columns[GROUPS].buffer[0, 0, tokens - 1 : tokens]
        return Held(tokens, int(last) + 1 if tokens else 0, (keys, values))

    def _write(self, held: Held, parts: Mapping[str, Tensor]) -> None:
        """Put parts behind what is held; their groups are counted from 0."""
        for name, part in parts.items():
            start = held.groups if is_by_group(name) else held.packed
            self.columns[name].write(start, part + held.groups if name == GROUPS else part)

    def _unpack(self, tokens: slice | Tensor, out: Sequence[Tensor]) -> None:
        """Unpack whole groups that follow each other with their scales, other tokens each with its own."""
        buffers = {name: part.buffer for name, part in self.columns.items()}
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


class QuantisedLayer(MadeStates, BlendLayer):
    """K and V of one decoder layer in 8 or 4 bits, but for the last 32 to 63 tokens.

    `keys` and `values` are unpacked at every look, except while a forward has opened them.
    """

    keeps_all = False

    def __init__(self, bits: int = 8, *given: Any) -> None:
        self._bits = bits
        self._cells: PackedCells | None = None
        self._opened: Pair | None = None
        super().__init__(*given)

    @property
    def packed_tokens(self) -> int:
        """How many of the tokens are held in few bits."""
        return 0 if self._cells is None else self._cells.held.packed

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        held = 0 if self._cells is None else self._cells.nbytes
        return super().nbytes + held + sum(one.nbytes for one in self._opened or ())

    @property
    def batch_size(self) -> int:
        """How many batch entries there are; 0 in an empty layer."""
        return 0 if self._cells is None else self._cells.held.recent[0].shape[0]

    def open(self, tokens: int, key_states: Tensor, value_states: Tensor) -> Pair:
        """See `BlendLayer.open`; everything is unpacked until `settle`."""
        if self._cells is None or (not self.length and self.batch_size != key_states.shape[0]):
            self.lazy_initialization(key_states, value_states)
            self._begin(key_states, value_states)
        self._opened = self._unpacked(tokens)
        self.length += tokens
        return self._opened[0][:, :, -tokens:], self._opened[1][:, :, -tokens:]

    def settle(self) -> None:
        """Pack whole groups, but for the last tokens."""
        if self._opened is None or self._cells is None:
            return
        (keys, values), self._opened, held, packed = self._opened, None, self._cells.length, self._cells.held.packed
        self._cells.append(held, keys[:, :, held:], values[:, :, held:])
        self._cells.commit()
        if self._cells.held.packed > packed:
            self.unchanged_tokens = min(self.unchanged_tokens, packed)

    def _forget(self, removed: int) -> None:
        if self._cells is not None and removed:
            self.length += removed
            self._shortened()
            self._cells.crop(self.length)

    def snapshot(self) -> Any:
        """What `restore` needs to take back every token that comes from now on."""
        return self.length, None if self._cells is None else self._cells.held

    def restore(self, snapshot: Any) -> None:
        """Forget the tokens that came since a snapshot."""
        length, held = snapshot
        self._opened = None
        if held is None or self._cells is None:
            return self.reset()
        self._cells.restore(held)
        self.length = length
        self._shortened()

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self._cells = self._opened = None

    def _begin(self, key_states: Tensor, value_states: Tensor) -> None:
        self._cells = PackedCells(self._bits, key_states, value_states)

    def _look(self, index: int) -> Tensor | None:
        return None if self._cells is None else (self._opened or self._unpacked(0))[index]

    def _unpacked(self, room: int) -> Pair:
        """All tokens unpacked, and room for some more behind them."""
        cells: Any = self._cells
        keys, values = cells.like(self.length + room)
        cells.read(0, self.length, (keys[:, :, : self.length], values[:, :, : self.length]))
        return keys, values

    def _map(self, change: Callable[[Tensor], Tensor]) -> None:
        self.unchanged_tokens = 0
        if self._cells is not None:
            self._cells.map(change)
        super()._map(change)


def is_by_group(name: str) -> bool:
    """Return True if a part has a column for each group, not for each token."""
    return name in ("k.scale", "k.least")


def column(name: str, tokens: int) -> int:
    """The column of a part behind so many tokens, which are whole groups where it has one for each group."""
    return tokens // GROUP_TOKENS if is_by_group(name) else tokens


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
