# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""One layer of a blend cache: K and V in buffers that are allocated once, with room for the answer."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from ..errors import ConfigError
from ..prefill.blend import LayerKind

ROOM_TOKENS = 256  # spare columns behind the prompt; an answer that outgrows them costs one copy per doubling
SPARE_SHARE = 16  # `Columns` that grow leave one spare column for so many that are used

Pair = tuple[Tensor, Tensor]  # K and V


class Columns:
    """K or V, or a part of them, in a buffer with room to grow, `[batch, kv_heads, capacity, …]`."""

    def __init__(self, like: Tensor, room_tokens: int = ROOM_TOKENS) -> None:
        """Begin empty, as `like`, `[batch, kv_heads, tokens, …]`, on all other axes; leave room when it grows."""
        self.buffer = like.new_empty((*like.shape[:2], 0, *like.shape[3:]))
        self._room_tokens = room_tokens

    def write(self, start: int, states: Tensor) -> Tensor:
        """Write tokens from column `start` on; returns all columns up to the last written."""
        stop = start + states.shape[2]
        if stop > self.buffer.shape[2]:
            capacity = stop + max(self._room_tokens, start // SPARE_SHARE)
            buffer = self.buffer.new_empty((*self.buffer.shape[:2], capacity, *self.buffer.shape[3:]))
            buffer[:, :, :start] = self.buffer[:, :, :start]
            self.buffer = buffer
        self.buffer[:, :, start:stop] = states
        return self.buffer[:, :, :stop]


class MadeStates:
    """Makes `keys` and `values` at each access, `[batch, kv_heads, tokens, head_dim]`; None where it is empty.

    Setting them does nothing: K and V are kept in another form.
    """

    keys = property(lambda self: self._materialise(0), lambda self, _: None)
    values = property(lambda self: self._materialise(1), lambda self, _: None)

    def _materialise(self, index: int) -> Tensor | None:
        """K (0), rotated for its positions, or V (1)."""
        raise NotImplementedError


class BatchOfRequests:
    """What generation does to the batch of a layer: its requests are repeated, dropped or put in another order."""

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Give every beam the past of the beam that it continues; `beam_idx` is `[batch]`."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every batch entry `repeats` times in a row."""

        def repeated(states: Tensor) -> Tensor:
            rows = torch.arange(len(states), device=states.device).repeat_interleave(repeats)
            return states.index_select(0, rows)  # no view, which only the present mode of autograd could write to

        self._map(repeated)

    def batch_select_indices(self, indices: Any) -> None:
        """Keep only some batch entries; `indices` is `[kept]`, or a boolean for each."""
        rows = as_indices(indices)
        self._map(lambda states: states.index_select(0, rows.to(states.device)))

    def adopt(self, other: Any) -> None:
        """Share the tensors of another layer of the same kind, which is not used any more."""
        vars(self).update(vars(other))

    def _map(self, change: Callable[[Tensor], Tensor]) -> None:
        """Change every tensor along its first axis, the batch."""
        raise NotImplementedError


class BlendLayer(BatchOfRequests, DynamicLayer):
    """K and V of one decoder layer, `[batch, kv_heads, tokens, head_dim]`, as views into larger buffers.

    `keys` and `values` always show exactly the cached tokens; K is rotated for its positions.
    """

    prefill_kind: type[LayerKind] = LayerKind
    keeps_all = True  # every token as it came: nothing is forgotten or packed when a forward is over

    def __init__(self) -> None:
        super().__init__()
        self.length = 0
        self.unchanged_tokens = 0  # so many of the first tokens have not changed since this was last set
        # Of a prompt that was loaded in part, the columns that are there, increasing; None: all
        self.visible: Tensor | None = None
        self.visible_tokens = 0  # columns behind these came later, and are all there
        self.is_guarded = False  # the attention function honours `visible`
        self._buffers: tuple[Tensor, Tensor] | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Remember dtype and device; buffers are made when columns are opened, and no empty tensors before."""
        self.dtype = key_states.dtype
        self.device = key_states.device
        self.is_initialized = True

    def open(self, tokens: int, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Return columns for K and V of new tokens, `[batch, kv_heads, tokens, head_dim]`, which the caller writes.

        Heads, widths and dtypes are those of the given states, which may be of some rows only. Until `settle` is
        called, `keys` and `values` show all tokens that the new ones may attend to, themselves included.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.length
        end = start + tokens
        if self._buffers is None or self._buffers[0].shape[2] < end:
            self._move(key_states, value_states, self._capacity(end), slice(0, start))
        self._show(end)
        return self._columns(slice(start, end))

    def open_with(
        self, others: Sequence[Any], tokens: int, key_states: Tensor, value_states: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """Open this and other layers at once: K and V `[layers, batch, kv_heads, tokens, head_dim]`.

        None where they differ, or are not empty.
        """
        layers = (self, *others)
        if not self.keeps_all:
            return None
        for layer in layers:
            if type(layer) is not type(self) or layer._buffers is not None:
                return None

        # One tensor of K and one of V, of which each layer has a part
        capacity = self._capacity(tokens)
        keys = key_states.new_empty((len(layers), *key_states.shape[:2], capacity, key_states.shape[3]))
        values = value_states.new_empty((len(layers), *value_states.shape[:2], capacity, value_states.shape[3]))
        for number, layer in enumerate(layers):
            layer.lazy_initialization(key_states, value_states)
            buffers = keys[number], values[number]
            if not torch.is_grad_enabled():
                buffers = buffers[0].data, buffers[1].data  # no views, to which a later mode could not write
            layer._buffers = buffers
            layer.length = tokens
            layer.keys = keys[number, :, :, :tokens]
            layer.values = values[number, :, :, :tokens]
        return keys[..., :tokens, :], values[..., :tokens, :]

    def settle(self) -> None:
        """The attention over the opened columns is done: forget what no later token can see."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append new tokens, `[batch, kv_heads, new, head_dim]` each."""
        if self.visible is not None and not self.is_guarded:
            raise ConfigError(
                "this cache holds a part of its prompt's KV only, but the model would attend to all of it. Decode "
                "with the cache that loaded the part."
            )
        keys, values = self.open(key_states.shape[2], key_states, value_states)
        keys.copy_(key_states)
        values.copy_(value_states)
        columns = self.keys, self.values
        self.settle()
        return columns

    def overwrite(self, start: int, key_states: Tensor, value_states: Tensor) -> None:
        """Replace the columns from `start` on by K and V, `[batch, kv_heads, rows, head_dim]`."""
        end = start + key_states.shape[2]
        for states, new in zip(self._columns(slice(start, end)), (key_states, value_states), strict=True):
            states.copy_(new)
        self.unchanged_tokens = min(self.unchanged_tokens, start)

    def sizes_behind(self, past: int, tokens: int) -> tuple[int, int]:
        """Length and offset of the keys that `tokens` new tokens see behind `past` others."""
        return past + tokens, 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that `query_length` new tokens will see."""
        return self.sizes_behind(self.length, query_length)

    def get_seq_length(self) -> int:
        """How many tokens have gone through the layer."""
        return self.length

    def state(self) -> dict[str, Tensor]:
        """The tensors of one request by name, `[heads, tokens, width]`, from which `load_state` fills a layer."""
        kept, _ = self.sizes_behind(self.length, 0)
        start = self.keys.shape[2] - kept  # type: ignore[union-attr]
        return {"k": self.keys[0, :, start:], "v": self.values[0, :, start:]}  # type: ignore[index]

    def load_state(self, state: Mapping[str, Tensor], tokens: int) -> None:
        """Fill the layer with what `state` returned of one with so many tokens."""
        self.reset()
        self.update(state["k"][None], state["v"][None])
        self.length = tokens

    def has_lengths(self, state: Mapping[str, Tensor], tokens: int) -> bool:
        """Whether `state` may be of a layer with so many tokens."""
        kept, _ = self.sizes_behind(tokens, 0)
        return state["k"].shape[1] == state["v"].shape[1] == kept

    @property
    def nbytes(self) -> int:
        """Bytes in memory, spare columns included."""
        return sum(buffer.untyped_storage().nbytes() for buffer in self._buffers or ())

    @property
    def batch_size(self) -> int:
        """How many batch entries there are; 0 in an empty layer."""
        return self._buffers[0].shape[0] if self._buffers is not None else 0

    def suspend(self, snapshot: Any, past: int) -> Any:
        """Set all but K and V back to a snapshot while a probe runs; returns what `resume` needs."""

    def resume(self, suspended: Any) -> None:
        """The other forward is over."""

    def snapshot(self) -> Any:
        """What `restore` needs to remove every token that comes from now on."""
        return self.length

    def restore(self, snapshot: Any) -> None:
        """Forget the tokens that came since a snapshot; nothing else may have happened in between."""
        self._forget(snapshot - self.length)

    def check_crop(self, tokens_to_remove: int) -> int:
        """Refuse a `crop` that this layer could not do."""
        check_negative(tokens_to_remove, self.length)
        return max(tokens_to_remove, -self.length)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens."""
        self._forget(self.check_crop(tokens_to_remove))

    def _forget(self, removed: int) -> None:
        """Forget the last tokens, whose number is negative."""
        if self.is_initialized:
            self._show(self.length + removed)
        self._shortened()

    def _shortened(self) -> None:
        """Limit `visible` and `unchanged_tokens` to the tokens that are left."""
        if self.visible is not None:
            self.visible = self.visible[self.visible < self.length] if self.length else None
            self.visible_tokens = min(self.visible_tokens, self.length)
        self.unchanged_tokens = min(self.unchanged_tokens, self.length)

    def reset(self) -> None:
        """Forget everything."""
        self.keys = self.values = self._buffers = self.visible = None
        self.length = 0
        self.unchanged_tokens = 0
        self.is_initialized = False

    def _map(self, change: Callable[[Tensor], Tensor]) -> None:
        if self._buffers is not None:
            keys, values = self._buffers
            self._buffers = change(keys), change(values)
            self.unchanged_tokens = 0
            self._show(self.length)

    def _show(self, length: int) -> None:
        self.length = length
        if self._buffers is not None:
            self.keys, self.values = (buffer[:, :, :length] for buffer in self._buffers)

    def _columns(self, columns: slice) -> tuple[Tensor, Tensor]:
        """Views of some columns of both buffers."""
        keys, values = self._buffers  # type: ignore[misc]
        return keys[:, :, columns], values[:, :, columns]

    def _move(self, key_states: Tensor, value_states: Tensor, capacity: int, kept: slice) -> None:
        """Move to buffers of another capacity that begin with the kept columns of the present ones."""
        old = () if self._buffers is None else self._columns(kept)
        keys, values = (kv.new_empty((*kv.shape[:2], capacity, kv.shape[3])) for kv in (key_states, value_states))
        for buffer, previous in zip((keys, values), old, strict=False):
            buffer[:, :, : previous.shape[2]] = previous
        self._buffers = keys, values

    def _capacity(self, end: int) -> int:
        """How many columns buffers get for `end` tokens."""
        return end + max(ROOM_TOKENS, self.length)


class BlendSlidingLayer(BlendLayer):
    """A layer whose tokens see at most `sliding_window` tokens, themselves included; it keeps one window of them.

    Behaves as transformers' `DynamicSlidingWindowLayer`: new tokens are shown all columns that one may attend to,
    and only `sliding_window - 1` tokens stay. A prompt is whole in memory only while it goes through this layer.
    Differs: the window rolls through a buffer with at most `ROOM_TOKENS` spare columns instead of being copied for
    each token, and a crop that the kept tokens allow needs no recording.
    """

    is_sliding = True
    keeps_all = False

    def __init__(self, sliding_window: int) -> None:
        super().__init__()
        self.sliding_window = sliding_window
        self.record_past = False  # by this name transformers switches it off
        self._start = self._end = 0  # the columns of the buffers that are in use

    @property
    def _room(self) -> int:
        return min(ROOM_TOKENS, self.sliding_window)

    def activate_past_recording(self) -> None:
        """From now on tokens are forgotten in `crop` only, so that it can return to earlier ones."""
        self.record_past = True

    def open(self, tokens: int, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """See `BlendLayer.open`; the first column shown is the first that the first new token may attend to."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        stored = self._end - self._start
        visible = min(stored, self.sliding_window - 1)  # of the tokens before, to the first new one
        kept = stored if self.record_past else visible
        if self._buffers is None or self._buffers[0].shape[2] < self._end + tokens:
            self._move(key_states, value_states, kept + max(tokens, self._room), slice(self._end - kept, self._end))
            self._end = kept
        first_new = self._end
        self._start = first_new - kept
        self._end = first_new + tokens
        self.length += tokens
        self.keys, self.values = self._columns(slice(first_new - visible, self._end))
        return self._columns(slice(first_new, self._end))

    def settle(self) -> None:
        """Keep one window, unless the past is recorded; a buffer that a whole prompt needed is given back."""
        if not self.record_past and self.is_initialized:
            self._roll()

    def sizes_behind(self, past: int, tokens: int) -> tuple[int, int]:
        """Length and offset of the keys that `tokens` new tokens see behind `past` others."""
        visible = min(past, self.sliding_window - 1)
        return visible + tokens, past - visible

    def get_max_length(self) -> int:
        """The window."""
        return self.sliding_window

    def snapshot(self) -> Any:
        """What `restore` needs; it keeps today's buffers, of at most a window, alive."""
        return self._buffers, self._start, self._end, self.length

    def restore(self, snapshot: Any) -> None:
        """Forget the tokens that came since a snapshot."""
        self._buffers, self._start, self._end, self.length = snapshot
        if self._buffers is None:
            self.reset()
        self._show(self.length)

    def check_crop(self, tokens_to_remove: int) -> int:
        """Refuse a `crop` behind which the window would lack tokens that were forgotten."""
        removed = super().check_crop(tokens_to_remove)
        left, needed = self._end - self._start + removed, self.length + removed
        if max(0, left) < min(needed, self.sliding_window - 1):
            raise ConfigError(
                f"crop({tokens_to_remove}) was asked of a layer with a window of {self.sliding_window} tokens that "
                f"keeps {self._end - self._start} of {self.length}: the window before them is gone. Call "
                "activate_past_recording() before the tokens are added, or reset() and fill the cache again."
            )
        return removed

    def _forget(self, removed: int) -> None:
        """Forget the last tokens, and all that no later token can see."""
        if self.is_initialized:
            self.length += removed
            self._end = max(self._start, self._end + removed)
            self._roll()

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self._start = self._end = 0
        self.record_past = False

    def _roll(self) -> None:
        """Keep the last window only."""
        if self._buffers is None:
            return
        kept = min(self._end - self._start, self.sliding_window - 1, self.length)
        self._start = self._end - kept
        if self._buffers[0].shape[2] > self.sliding_window - 1 + self._room:
            self._move(*self._buffers, kept, slice(self._start, self._end))
            self._start = 0
            self._end = kept
        self._show(self.length)

    def _show(self, length: int) -> None:
        self.length = length
        if self._buffers is not None:
            self.keys, self.values = self._columns(slice(self._start, self._end))


def as_indices(indices: Any) -> Tensor:
    """Rows of a batch, `[kept]`, of what stock caches take: a tensor, a list or a tuple, of numbers or of booleans."""
    rows = torch.as_tensor(indices)
    return rows.nonzero().flatten() if rows.dtype is torch.bool else rows


def check_negative(tokens_to_remove: int, cached: int) -> None:
    """Refuse the argument of a `crop` that is no number of tokens to remove, as transformers does."""
    if tokens_to_remove > 0:
        raise ConfigError(
            f"crop({tokens_to_remove}) was asked of a cache of {cached} tokens, but the tokens to remove are expected "
            f"as a negative number. To keep {tokens_to_remove} call crop({min(0, tokens_to_remove - cached)})."
        )
