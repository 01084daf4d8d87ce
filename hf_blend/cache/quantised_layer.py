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


def pack(bits: int, keys: Tensor, values: Tensor) -> dict[str, Tensor]:
    """Quantise whole groups, `[batch, kv_heads, tokens, width]` each.

    In 8 bits a step is the largest magnitude / 127, by channel in 32 tokens of K, and by token of V. In 4 bits a least
    value and a step, (largest - least) / 15, are in bfloat16, by 32 tokens of K, and by 32 channels of V (by all if 32
    does not divide the width).
    Returns tensors by name, whose third axis is the tokens, or the groups for the scales of K.
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
    return {f"{kind}.{name}": tensor for kind, parts in pairs for name, tensor in zip(PARTS, parts, strict=False)}


def unpack(parts: Mapping[str, Tensor], keys: Tensor, values: Tensor) -> None:
    """Write packed tokens to `[batch, kv_heads, tokens, width]` each; as many tokens in a row share a scale of K."""
    groups = parts["k.scale"].shape[2]
    keys, steps = (states.unflatten(2, (groups, -1)) for states in (keys, parts["k.bytes"]))
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
class PackedState:
    """How many tokens are packed, how many groups they have, and the tokens behind them as they were computed."""

    packed: int
    groups: int
    recent: Pair


class PackedCells:
    """K and V of tokens 0, 1, 2 …, `[batch, kv_heads, tokens, width]`; what `append` adds counts from `commit` on."""

    def __init__(self, bits: int, keys: Tensor, values: Tensor) -> None:
        """Take batch, heads, widths, dtype and device from K and V; hold nothing."""
        self._bits = bits
        zeros = (states.new_zeros((*states.shape[:2], GROUP_TOKENS, states.shape[3])) for states in (keys, values))
        self.columns = {
            name: Columns(data, 1 if is_by_group(name) else GROUP_TOKENS) for name, data in pack(bits, *zeros).items()
        }
        self.columns[GROUPS] = Columns(torch.empty((1, 1, 0), dtype=torch.int32, device=keys.device))
        self.state = self._next = PackedState(0, 0, (keys[:, :, :0].clone(), values[:, :, :0].clone()))

    @property
    def length(self) -> int:
        """How many tokens are held."""
        return self.state.packed + self.state.recent[0].shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of every buffer, spare room included."""
        return sum(data.nbytes for data in self.tensors())

    def tensors(self) -> list[Tensor]:
        """Every buffer, and the tokens that are not packed."""
        return [*(column.buffer for column in self.columns.values()), *self.state.recent]

    def like(self, tokens: int) -> Pair:
        """K and V for so many tokens, contents undefined."""
        keys, values = (states.new_empty((*states.shape[:2], tokens, states.shape[3])) for states in self.state.recent)
        return keys, values

    def append(self, start: int, keys: Tensor, values: Tensor) -> None:
        """Put new tokens behind the first `start` ones, and pack all whole groups but one."""
        state = self._first(start)
        recent = [torch.cat(pair, 2) for pair in zip(state.recent, (keys, values), strict=True)]
        groups = max(0, recent[0].shape[2] // GROUP_TOKENS - 1)
        tokens = groups * GROUP_TOKENS
        if groups:
            of = torch.arange(groups, dtype=torch.int32, device=keys.device).repeat_interleave(GROUP_TOKENS)
            packed = pack(self._bits, *(states[:, :, :tokens] for states in recent))
            self._write(state, {**packed, GROUPS: of[None, None]})
            recent = [states[:, :, tokens:].clone() for states in recent]
        self._next = PackedState(state.packed + tokens, state.groups + groups, (recent[0], recent[1]))

    def commit(self) -> None:
        """Hold what was appended last."""
        self.state = self._next

    def restore(self, state: PackedState) -> None:
        """Return to an earlier state, since which tokens were only appended."""
        self.state = self._next = state

    def crop(self, tokens: int) -> None:
        """Hold the first tokens only."""
        self.restore(self._first(tokens))

    def map(self, change: Callable[[Tensor], Tensor]) -> None:
        """Change all that is held along its first axis, in place where its shape stays."""
        for name, column in self.columns.items():
            if name != GROUPS:
                changed = change(column.buffer)
                same = changed.shape == column.buffer.shape
                column.buffer = column.buffer.copy_(changed) if same else changed
        keys, values = map(change, self.state.recent)
        self.restore(PackedState(self.state.packed, self.state.groups, (keys, values)))

    def read(self, start: int, stop: int, out: Sequence[Tensor]) -> None:
        """Unpack the tokens `start <= token < stop` into `out`: K and V of as many tokens, in their dtype."""
        state = self.state
        end = min(max(state.packed, start), stop)
        if end > start:
            self._unpack(slice(start, end), [states[:, :, : end - start] for states in out])
        for states, recent in zip(out, state.recent, strict=True):
            states[:, :, end - start :] = recent[:, :, end - state.packed : stop - state.packed]

    def parts(self, tokens: Tensor) -> dict[str, Tensor]:
        """All that is held of some tokens of the first batch entry, by name, `[kv_heads, tokens or groups, width]`."""
        state, at = self.state, tokens.to(self.state.recent[0].device)
        count = int(torch.searchsorted(tokens, state.packed))
        chosen = {name: column.buffer[0] for name, column in self.columns.items()}
        used, groups = chosen.pop(GROUPS)[0].index_select(0, at[:count]).unique(return_inverse=True)
        packed = {
            name: tensor.index_select(1, used if is_by_group(name) else at[:count]) for name, tensor in chosen.items()
        }
        recent = (states[0].index_select(1, at[count:] - state.packed) for states in state.recent)
        return {**packed, GROUPS: groups.int(), **dict(zip("kv", recent, strict=True))}

    def extend(self, start: int, parts: Mapping[str, Tensor]) -> None:
        """Append what `parts` gave: packed tokens behind the packed ones, recent tokens at the end."""
        device = self.state.recent[0].device
        keys, values = (parts[name][None].to(device) for name in "kv")
        if GROUPS not in parts:
            self.append(start, keys, values)
            return self.commit()
        state, packed, groups = self._first(start), len(parts[GROUPS]), parts["k.scale"].shape[1]
        new = {name: parts[name][None].to(device) for name in self.columns}
        self._write(state, {**new, GROUPS: new[GROUPS][None]})
        recent = torch.cat([state.recent[0], keys], 2), torch.cat([state.recent[1], values], 2)
        self.restore(PackedState(state.packed + packed, state.groups + groups, recent))

    def _first(self, tokens: int) -> PackedState:
        """What is held of the first tokens."""
        state, recent = self.state, max(0, tokens - self.state.packed)
        keys, values = (states[:, :, :recent] for states in state.recent)
        if tokens >= state.packed:
            return PackedState(state.packed, state.groups, (keys, values))
        last = self.columns[GROUPS].buffer[0, 0, tokens - 1 : tokens]
        return PackedState(tokens, int(last) + 1 if tokens else 0, (keys, values))

    def _write(self, state: PackedState, parts: Mapping[str, Tensor]) -> None:
        """Write packed tensors behind those of a state; their groups count from 0."""
        for name, tensor in parts.items():
            start = state.groups if is_by_group(name) else state.packed
            self.columns[name].write(start, tensor + state.groups if name == GROUPS else tensor)

    def _unpack(self, tokens: slice | Tensor, out: Sequence[Tensor]) -> None:
        """Unpack whole groups that follow each other with their scales, other tokens each with its own."""
        buffers = {name: column.buffer for name, column in self.columns.items()}
        groups = _columns(buffers.pop(GROUPS), tokens)[0, 0]
        scales = self._whole_groups(tokens) or groups
        chosen = {name: _columns(buffer, scales if is_by_group(name) else tokens) for name, buffer in buffers.items()}
        unpack(chosen, out[0], out[1])

    def _whole_groups(self, tokens: slice | Tensor) -> slice | None:
        """The groups that some tokens form, if every group has all of its tokens; None if that is not certain."""
        state = self.state
        if not isinstance(tokens, slice) or state.packed != state.groups * GROUP_TOKENS:
            return None
        is_whole = tokens.start % GROUP_TOKENS == tokens.stop % GROUP_TOKENS == 0
        return slice(tokens.start // GROUP_TOKENS, tokens.stop // GROUP_TOKENS) if is_whole else None


class QuantisedLayer(MadeStates, BlendLayer):
    """K and V of one decoder layer in 8 or 4 bits, but for the last 32 to 63 tokens.

    `keys` and `values` are unpacked at every look, except while a forward has opened them.
    """

    keeps_all = False

    def __init__(self, bits: int = 8, *args: Any) -> None:
        self._bits = bits
        self._cells: PackedCells | None = None
        self._opened: Pair | None = None
        super().__init__(*args)

    @property
    def packed_tokens(self) -> int:
        """How many tokens are packed."""
        return 0 if self._cells is None else self._cells.state.packed

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        packed = 0 if self._cells is None else self._cells.nbytes
        return super().nbytes + packed + sum(tensor.nbytes for tensor in self._opened or ())

    @property
    def batch_size(self) -> int:
        """How many batch entries there are; 0 in an empty layer."""
        return 0 if self._cells is None else self._cells.state.recent[0].shape[0]

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
        (keys, values), self._opened, start, packed = self._opened, None, self._cells.length, self._cells.state.packed
        self._cells.append(start, keys[:, :, start:], values[:, :, start:])
        self._cells.commit()
        if self._cells.state.packed > packed:
            self.unchanged_tokens = min(self.unchanged_tokens, packed)

    def _forget(self, removed: int) -> None:
        if self._cells is not None and removed:
            self.length += removed
            self._shortened()
            self._cells.crop(self.length)

    def state(self) -> dict[str, Tensor]:
        """See `BlendLayer.state`; what is packed stays so."""
        cells: Any = self._cells
        parts: dict[str, Tensor] = cells.parts(torch.arange(self.length))
        return {**parts, GROUPS: parts[GROUPS][None]}

    def load_state(self, state: Mapping[str, Tensor], tokens: int) -> None:
        """See `BlendLayer.load_state`."""
        self.reset()
        self._begin(state["k"][None], state["v"][None])
        self.lazy_initialization(state["k"], state["v"])
        cells: Any = self._cells
        cells.extend(0, {**state, GROUPS: state[GROUPS][0]})
        self.length = tokens

    def has_lengths(self, state: Mapping[str, Tensor], tokens: int) -> bool:
        """See `BlendLayer.has_lengths`."""
        packed, groups = state[GROUPS].shape[1], state["k.scale"].shape[1]
        for name, tensor in state.items():
            expected = groups if is_by_group(name) else packed
            if name in ("k", "v"):
                expected = tokens - packed
            if tensor.shape[1] != expected:
                return False
        return is_grouping(state[GROUPS][0], groups)

    def snapshot(self) -> Any:
        """What `restore` needs to take back every token that comes from now on."""
        return self.length, None if self._cells is None else self._cells.state

    def restore(self, snapshot: Any) -> None:
        """Forget the tokens that came since a snapshot."""
        length, state = snapshot
        self._opened = None
        if state is None or self._cells is None:
            return self.reset()
        self._cells.restore(state)
        self.length = length
        self._shortened()

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self._cells = self._opened = None

    def _begin(self, key_states: Tensor, value_states: Tensor) -> None:
        self._cells = PackedCells(self._bits, key_states, value_states)

    def _materialise(self, index: int) -> Tensor | None:
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


def is_grouping(groups: Tensor, count: int) -> bool:
    """Whether tokens can be of so many groups: in order, and no more in a group than share a scale."""
    in_order = bool((groups.diff() >= 0).all() and (groups >= 0).all() and (groups < count).all())
    return in_order and bool((groups.bincount(minlength=count) <= GROUP_TOKENS).all())


def _columns(tensor: Tensor, columns: slice | Tensor) -> Tensor:
    return tensor[:, :, columns] if isinstance(columns, slice) else tensor.index_select(2, columns)
