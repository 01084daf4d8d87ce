# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""One layer of a blend cache whose K and V are on its device only as far as a `KVMemory` allows.

A layer that is away is brought whole for its own attention, in a forward and in every step. New tokens stay on the
device until they fill a block, so that a step writes nothing but its own token in memory.
"""

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from ..cache.layers import BlendLayer, MadeStates
from ..config import BlendConfig
from ..errors import ConfigError
from .memory import GROW_TOKENS, KVMemory, round_up
from .states import AwayLayer


def offload(layers: list[Any], config: BlendConfig) -> KVMemory | None:
    """Put layers whose K and V grow with the context under a memory, in place."""
    if config.kv_device_map is None:
        return None
    indices = [index for index, layer in enumerate(layers) if type(layer) is BlendLayer]
    if not indices:
        kinds = ", ".join(sorted({type(layer).__name__ for layer in layers}))
        raise ConfigError(
            f"kv_device_map={config.kv_device_map!r} came with a cache of {kinds}, expected layers whose K and V grow "
            "with the context: windows and states hold no more than they need. Leave kv_device_map out."
        )
    memory = KVMemory(indices, config.device_map, config.memory_limits, config.offload_folder)
    for index in indices:
        layers[index] = OffloadedLayer(memory, index)
    return memory


class OffloadedLayer(MadeStates, BlendLayer):
    """K and V of one decoder layer, resident or away as the memory decides.

    Away, the first tokens are in the memory and the others in `_recent`, `[GROW_TOKENS, batch, kv_heads, head_dim]`.
    `keys` and `values` bring all of them at every look, except while a forward has opened them.
    """

    keeps_all = False

    def __init__(self, memory: KVMemory, index: int) -> None:
        self.memory, self._index = memory, index
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
        """Bytes on the device, what is brought for one look left out."""
        recent = sum(states.nbytes for states in (*(self._recent or ()), *(self._opened or ())))
        return super().nbytes + recent

    def open(self, tokens: int, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """See `BlendLayer.open`; what is away is on the device until `settle`."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, end = self.length, self.length + tokens
        stays = self.memory.is_resident(self._index, end, key_states, value_states)
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

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """See `BlendLayer.update`; in a step that looks at some blocks, nothing is brought."""
        if not (self.sees_blocks and self.is_away):
            return super().update(key_states, value_states, *args, **kwargs)
        self._append(key_states.permute(2, 0, 1, 3), value_states.permute(2, 0, 1, 3))
        if self._hidden is None:
            self._hidden = key_states.new_full((1, 1, 1, 1), float("nan"))
        batch, heads = key_states.shape[:2]
        keys, values = (
            self._hidden.expand(batch, heads, self.length, one.shape[3]) for one in (key_states, value_states)
        )
        return keys, values

    def _append(self, keys: Tensor, values: Tensor) -> None:
        """Put tokens behind those of a layer that is away, `[new, batch, kv_heads, head_dim]`; blocks go away."""
        first, end = self._held - self.away_tokens, self._held - self.away_tokens + len(keys)
        self.length = self._held = self._held + len(keys)
        if end >= GROW_TOKENS:
            rows = (keys, values)
            if self._recent is not None:
                rows = tuple(torch.cat([old[:first], new]) for old, new in zip(self._recent, rows, strict=True))
            self.memory.put(self._index, *rows)
            self.away_tokens, self._recent = self._held, None
        elif len(keys):
            if self._recent is None:
                self._recent = _room(keys), _room(values)
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
            parts.append(self._there.read(start, min(end, self.away_tokens)))
        if end > self.away_tokens and self._recent is not None:
            first, behind = max(start, self.away_tokens) - self.away_tokens, end - self.away_tokens
            parts.append((self._recent[0][first:behind], self._recent[1][first:behind]))
        keys, values = (torch.cat(some) if len(parts) > 1 else some[0] for some in zip(*parts, strict=True))
        return _as_states(keys), _as_states(values)

    def blocks(self, rows: Sequence[Sequence[int]], size: int) -> list[tuple[Tensor, Tensor]]:
        """Some blocks of each request in host memory, `[blocks, size, kv_heads, head_dim]`; see `AwayLayer.blocks`."""
        return self._there.blocks(rows, size)

    def blocks_ahead(self, rows: Sequence[Sequence[int]], size: int) -> Future[list[tuple[Tensor, Tensor]]]:
        """The same, read on another thread."""
        return self.memory.reading().submit(self._there.blocks, rows, size)

    def count(self, what: str, nbytes: int) -> None:
        """Note how many bytes of something of this layer are on its device."""
        self.memory.count((what, self._index), nbytes)

    def settle(self) -> None:
        """Put away what shall not stay on the device."""
        if self._buffers is not None:
            if not self.memory.is_resident(self._index, self.length, *self._buffers):
                rows = tuple(buffer[:, :, : self.length].permute(2, 0, 1, 3) for buffer in self._buffers)
                self._buffers = None
                self._keep(*rows)
        elif self._opened is not None:
            keys, values = self._opened
            self._opened = None
            self._keep(keys[: self.length], values[: self.length])

    def _keep(self, keys: Tensor, values: Tensor) -> None:
        """Hold all tokens of the layer, `[tokens, batch, kv_heads, head_dim]`."""
        if self.observer is not None:
            self.observer(_as_states(keys))
        self._append(keys[self._held :], values[self._held :])

    def snapshot(self) -> Any:
        """What `restore` needs to take back every token that comes from now on."""
        return self.length

    def restore(self, snapshot: Any) -> None:
        """Forget the tokens that came since a snapshot, also in the middle of a forward."""
        self._opened = None
        if self._buffers is None:
            self.length = min(self.length, self._held)
        self._shorten(min(snapshot, self.length))

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
            if length < self.away_tokens:
                self.memory.crop(self._index, length)
                self.away_tokens, self._recent = length, None
        self._count()

    def reset(self) -> None:
        """Forget everything, and delete what is away."""
        super().reset()
        self._recent = self._opened = None
        self.away_tokens = self._held = 0
        self.memory.remove(self._index)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only some batch entries; nothing is read where they all stay as they are."""
        if not torch.equal(indices.cpu(), torch.arange(self.batch_size)):
            super().batch_select_indices(indices)

    @property
    def _there(self) -> AwayLayer:
        """The tokens that are in the memory."""
        return self.memory.away[self._index]

    def _like(self) -> tuple[Tensor, Tensor]:
        """Any K and V of the layer, while it holds some outside of buffers."""
        if self._recent is None:
            return self._there.like
        return _as_states(self._recent[0]), _as_states(self._recent[1])

    def _map(self, change: Callable[[Tensor], Tensor]) -> None:
        """Write the whole layer again, changed along its batch."""
        if not self.length:
            return
        keys, values = (change(states) for states in self._shown_or_brought())
        length, visible = self.length, self.visible
        self.reset()
        self.visible = change(visible) if visible is not None and visible.dim() == 3 else visible
        opened = self.open(length, keys, values)
        for new, states in zip(opened, (keys, values), strict=True):
            new.copy_(states)
        self.settle()

    def _brought(self, rows: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """All tokens on the device, in the caller's hands, `[rows or more, batch, kv_heads, head_dim]`."""
        brought = self.memory.bring(self._index, rows, keys, values)
        if self._recent is not None and self._held > self.away_tokens:
            for states, recent in zip(brought, self._recent, strict=True):
                states[self.away_tokens : self._held] = recent[: self._held - self.away_tokens]
        return brought

    def _look(self, which: int) -> Tensor | None:
        return self._shown_or_brought()[which] if self.length and self.is_initialized else None

    def _shown_or_brought(self) -> tuple[Tensor, Tensor]:
        if self._buffers is not None or self._opened is not None:
            return self._shown()
        keys, values = self._brought(self._held, *self._like())
        return _as_states(keys[: self._held]), _as_states(values[: self._held])

    def _shown(self) -> tuple[Tensor, Tensor]:
        """Views of all tokens, as a forward sees them."""
        if self._buffers is not None:
            return self._columns(slice(0, self.length))
        keys, values = self._opened  # type: ignore[misc]
        return _as_states(keys[: self.length]), _as_states(values[: self.length])

    def _show(self, length: int) -> None:
        self.length = length

    def _count(self) -> None:
        self.memory.count(("held", self._index), self.nbytes)

    def __deepcopy__(self, memo: dict[int, Any]) -> "OffloadedLayer":
        """The same tokens in a copy of the memory; those that a forward has opened are left out."""
        twin = OffloadedLayer(copy.deepcopy(self.memory, memo), self._index)
        length = self.length if self._buffers is not None else self._held
        if length:
            keys, values = (states[:, :, :length] for states in self._shown_or_brought())
            for new, states in zip(twin.open(length, keys, values), (keys, values), strict=True):
                new.copy_(states)
            twin.settle()
        twin.unchanged_tokens, twin.visible = self.unchanged_tokens, copy.deepcopy(self.visible, memo)
        return twin


def _room(rows: Tensor) -> Tensor:
    return rows.new_empty((GROW_TOKENS, *rows.shape[1:]))


def _as_states(rows: Tensor) -> Tensor:
    """`[tokens, batch, kv_heads, head_dim]` as `[batch, kv_heads, tokens, head_dim]`."""
    return rows.permute(1, 2, 0, 3)
