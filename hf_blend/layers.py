# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""One layer of a blend cache: K and V in buffers that are allocated once, with room for the answer."""

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from .errors import ConfigError

ROOM_TOKENS = 256  # spare columns behind the prompt; an answer that outgrows them costs one copy per doubling


class BlendLayer(CacheLayerMixin):
    """K and V of one decoder layer, `[batch, kv_heads, tokens, head_dim]`, as views into larger buffers.

    `keys` and `values` always show exactly the tokens that the cache holds; K is rotated for its positions.
    """

    is_sliding = False
    is_croppable = True

    def __init__(self) -> None:
        super().__init__()
        self.length = 0
        self._buffers: tuple[Tensor, Tensor] | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Remember dtype and device of the first states, `[batch, kv_heads, tokens, head_dim]`."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def open(self, tokens: int, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Make place for new tokens behind those that the layer holds.

        Args:
            tokens: how many columns to open.
            key_states: any keys of this layer, `[batch, kv_heads, rows, head_dim]`: heads, width, dtype and device.
            value_states: any values of this layer.

        Returns:
            Views of the opened columns of K and V, `[batch, kv_heads, tokens, head_dim]`, contents undefined.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, end = self.length, self.length + tokens
        if self._buffers is None or self._buffers[0].shape[2] < end:
            capacity = end + max(ROOM_TOKENS, start)
            keys, values = self._buffers or (None, None)
            self._buffers = (
                _buffer(key_states, capacity, keys, start),
                _buffer(value_states, capacity, values, start),
            )
        self._show(end)
        return self._buffers[0][:, :, start:end], self._buffers[1][:, :, start:end]

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append new tokens.

        Args:
            key_states: `[batch, kv_heads, new, head_dim]`, rotated for their positions.
            value_states: `[batch, kv_heads, new, head_dim]`.
            *args: unused; part of the interface.
            **kwargs: unused; part of the interface.

        Returns:
            All keys and values that the layer holds now.
        """
        keys, values = self.open(key_states.shape[2], key_states, value_states)
        keys.copy_(key_states)
        values.copy_(value_states)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that `query_length` new tokens will see."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """How many tokens the layer holds."""
        return self.length

    def get_max_length(self) -> int:
        """No maximum: -1."""
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens.

        Args:
            tokens_to_remove: how many, as a negative number; 0 removes nothing.

        Raises:
            ConfigError: the number is positive, or larger than what the layer holds.
        """
        if not -self.length <= tokens_to_remove <= 0:
            raise ConfigError(
                f"crop({tokens_to_remove}) was asked of a cache of {self.length} tokens, but a number from "
                f"{-self.length} to 0 is wanted: the tokens to remove, negative. To empty a cache call reset()."
            )
        if self.is_initialized:
            self._show(self.length + tokens_to_remove)

    def reset(self) -> None:
        """Forget everything."""
        self.keys = self.values = self._buffers = None
        self.length, self.is_initialized = 0, False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Give every beam the past of the beam that it continues; `beam_idx` is `[batch]`."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every batch entry `repeats` times in a row."""
        if self._buffers is not None:
            self._replace([buffer.repeat_interleave(repeats, dim=0) for buffer in self._buffers])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only some batch entries; `indices` is `[kept]`."""
        if self._buffers is not None:
            self._replace([buffer.index_select(0, indices.to(buffer.device)) for buffer in self._buffers])

    def _replace(self, buffers: list[Tensor]) -> None:
        self._buffers = (buffers[0], buffers[1])
        self._show(self.length)

    def _show(self, length: int) -> None:
        self.length = length
        if self._buffers is not None:
            self.keys, self.values = (buffer[:, :, :length] for buffer in self._buffers)


def _buffer(states: Tensor, capacity: int, old: Tensor | None, tokens: int) -> Tensor:
    """A buffer like `states` with `capacity` columns, the first of which hold the first `tokens` of the old one."""
    batch, heads, _, width = states.shape
    buffer = torch.empty((batch, heads, capacity, width), dtype=states.dtype, device=states.device)
    if old is not None:
        buffer[:, :, :tokens] = old[:, :, :tokens]
    return buffer
