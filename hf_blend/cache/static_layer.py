# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""One layer of a blend cache whose K and V never move, so that a decoding step can be compiled once for all tokens.

transformers' `StaticLayer`, with a prefill that reads no spare column: its number of tokens is a tensor that a
compiled step adds to, a step attends to the whole buffer, and its mask hides what is not filled.
Differs: a forward of several tokens sees exactly the tokens held, and the host asks the device for their number only
where it needs it behind a compiled step.
"""

from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError
from .layers import BlendLayer, MadeStates


class StaticLayer(MadeStates, BlendLayer):
    """K and V of one decoder layer in buffers of `max_tokens` columns, allocated once.

    A step of one token is given the buffers as they are, `[batch, kv_heads, max_tokens, head_dim]`; a forward of
    several tokens views of what is held, as in any `BlendLayer`.
    """

    is_compileable = True

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.filled: Any = None  # [] int64: how many columns hold tokens; on the device of the buffers
        self._known: int | None = 0  # the same number; None: a compiled step has added to it since
        self._announced = (0, 0)  # tokens before and behind the step for which a mask was made
        self._has_stepped = False  # that step ran
        super().__init__()

    @property
    def length(self) -> int:
        """How many tokens the layer holds; asks the device once behind compiled steps."""
        if self._known is None:
            self._known = int(self.filled)
        return self._known

    @length.setter
    def length(self, tokens: int) -> None:
        """Say how many, on the host and on the device."""
        if self.filled is not None and tokens != self._known:
            self.filled.fill_(tokens)
        self._known = tokens

    def _look(self, index: int) -> Tensor | None:
        return None if self._buffers is None else self._columns(slice(0, self.length))[index]

    def open(self, tokens: int, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """See `BlendLayer.open`."""
        self.check_room(tokens)
        self._drop_unlike(key_states, value_states)
        return super().open(tokens, key_states, value_states)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append new tokens; one alone is given all columns, `[batch, kv_heads, max_tokens, head_dim]`."""
        if key_states.shape[2] > 1:
            return super().update(key_states, value_states, *args, **kwargs)
        is_traced = torch.compiler.is_compiling()
        if not is_traced:
            self.check_room(1)
            self._drop_unlike(key_states, value_states)
        if self._buffers is None:
            self.lazy_initialization(key_states, value_states)
            self._move(key_states, value_states, self._capacity(1), slice(0, 0))
        columns = self._step(key_states, value_states)
        self.filled.add_(1)
        if is_traced:
            self._known, self._has_stepped = None, True
        else:
            self._known = self.length + 1
        return columns

    def _step(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Write one token, and show all columns."""
        keys, values = self._buffers  # type: ignore[misc]
        position = self.filled.view(1)
        keys.index_copy_(2, position, key_states)
        values.index_copy_(2, position, value_states)
        return keys, values

    def check_room(self, tokens: int) -> None:
        """Refuse tokens behind the last column."""
        check_room(self.length, tokens, self.max_tokens)

    def sizes_behind(self, past: int, tokens: int) -> tuple[int, int]:
        """See `BlendLayer.sizes_behind`; one token sees the whole buffer, through a mask."""
        return (self.max_tokens if tokens == 1 else past + tokens), 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that `query_length` new tokens will see."""
        if not torch.compiler.is_compiling():
            self._announce(query_length)
        return self.sizes_behind(0 if query_length == 1 else self.length, query_length)

    def get_query_offset(self) -> Any:
        """The same number for masks: a tensor where the host would have to ask the device for it."""
        is_traced = torch.compiler.is_compiling()  # before what compiled code is then guarded by
        return self.filled if is_traced or self._known is None else self._known

    def get_seq_length(self) -> Any:
        """How many tokens have gone through the layer; a tensor where a step is traced, as in transformers."""
        return self.filled if torch.compiler.is_compiling() else self.length

    def get_max_length(self) -> int:
        """How many tokens there is room for."""
        return self.max_tokens

    def _forget(self, removed: int) -> None:
        end = self.length
        super()._forget(removed)
        for buffer in self._buffers or ():
            buffer[:, :, self.length : end] = 0  # what a mask hides must be finite

    def reset(self) -> None:
        """Forget everything, and keep the buffers: what was compiled for them serves the next prompt too."""
        self._forget(-self.length)
        self.visible = None

    def _announce(self, tokens: int) -> None:
        """Refuse a step for whose tokens there is no room before it runs: compiled, it cannot ask; nor is it asked."""
        before, after = self._announced
        before = self._known if self._known is not None else after if self._has_stepped else before
        check_room(before, tokens, self.max_tokens)
        self._announced, self._has_stepped = (before, before + tokens), False

    def _capacity(self, end: int) -> int:
        return self.max_tokens

    def _hold(self, buffers: tuple[Tensor, Tensor]) -> None:
        for buffer in buffers:
            buffer.zero_()
        self.filled = torch.zeros((), dtype=torch.int64, device=buffers[0].device)
        self._pin(buffers)

    def _pin(self, buffers: tuple[Tensor, Tensor]) -> None:
        """Say that these tensors are written in place, as transformers does: otherwise no CUDA graph is made."""
        self._buffers = buffers
        if not torch.compiler.is_compiling():
            for tensor in (*buffers, self.filled):
                torch._dynamo.mark_static_address(tensor)

    def _drop_unlike(self, key_states: Tensor, value_states: Tensor) -> None:
        """Drop empty buffers of another form than some states: the next prompt has another batch size."""
        if self._buffers is None or self.length:
            return
        pairs = zip(self._buffers, (key_states, value_states), strict=True)
        if any(_form(buffer) != _form(states) for buffer, states in pairs):
            self._buffers = self.filled = None

    def _replace(self, buffers: list[Tensor]) -> None:
        """Stay where the buffers are, if the batch is as large as before."""
        if buffers[0].shape == self._buffers[0].shape:  # type: ignore[index]
            for own, new in zip(self._buffers, buffers, strict=True):  # type: ignore[arg-type]
                own.copy_(new)
        else:
            self._pin((buffers[0], buffers[1]))
        self.unchanged_tokens = 0


class StaticSlidingLayer(StaticLayer):
    """As `StaticLayer`, for tokens that see a window: all are held, and a mask hides those before the window."""

    is_sliding = True

    def __init__(self, max_tokens: int, sliding_window: int) -> None:
        super().__init__(max_tokens)
        self.sliding_window = sliding_window


def check_room(held: int, new: int, most: int) -> None:
    """Refuse tokens for which a cache has no room."""
    if held + new > most:
        raise ConfigError(
            f"{new} more {'token was' if new == 1 else 'tokens were'} to go into a BlendCache that holds {held}, but "
            f"at most max_tokens={most} are expected: the prompt, and all new tokens but the last. What it holds is "
            "unchanged. Make one with a larger max_tokens, or none for a cache that grows."
        )


def _form(states: Tensor) -> tuple[object, ...]:
    return states.shape[0], states.shape[1], states.shape[3], states.dtype, states.device
