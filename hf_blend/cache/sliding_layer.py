# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""One layer of a blend cache whose attention is local: it keeps what its window can still see."""

from typing import Any

from torch import Tensor

from ..errors import ConfigError
from .layers import ROOM_TOKENS, BlendLayer


class BlendSlidingLayer(BlendLayer):
    """A layer whose tokens see at most `sliding_window` tokens, themselves included; it keeps one window of them.

    Behaves as transformers' `DynamicSlidingWindowLayer`: new tokens are shown everything that one of them may look at,
    and only `sliding_window - 1` tokens stay. A prompt is held whole while it goes through this layer, and no longer.
    Differs: the window rolls through a buffer with at most `ROOM_TOKENS` spare columns instead of being copied for
    each token, and a crop that the kept tokens allow needs no recording.
    """

    is_sliding = True
    keeps_all = False

    def __init__(self, sliding_window: int) -> None:
        super().__init__()
        self.sliding_window = sliding_window
        self.record_past = False  # by this name transformers switches it off
        self._start = self._end = 0  # the columns of the buffers that are held

    @property
    def _room(self) -> int:
        return min(ROOM_TOKENS, self.sliding_window)

    def activate_past_recording(self) -> None:
        """From now on tokens are forgotten in `crop` only, so that it can take tokens back."""
        self.record_past = True

    def open(self, tokens: int, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """See `BlendLayer.open`; what is shown begins where the first new token may look."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        held, visible = self._end - self._start, min(self._end - self._start, self.sliding_window - 1)
        kept = held if self.record_past else visible
        if self._buffers is None or self._buffers[0].shape[2] < self._end + tokens:
            self._move(key_states, value_states, kept + max(tokens, self._room), slice(self._end - kept, self._end))
            self._end = kept
        self._start, self._end, self.length = self._end - kept, self._end + tokens, self.length + tokens
        self.keys, self.values = self._columns(slice(self._end - tokens - visible, self._end))
        return self._columns(slice(self._end - tokens, self._end))

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
        """What `restore` needs; the buffers of now, of at most a window, live as long as it does."""
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

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens, and all that no later token can see; see `BlendLayer.crop`."""
        removed = self.check_crop(tokens_to_remove)
        if self.is_initialized:
            self.length += removed
            self._end = max(self._start, self._end + removed)
            self._roll()

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self._start, self._end, self.record_past = 0, 0, False

    def _roll(self) -> None:
        """Hold the last window only."""
        if self._buffers is None:
            return
        kept = min(self._end - self._start, self.sliding_window - 1, self.length)
        self._start = self._end - kept
        if self._buffers[0].shape[2] > self.sliding_window - 1 + self._room:
            self._move(*self._buffers, kept, slice(self._start, self._end))
            self._start, self._end = 0, kept
        self._show(self.length)

    def _show(self, length: int) -> None:
        self.length = length
        if self._buffers is not None:
            self.keys, self.values = self._columns(slice(self._start, self._end))
