# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""K and V of a layer in 8 or 4 bits, K by channel, V by token: the first tokens packed, the last as computed.

KIVI (https://arxiv.org/abs/2402.02750), section 3: keys have a few large channels and are scaled by channel, over
groups of tokens; values have none and are scaled by token; the last tokens stay as they are.
Differs: 8 bits, symmetric, so that no entry is off by more than 1/254 of the largest of its group, and half a rounding
of the dtype; or 4 bits with a least value for each group, as with the codec int4. Every forward sees its own tokens as
they are.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError
from ..store import nibbles
from .layers import SPARE_SHARE, BlendLayer, MadeStates, Pair
from .static_layer import StaticLayer

GROUP_TOKENS = 32  # share a scale per channel of K
RING_TOKENS = 2 * GROUP_TOKENS
LARGEST = 127
PARTS = ("bytes", "scale", "least")  # of K and of V; the last one in 4 bits only


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


class QuantisedLayer(MadeStates, BlendLayer):
    """K and V of one decoder layer in 8 or 4 bits, but for the last 32 to 63 tokens.

    These are in a ring, token `t` in column `t % 64`. `keys` and `values` are unpacked at every look, except while a
    forward has opened them.
    """

    keeps_all = False

    def __init__(self, bits: int = 8, *given: Any) -> None:
        """Begin empty; `bits` is 8 or 4."""
        self._bits = bits
        self._packed: dict[str, Tensor] = {}
        self._opened: Pair | None = None
        self._settled = 0  # tokens behind which the opened ones begin
        super().__init__(*given)

    @property
    def packed_tokens(self) -> int:
        """How many of the tokens are held in few bits."""
        return max(0, self.length // GROUP_TOKENS - 1) * GROUP_TOKENS

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return super().nbytes + sum(one.nbytes for one in (*self._packed.values(), *(self._opened or ())))

    def open(self, tokens: int, key_states: Tensor, value_states: Tensor) -> Pair:
        """See `BlendLayer.open`; everything is unpacked until `settle`."""
        if self._buffers is None or (not self.length and self._buffers[0].shape[:2] != key_states.shape[:2]):
            self._buffers, self._packed = None, {}
            self.lazy_initialization(key_states, value_states)
            self._move(key_states, value_states, RING_TOKENS, slice(0, 0))
        self._settled, self._opened = self.length, self._unpacked(tokens)
        self.length += tokens
        return self._opened[0][:, :, -tokens:], self._opened[1][:, :, -tokens:]

    def settle(self) -> None:
        """Pack whole groups, but for the last tokens."""
        if self._opened is None:
            return
        opened, end, self._opened = self._opened, self.length, None
        self.length = self._settled
        start, self.length = self.packed_tokens, end
        if (packed := self.packed_tokens) > start:
            self.unchanged_tokens = min(self.unchanged_tokens, start)
            self._reserve(packed)
            for name, part in pack(self._bits, *(states[:, :, start:packed] for states in opened)).items():
                first = _column(name, start)
                self._packed[name][:, :, first : first + part.shape[2]] = part
        self._fill_ring(opened)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens; those in front of them in a packed group are unpacked for good."""
        removed = self.check_crop(tokens_to_remove)
        if self._buffers is not None and removed:
            held = self._unpacked(0)
            self._shorten(self.length + removed)
            self._fill_ring(held)

    def snapshot(self) -> Any:
        """What `restore` needs to take back every token that comes from now on."""
        return self.length, tuple(ring.clone() for ring in self._buffers or ())

    def restore(self, snapshot: Any) -> None:
        """Forget the tokens that came since a snapshot."""
        length, rings = snapshot
        self._opened = None
        if not rings:
            return self.reset()
        self._shorten(length)
        for ring, states in zip(self._buffers or (), rings, strict=True):
            ring.copy_(states)

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self._packed, self._opened = {}, None

    def _look(self, index: int) -> Tensor | None:
        if self._buffers is None:
            return None
        return (self._opened or self._unpacked(0))[index]

    def _unpacked(self, room: int) -> Pair:
        """All tokens unpacked, and room for some more behind them."""
        packed, length, rings = self.packed_tokens, self.length, self._buffers or ()
        keys, values = (one.new_empty((*one.shape[:2], length + room, one.shape[3])) for one in rings)
        if packed:
            parts = {name: part[:, :, : _column(name, packed)] for name, part in self._packed.items()}
            unpack(parts, keys[:, :, :packed], values[:, :, :packed])
        columns = torch.arange(packed, length, device=keys.device) % RING_TOKENS
        for states, ring in zip((keys, values), rings, strict=True):
            states[:, :, packed:length] = ring.index_select(2, columns)
        return keys, values

    def _fill_ring(self, states: Pair) -> None:
        """Put the tokens that are not packed into the ring, and nothing else: what a mask hides must be finite."""
        tokens = torch.arange(self.packed_tokens, self.length, device=states[0].device)
        for ring, part in zip(self._buffers or (), states, strict=True):
            ring.zero_().index_copy_(2, tokens % RING_TOKENS, part.index_select(2, tokens))

    def _shorten(self, length: int) -> None:
        self.length, self.unchanged_tokens = length, min(self.unchanged_tokens, length)
        for name, part in self._packed.items():
            part[:, :, _column(name, self.packed_tokens) :] = 0

    def _reserve(self, tokens: int) -> None:
        """Have room for so many packed tokens."""
        group = [one.new_zeros((*one.shape[:2], GROUP_TOKENS, one.shape[3])) for one in self._buffers or ()]
        for name, like in pack(self._bits, group[0], group[1]).items():
            held, columns = self._packed.get(name, like[:, :, :0]), _column(name, tokens)
            if held.shape[2] < columns:
                spare = held.shape[2] // SPARE_SHARE
                room = like.new_zeros((*like.shape[:2], columns + spare - held.shape[2], *like.shape[3:]))
                self._packed[name] = torch.cat([held, room], 2)

    def _map(self, change: Callable[[Tensor], Tensor]) -> None:
        for name, part in self._packed.items():
            changed = change(part)
            self._packed[name] = part.copy_(changed) if changed.shape == part.shape else changed
        super()._map(change)


class QuantisedStaticLayer(QuantisedLayer, StaticLayer):
    """K and V in 8 or 4 bits, in buffers for `max_tokens` that never move.

    A step of one token unpacks all columns, and packs the last group but one where the last is full: it asks a tensor
    how many tokens there are, as compiled code must.
    """

    def __init__(self, max_tokens: int, bits: int) -> None:
        super().__init__(bits, max_tokens)

    def open(self, tokens: int, key_states: Tensor, value_states: Tensor) -> Pair:
        """See `QuantisedLayer.open`."""
        self.check_room(tokens)
        self._drop_unlike(key_states, value_states)
        return super().open(tokens, key_states, value_states)

    def reset(self) -> None:
        """Forget everything, and keep the buffers."""
        self._opened, self.visible, self.unchanged_tokens, self.length = None, None, 0, 0
        for held in (*self._packed.values(), *(self._buffers or ())):
            held.zero_()

    def _step(self, key_states: Tensor, value_states: Tensor) -> Pair:
        """Write one token, and show all columns; see `StaticLayer._step`."""
        held, rings = self.filled, self._buffers or ()
        for ring, states in zip(rings, (key_states, value_states), strict=True):
            ring.index_copy_(2, (held % RING_TOKENS).view(1), states)
        columns = self._all_columns()
        group = ((held + 1) // GROUP_TOKENS - 2).clamp_min(0)
        is_full = ((held + 1) % GROUP_TOKENS == 0) & (held + 1 >= RING_TOKENS)
        tokens = group * GROUP_TOKENS + torch.arange(GROUP_TOKENS, device=held.device)
        parts = pack(self._bits, *(ring.index_select(2, tokens % RING_TOKENS) for ring in rings))
        for name, part in parts.items():
            at, packed = group.view(1) if is_by_group(name) else tokens, self._packed[name]
            packed.index_copy_(2, at, torch.where(is_full, part, packed.index_select(2, at)))
        return columns

    def _all_columns(self) -> Pair:
        """All columns unpacked, also those that hold nothing yet."""
        rings, tokens = self._buffers or (), self._packed["v.bytes"].shape[2]
        keys, values = (one.new_empty((*one.shape[:2], tokens + RING_TOKENS, one.shape[3])) for one in rings)
        unpack(self._packed, keys[:, :, :tokens], values[:, :, :tokens])
        start = (self.filled // GROUP_TOKENS - 1).clamp_min(0) * GROUP_TOKENS
        at = start + torch.arange(RING_TOKENS, device=keys.device)
        for states, ring in zip((keys, values), rings, strict=True):
            states.index_copy_(2, at, ring.index_select(2, at % RING_TOKENS))
        return keys[:, :, : self.max_tokens], values[:, :, : self.max_tokens]

    def _capacity(self, end: int) -> int:
        return RING_TOKENS

    def _hold(self, buffers: Pair) -> None:
        self._buffers, self._packed = buffers, {}
        self._reserve(-(-self.max_tokens // GROUP_TOKENS) * GROUP_TOKENS)
        super()._hold(buffers)

    def _pin(self, buffers: Pair) -> None:
        super()._pin(buffers)
        if not torch.compiler.is_compiling():
            for tensor in self._packed.values():
                torch._dynamo.mark_static_address(tensor)


def is_by_group(name: str) -> bool:
    """Return True if a part has a column for each group, not for each token."""
    return name in ("k.scale", "k.least")


def _column(name: str, tokens: int) -> int:
    """The column of a part behind so many tokens, which are whole groups."""
    return tokens // GROUP_TOKENS if is_by_group(name) else tokens
