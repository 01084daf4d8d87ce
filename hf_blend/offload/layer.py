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

from ..cache.layers import BlendLayer, MadeStates, as_indices
from ..cache.quantised_layer import GROUP_TOKENS, QuantisedLayer
from ..config import BlendConfig
from ..errors import ConfigError
from .memory import GROW_TOKENS, KVMemory, round_up
from .states import AwayLayer, along_batch, as_states


def offload(layers: list[Any], config: BlendConfig) -> KVMemory:
    """Put layers whose K and V grow with the context under a memory, in place."""
    indices = [index for index, layer in enumerate(layers) if type(layer) in (BlendLayer, QuantisedLayer)]
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

    Away, the first tokens are in the memory and the others in `_recent`, `[GROW_TOKENS, batch, kv_heads, head_dim]`.
    In 8 or 4 bits every layer is so, wherever its memory is: what is packed and when is as in a `QuantisedLayer`.
    `keys` and `values` bring all of them at every look, except while a forward has opened them.
    """

    keeps_all = is_healable = False

    def __init__(self, memory: KVMemory, index: int) -> None:
        self.memory, self.index = memory, index
        self.away_tokens = 0  # so many of the first tokens are in the memory
        self._held = 0  # tokens in the memory or in `_recent`
        self._recent: tuple[Tensor, Tensor] | None = None
        self._opened: tuple[Tensor, Tensor] | None = None  # `[rows, batch, kv_heads, head_dim]`
        self.sees_blocks = False  # the step that runs looks at some blocks only, and its attention knows
        self.observer: Callable[[Tensor], None] | None = None  # is given all K, on the device, before they go away
        self._hidden: Tensor | None = None
        super().__init__()

    @property
    def batch_size(self) -> int:
        """How many batch entries there are; 0 in an empty layer."""
        return self._like()[0].shape[0] if self._buffers is None and self.length else super().batch_size

    @property
    def nbytes(self) -> int:
        """Bytes on the device, without copies that are made for one access."""
        recent = sum(states.nbytes for states in (*(self._recent or ()), *(self._opened or ())))
        return super().nbytes + recent + (self.there.nbytes_here if self.index in self.memory.away else 0)

    def open(self, tokens: int, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """See `BlendLayer.open`; what is away is on the device until `settle`."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, end = self.length, self.length + tokens
        stays = self.memory.is_resident(self.index, end, key_states, value_states)
        if self._buffers is not None or (stays and not self._held):
            if self._buffers is None or self._buffers[0].shape[2] < end:
                self._move(key_states, value_states, round_up(end), slice(0, start))
                self._count()
        else:
            self._opened = self._brought(end, key_states, value_states)
        self.length = end
        keys, values = self._shown()
        return keys[:, :, start:], values[:, :, start:]

    @property
    def is_away(self) -> bool:
        """Whether the layer's K and V are not all on its device."""
        return self._buffers is None and self._held > 0

    @property
    def there(self) -> AwayLayer:
        """The tokens that are in the memory."""
        return self.memory.away[self.index]

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """See `BlendLayer.update`; in a step that attends to some blocks only, nothing is copied to the device."""
        if not (self.sees_blocks and self.is_away):
            return super().update(key_states, value_states, *args, **kwargs)
        self._append(key_states.permute(2, 0, 1, 3), value_states.permute(2, 0, 1, 3))
        if self._hidden is None:
            self._hidden = key_states.new_full((1, 1, 1, 1), float("nan"))
        batch, heads = key_states.shape[:2]
        keys, values = (
            self._hidden.expand(batch, heads, self.length, states.shape[3]) for states in (key_states, value_states)
        )
        return keys, values

    def _append(self, keys: Tensor, values: Tensor) -> None:
        """Append tokens to a layer that is away, `[new, batch, kv_heads, head_dim]`; full blocks go to the memory."""
        first, end = self._held - self.away_tokens, self._held - self.away_tokens + len(keys)
        self.length = self._held = self._held + len(keys)
        if end >= GROW_TOKENS:
            rows = (keys, values)
            if self._recent is not None:
                rows = tuple(torch.cat([old[:first], new]) for old, new in zip(self._recent, rows, strict=True))
            is_packed = self.memory.bits is not None
            stay = GROUP_TOKENS + end % GROUP_TOKENS if is_packed else 0
            self.memory.put(self.index, *(row[: end - stay] for row in rows))
            self._recent = None
            self.unchanged_tokens = min(self.unchanged_tokens, self.away_tokens if is_packed else self._held)
            self.away_tokens = self._held = self._held - stay
            self._append(*(row[end - stay :] for row in rows))
        elif len(keys):
            if self._recent is None:
                room = [states.new_empty((GROW_TOKENS, *states.shape[1:])) for states in (keys, values)]
                self._recent = room[0], room[1]
            for recent, new in zip(self._recent, (keys, values), strict=True):
                recent[first:end] = new
        self._count()

    def read(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """K and V of some tokens of a layer that is away, on the device, `[batch, kv_heads, tokens, head_dim]`."""
        parts = []
        if start == end:
            keys, values = self._like()
            return keys[:, :, :0], values[:, :, :0]
        if start < min(end, self.away_tokens):
            parts.append(self.there.read(start, min(end, self.away_tokens)))
        if end > self.away_tokens and self._recent is not None:
            first, behind = max(start, self.away_tokens) - self.away_tokens, end - self.away_tokens
            parts.append((self._recent[0][first:behind], self._recent[1][first:behind]))
        keys, values = (torch.cat(some) if len(parts) > 1 else some[0] for some in zip(*parts, strict=True))
        return as_states(keys), as_states(values)

    def settle(self) -> None:
        """Move K and V off the device, unless the memory says that they stay."""
        if self._opened is not None:
            keys, values = (states[: self.length] for states in self._opened)
        elif self._buffers is not None and not self.memory.is_resident(self.index, self.length, *self._buffers):
            keys, values = (buffer[:, :, : self.length].permute(2, 0, 1, 3) for buffer in self._buffers)
        else:
            return
        self._opened = self._buffers = None
        if self.observer is not None:
            self.observer(as_states(keys))
        self._append(keys[self._held :], values[self._held :])

    def snapshot(self) -> Any:
        """What `restore` needs to take back every token that comes from now on."""
        return self.length, self.away_tokens, self._recent

    def restore(self, snapshot: Any) -> None:
        """Forget the tokens that came since a snapshot, also in the middle of a forward."""
        length, away_tokens, recent = snapshot
        self._opened = None
        if self._buffers is None:
            self.length = min(self.length, self._held)
        if self.memory.bits is not None and away_tokens < self.away_tokens:  # some are packed since
            self.memory.crop(self.index, away_tokens)
            self.away_tokens, self._recent = away_tokens, recent
        self._shorten(min(length, self.length))

    def _forget(self, removed: int) -> None:
        if self.is_initialized and removed:
            self._shorten(self.length + removed)

    def _shorten(self, length: int) -> None:
        if length == 0 and self._buffers is None:
            self.reset()
            return
        self.length = length
        self._shortened()
        if self._buffers is None:
            self._held = length
            if length < self.away_tokens:  # those of a group that is cut are unpacked for good
                start = length if self.memory.bits is None else length - length % GROUP_TOKENS
                rows = self.there.read(start, length) if start < length else ()
                self.memory.crop(self.index, start)
                self.away_tokens, self._held, self._recent = start, start, None
                if rows:
                    self._append(*rows)
        self._count()

    def reset(self) -> None:
        """Forget all tokens, and delete what is away."""
        super().reset()
        self._recent = self._opened = None
        self.away_tokens = self._held = 0
        self.memory.remove(self.index)

    def batch_select_indices(self, indices: Any) -> None:
        """Keep only some batch entries; nothing is read if all stay in their order."""
        if not torch.equal(as_indices(indices).cpu(), torch.arange(self.batch_size)):
            super().batch_select_indices(indices)

    def _like(self) -> tuple[Tensor, Tensor]:
        """K and V with the layer's batch, heads, width and dtype, while none are in buffers."""
        keys, values = self.there.like if self._recent is None else self._recent
        return as_states(keys), as_states(values)

    def _map(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply a change to the batch of all K and V; what is away stays away."""
        super()._map(change)
        self.unchanged_tokens = 0
        if self._recent is not None:
            self._recent = along_batch(change, self._recent[0]), along_batch(change, self._recent[1])
        self.memory.change(self.index, change)
        self.settle()
        self._count()

    def _brought(self, rows: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Copy all tokens to the device, `[rows or more, batch, kv_heads, head_dim]`; the caller owns the copy."""
        brought = self.memory.bring(self.index, rows, keys, values)
        if self._recent is not None and self._held > self.away_tokens:
            for states, recent in zip(brought, self._recent, strict=True):
                states[self.away_tokens : self._held] = recent[: self._held - self.away_tokens]
        return brought

    def _look(self, which: int) -> Tensor | None:
        if not (self.length and self.is_initialized):
            return None
        if self._buffers is not None or self._opened is not None:
            return self._shown()[which]
        return as_states(self._brought(self._held, *self._like())[which][: self._held])

    def _shown(self) -> tuple[Tensor, Tensor]:
        """Views of all tokens, as a forward sees them."""
        if self._buffers is not None:
            return self._columns(slice(0, self.length))
        keys, values = self._opened  # type: ignore[misc]
        return as_states(keys[: self.length]), as_states(values[: self.length])

    def _count(self) -> None:
        self.memory.count(("held", self.index), self.nbytes)

    def __getstate__(self) -> dict[str, Any]:
        """The state of a copy, whose memory is copied too: without what a forward has opened, and without observer."""
        length = self.length if self._buffers is not None else self._held
        return {**vars(self), "length": length, "_opened": None, "observer": None, "sees_blocks": False}
