# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""One layer of a blend cache whose K and V are on its device only as far as a `KVMemory` allows.

A layer that is away is copied to the device as a whole for its own attention, in a prefill and in every step. New
tokens stay on the device until they fill a block, so that most steps write their own token only.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..cache.layers import BlendLayer, MadeStates, Pair
from ..config import BlendConfig
from ..errors import ConfigError
from .memory import GROW_TOKENS, KVMemory, round_up
from .states import AwayLayer, along_batch, as_states


def offload(layers: list[Any], config: BlendConfig) -> KVMemory:
    """Put layers whose K and V grow with the context under a memory, in place."""
    if config.kv_bits is not None:
        raise ConfigError(
            f"kv_device_map={config.kv_device_map!r} came with kv_bits={config.kv_bits}, but what is away is kept in "
            "the model's dtype. Leave one of them out."
        )
    indices = [index for index, layer in enumerate(layers) if type(layer) is BlendLayer]
    if not indices:
        kinds = ", ".join(sorted({type(layer).__name__ for layer in layers}))
        raise ConfigError(
            f"kv_device_map={config.kv_device_map!r} came with a cache of {kinds}, expected layers whose K and V grow "
            "with the context: windows and states hold no more than they need. Leave kv_device_map out."
        )
    memory = KVMemory(indices, config)
    for index in indices:
        layers[index] = OffloadedLayer(memory, index)
    return memory


class OffloadedLayer(MadeStates, BlendLayer):
    """K and V of one decoder layer, resident or away as the memory decides.

    Away, the first tokens are in the memory and the others in `_recent`, `[recent, batch, kv_heads, head_dim]`.
    `keys` and `values` bring all of them at every look, except while a forward has opened them.
    """

    keeps_all = False

    def __init__(self, memory: KVMemory, index: int) -> None:
        self.memory = memory
        self.index = index
        self.away_tokens = 0  # so many of the first tokens are in the memory
        self._recent: Pair | None = None
        self._opened: Pair | None = None  # `[rows, batch, kv_heads, head_dim]`
        super().__init__()

    @property
    def _stored_tokens(self) -> int:
        """Tokens in the memory and in `_recent`."""
        return self.away_tokens + (0 if self._recent is None else len(self._recent[0]))

    @property
    def there(self) -> AwayLayer:
        """The tokens that are in the memory."""
        return self.memory.away[self.index]

    @property
    def batch_size(self) -> int:
        """How many batch entries there are; 0 in an empty layer."""
        if self._buffers is None and self.length:
            return self._like()[0].shape[0]
        return super().batch_size

    @property
    def nbytes(self) -> int:
        """Bytes on the device, without copies that are made for one access."""
        nbytes = super().nbytes
        for states in (*(self._recent or ()), *(self._opened or ())):
            nbytes += states.nbytes
        return nbytes

    def open(self, tokens: int, key_states: Tensor, value_states: Tensor) -> Pair:
        """See `BlendLayer.open`; what is away is on the device until `settle`."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.length
        end = start + tokens
        stays = self.memory.is_resident(self.index, key_states)
        if self._buffers is None and (self._stored_tokens or not stays):
            self._opened = self._bring(end, key_states, value_states)
        elif self._buffers is None or self._buffers[0].shape[2] < end:
            self._move(key_states, value_states, round_up(end), slice(0, start))
        self.length = end
        keys, values = self._shown()
        return keys[:, :, start:], values[:, :, start:]

    def settle(self) -> None:
        """Move K and V off the device, unless the memory says that they stay."""
        if self._opened is not None:
            keys, values = (states[: self.length] for states in self._opened)
        elif self._buffers is not None and not self.memory.is_resident(self.index, self._buffers[0]):
            keys, values = (buffer[:, :, : self.length].permute(2, 0, 1, 3) for buffer in self._buffers)
        else:
            return
        self._opened = None
        self._buffers = None
        self._append(keys[self._stored_tokens :], values[self._stored_tokens :])

    def restore(self, snapshot: Any) -> None:
        """Forget the tokens that came since a snapshot, also in the middle of a forward."""
        self._opened = None
        self._shorten(min(snapshot, self.length))

    def reset(self) -> None:
        """Forget all tokens, and delete what is away."""
        super().reset()
        self._recent = None
        self._opened = None
        self.away_tokens = 0
        self.memory.remove(self.index)

    def _map(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply a change to the batch of all K and V; what is away stays away."""
        super()._map(change)
        self.unchanged_tokens = 0
        if self._recent is not None:
            self._recent = along_batch(change, self._recent[0]), along_batch(change, self._recent[1])
        self.memory.change(self.index, change)
        self.settle()

    def _append(self, keys: Tensor, values: Tensor) -> None:
        """Append tokens to a layer that is away, `[new, batch, kv_heads, head_dim]`; full blocks go to the memory."""
        if self._recent is not None:
            keys = torch.cat([self._recent[0], keys])
            values = torch.cat([self._recent[1], values])
        if len(keys) >= GROW_TOKENS:
            self.memory.put(self.index, keys, values)
            self.away_tokens += len(keys)
            self._recent = None
        else:
            self._recent = keys.clone(), values.clone()
        self.length = self._stored_tokens

    def _forget(self, removed: int) -> None:
        if self.is_initialized and removed:
            self._shorten(self.length + removed)

    def _shorten(self, length: int) -> None:
        if length == 0 and self._buffers is None:
            self.reset()
            return
        self.length = length
        self._shortened()
        if self._buffers is None and length < self.away_tokens:
            self.memory.crop(self.index, length)
            self.away_tokens = length
            self._recent = None
        elif self._buffers is None and self._recent is not None:
            self._recent = self._recent[0][: length - self.away_tokens], self._recent[1][: length - self.away_tokens]

    def _like(self) -> Pair:
        """K and V with the layer's batch, heads, width and dtype, while none are in buffers."""
        keys, values = self.there.like if self._recent is None else self._recent
        return as_states(keys), as_states(values)

    def _bring(self, rows: int, keys: Tensor, values: Tensor) -> Pair:
        """Copy all tokens to the device, `[rows or more, batch, kv_heads, head_dim]`; the caller owns the copy."""
        brought = self.memory.bring(self.index, rows, keys, values)
        for states, recent in zip(brought, self._recent or (), strict=False):
            states[self.away_tokens : self._stored_tokens] = recent
        return brought

    def _materialise(self, which: int) -> Tensor | None:
        if not (self.length and self.is_initialized):
            return None
        if self._buffers is not None or self._opened is not None:
            return self._shown()[which]
        brought = self._bring(self._stored_tokens, *self._like())
        return as_states(brought[which][: self._stored_tokens])

    def _shown(self) -> Pair:
        """Views of all tokens, as a forward sees them."""
        if self._opened is None:
            return self._columns(slice(0, self.length))
        keys, values = self._opened
        return as_states(keys[: self.length]), as_states(values[: self.length])

    def __getstate__(self) -> dict[str, Any]:
        """The state of a copy, whose memory is copied too: without what a forward has opened."""
        length = self.length if self._buffers is not None else self._stored_tokens
        return {**vars(self), "length": length, "_opened": None}
