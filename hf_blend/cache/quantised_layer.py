# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""K and V of a layer in 8 or 4 bits, K by channel, V by token: the first tokens packed, the last as computed.

KIVI (https://arxiv.org/abs/2402.02750), section 3: keys have a few large channels and are scaled by channel, over
groups of tokens; values have none and are scaled by token; the last tokens stay as they are.
Differs: 8 bits, symmetric, so that no entry is off by more than 1/254 of the largest of its group, and half a rounding
of the dtype; or 4 bits with a least value for each group. Every forward attends to its tokens
unrounded.

Tokens are packed once, in groups of 32. Where a crop cuts a group, what is left of it is unpacked, and is packed again
with the tokens that follow: these at most 31 tokens are rounded twice.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError
from .layers import BlendLayer, Columns, MadeStates, Pair

GROUP_TOKENS = 32  # share a scale per channel of K
GROUP_CHANNELS = 32  # of V in 4 bits share a scale, where so many divide the width
STEPS = 15  # of 4 bits
LARGEST = 127
BY_GROUP = ("k.scale", "k.least")  # have a column for each group; the other parts for each token


def pack(bits: int, keys: Tensor, values: Tensor) -> dict[str, Tensor]:
    """Quantise whole groups, `[batch, kv_heads, tokens, width]` each.

    In 8 bits a step is the largest magnitude / 127, by channel in 32 tokens of K, and by token of V. In 4 bits a least
    value and a step, (largest - least) / 15, are in bfloat16, by 32 tokens of K, and by 32 channels of V (by all if 32
    does not divide the width).
    Returns tensors by name, whose third axis is the tokens, or the groups for those of `BY_GROUP`.
    """
    key_groups = keys.unflatten(2, (-1, GROUP_TOKENS))
    if bits == 8:
        k_bytes, k_scale = _steps(key_groups)
        v_bytes, v_scale = _steps(values)
        return {
            "k.bytes": k_bytes.flatten(2, 3),
            "k.scale": k_scale.squeeze(3),
            "v.bytes": v_bytes,
            "v.scale": v_scale,
        }
    if keys.shape[3] % 2 or values.shape[3] % 2:
        raise ConfigError(
            f"kv_bits=4 came with heads of width {keys.shape[3]} and {values.shape[3]}, but two values share a byte, "
            "so an even width is expected. Use kv_bits=8."
        )
    k_bytes, k_scale, k_least = _packed(key_groups, 3)
    v_bytes, v_scale, v_least = _packed(_channel_groups(values), 4)
    return {
        "k.bytes": k_bytes.flatten(2, 3),
        "k.scale": k_scale.squeeze(3),
        "k.least": k_least.squeeze(3),
        "v.bytes": v_bytes,
        "v.scale": v_scale,
        "v.least": v_least,
    }


def unpack(parts: Mapping[str, Tensor], keys: Tensor, values: Tensor) -> None:
    """Write whole packed groups to `[batch, kv_heads, tokens, width]` each."""
    key_groups = keys.unflatten(2, (-1, GROUP_TOKENS))
    steps = parts["k.bytes"].unflatten(2, (-1, GROUP_TOKENS))
    scale = parts["k.scale"].unsqueeze(3)
    if "k.least" in parts:
        _unpacked(steps, scale, parts["k.least"].unsqueeze(3), out=key_groups)
        _unpacked(parts["v.bytes"], parts["v.scale"], parts["v.least"], out=_channel_groups(values))
    else:
        key_groups.copy_(steps).mul_(scale)
        values.copy_(parts["v.bytes"]).mul_(parts["v.scale"])


def _channel_groups(values: Tensor) -> Tensor:
    width = values.shape[3]
    return values.unflatten(3, (-1, GROUP_CHANNELS if width % GROUP_CHANNELS == 0 else width))


def _packed(states: Tensor, axis: int) -> tuple[Tensor, Tensor, Tensor]:
    """Round to 16 steps, two of them in a byte: one of the first half of the last axis, and one of the second."""
    values = states.float()
    low, high = values.amin(axis, keepdim=True).bfloat16(), values.amax(axis, keepdim=True)
    step = ((high - low.float()) / STEPS).bfloat16()
    steps = (values - low.float()) / step.float().clamp_min(torch.finfo(torch.float32).tiny)
    first, second = steps.round_().clamp_(0, STEPS).to(torch.uint8).chunk(2, -1)
    return first | second << 4, step, low


def _unpacked(pairs: Tensor, step: Tensor, low: Tensor, out: Tensor) -> None:
    """Write what was packed to `out`, in its dtype; its last axis is twice as long as that of the bytes."""
    first, second = out.chunk(2, -1)
    first.copy_(pairs & STEPS)
    second.copy_(pairs >> 4)
    out.mul_(step).add_(low)


def _steps(states: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric steps of 8 bits along the fourth axis, and their size."""
    fine = torch.float32 if states.dtype == torch.float16 else states.dtype  # whose small ones are fine too
    scales = (states.abs().amax(dim=3, keepdim=True).float() / LARGEST).to(fine)
    scales = torch.where(scales > 0, scales, 1.0)
    return (states.float() / scales).round_().clamp_(-LARGEST, LARGEST).to(torch.int8), scales


class QuantisedLayer(MadeStates, BlendLayer):
    """K and V of one decoder layer in 8 or 4 bits, but for the last 32 to 63 tokens.

    `keys` and `values` are unpacked at every access, except while a forward has opened them.
    """

    keeps_all = False

    def __init__(self, bits: int = 8, *args: Any) -> None:
        self._bits = bits
        self.packed_tokens = 0  # whole groups
        self._packed: dict[str, Columns] = {}  # see `pack`
        self._recent: Pair | None = None  # the tokens behind the packed ones, as they were computed
        self._opened: Pair | None = None  # all tokens, in a forward
        super().__init__(*args)

    @property
    def nbytes(self) -> int:
        """Bytes in memory, spare room included."""
        tensors = [column.buffer for column in self._packed.values()]
        tensors += [*(self._recent or ()), *(self._opened or ())]
        return super().nbytes + sum(tensor.nbytes for tensor in tensors)

    @property
    def batch_size(self) -> int:
        """How many batch entries there are; 0 in an empty layer."""
        return 0 if self._recent is None else self._recent[0].shape[0]

    def open(self, tokens: int, key_states: Tensor, value_states: Tensor) -> Pair:
        """See `BlendLayer.open`; everything is unpacked until `settle`."""
        if self._recent is None or (not self.length and self.batch_size != key_states.shape[0]):
            self.lazy_initialization(key_states, value_states)
            self._begin(key_states, value_states)
        self._opened = self._unpacked(tokens)
        self.length += tokens
        keys, values = self._opened
        return keys[:, :, -tokens:], values[:, :, -tokens:]

    def settle(self) -> None:
        """Pack whole groups, but for the last tokens."""
        if self._opened is None:
            return
        start = self.packed_tokens
        keys, values = (states[:, :, start:] for states in self._opened)
        self._opened = None
        groups = max(0, keys.shape[2] // GROUP_TOKENS - 1)
        tokens = groups * GROUP_TOKENS
        if groups:
            for name, tensor in pack(self._bits, keys[:, :, :tokens], values[:, :, :tokens]).items():
                column = start // GROUP_TOKENS if name in BY_GROUP else start
                self._packed[name].write(column, tensor)
            self.packed_tokens += tokens
            self.unchanged_tokens = min(self.unchanged_tokens, start)
        self._recent = keys[:, :, tokens:].clone(), values[:, :, tokens:].clone()

    def _forget(self, removed: int) -> None:
        if self._recent is None or not removed:
            return
        self.length += removed
        self._shortened()
        group_start = self.length // GROUP_TOKENS * GROUP_TOKENS
        if group_start < self.packed_tokens:
            # The cut is in a packed group: what is left of it is unpacked
            keys, values = (states.new_empty(_with_tokens(states, GROUP_TOKENS)) for states in self._recent)
            unpack(self._columns_of(group_start, group_start + GROUP_TOKENS), keys, values)
            self.packed_tokens = group_start
            self._recent = keys, values
        left = self.length - self.packed_tokens
        self._recent = self._recent[0][:, :, :left], self._recent[1][:, :, :left]

    def state(self) -> dict[str, Tensor]:
        """See `BlendLayer.state`; what is packed stays so."""
        keys, values = self._recent  # type: ignore[misc]
        packed = self._columns_of(0, self.packed_tokens)
        return {"k": keys[0], "v": values[0], **{name: tensor[0] for name, tensor in packed.items()}}

    def load_state(self, state: Mapping[str, Tensor], tokens: int) -> None:
        """See `BlendLayer.load_state`."""
        self.reset()
        keys, values = state["k"][None], state["v"][None]
        self.lazy_initialization(keys, values)
        self._begin(keys, values)
        for name, column in self._packed.items():
            column.write(0, state[name][None])
        self._recent = keys, values
        self.packed_tokens = tokens - keys.shape[2]
        self.length = tokens

    def has_lengths(self, state: Mapping[str, Tensor], tokens: int) -> bool:
        """See `BlendLayer.has_lengths`."""
        packed = state["k.bytes"].shape[1]
        for name, tensor in state.items():
            expected = packed
            if name in BY_GROUP:
                expected = packed // GROUP_TOKENS
            elif name in ("k", "v"):
                expected = tokens - packed
            if tensor.shape[1] != expected:
                return False
        return packed % GROUP_TOKENS == 0

    def snapshot(self) -> Any:
        """What `restore` needs to remove every token that comes from now on."""
        return self.length, self.packed_tokens, self._recent

    def restore(self, snapshot: Any) -> None:
        """Forget the tokens that came since a snapshot."""
        length, packed_tokens, recent = snapshot
        self._opened = None
        if recent is None:
            self.reset()
            return
        self.length = length
        self.packed_tokens = packed_tokens
        self._recent = recent
        self._shortened()

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.packed_tokens = 0
        self._packed = {}
        self._recent = self._opened = None

    def _begin(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make empty buffers for the batch, dtype, device, heads and widths of these states."""
        zeros = [states.new_zeros(_with_tokens(states, GROUP_TOKENS)) for states in (key_states, value_states)]
        self._packed = {}
        for name, tensor in pack(self._bits, *zeros).items():
            self._packed[name] = Columns(tensor, 1 if name in BY_GROUP else GROUP_TOKENS)
        self._recent = zeros[0][:, :, :0], zeros[1][:, :, :0]

    def _materialise(self, index: int) -> Tensor | None:
        if self._recent is None:
            return None
        return (self._opened or self._unpacked(0))[index]

    def _unpacked(self, room: int) -> Pair:
        """All tokens unpacked, and room for some more behind them."""
        packed = self.packed_tokens
        recent: Any = self._recent
        keys, values = (states.new_empty(_with_tokens(states, self.length + room)) for states in recent)
        if packed:
            unpack(self._columns_of(0, packed), keys[:, :, :packed], values[:, :, :packed])
        keys[:, :, packed : self.length] = recent[0]
        values[:, :, packed : self.length] = recent[1]
        return keys, values

    def _columns_of(self, start: int, stop: int) -> dict[str, Tensor]:
        """What is packed of the tokens of whole groups."""
        groups = slice(start // GROUP_TOKENS, stop // GROUP_TOKENS)
        parts = {}
        for name, column in self._packed.items():
            parts[name] = column.buffer[:, :, groups if name in BY_GROUP else slice(start, stop)]
        return parts

    def _map(self, change: Callable[[Tensor], Tensor]) -> None:
        self.unchanged_tokens = 0
        for column in self._packed.values():
            column.buffer = change(column.buffer)
        if self._recent is not None:
            self._recent = change(self._recent[0]), change(self._recent[1])
        super()._map(change)


def _with_tokens(states: Tensor, tokens: int) -> tuple[int, ...]:
    """The shape of K or V, with another number of tokens."""
    return (*states.shape[:2], tokens, states.shape[3])
