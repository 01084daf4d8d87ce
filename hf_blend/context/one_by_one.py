# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Caches of models whose code ignores a state before several tokens: one token at a time, or a refusal by name."""

from functools import cache
from typing import Any

from torch import Tensor

from ..errors import UnsupportedModelError

__all__ = ["guarded", "is_guarded"]


def guarded(filled: Any) -> Any:
    """Let a stock cache refuse several tokens behind those that it holds.

    Args:
        filled: a stock cache, empty or not; it is changed.

    Returns:
        The same cache.
    """
    if not is_guarded(filled):
        filled.__class__ = _guarded(type(filled))  # type: ignore[arg-type]
    return filled


def is_guarded(filled: Any) -> bool:
    """Whether a cache refuses several tokens behind those that it holds."""
    return getattr(type(filled), "is_one_by_one", False)


@cache
def _guarded(kind: type) -> type:
    stock: Any = kind

    def update(self: Any, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **given: Any) -> Any:
        _refuse(self, key_states.shape[-2], self.layers[layer_idx].get_seq_length())
        return stock.update(self, key_states, value_states, layer_idx, *args, **given)

    def update_conv_state(self: Any, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **given: Any) -> Any:
        _refuse(self, conv_states.shape[-1], self.layers[layer_idx].has_previous_state[state_idx])
        return stock.update_conv_state(self, conv_states, layer_idx, state_idx, **given)

    methods = {"update": update, "update_conv_state": update_conv_state, "is_one_by_one": True}
    return type(kind.__name__, (kind,), {"__doc__": kind.__doc__, **methods})


def _refuse(filled: Any, tokens: int, held: int) -> None:
    if held and tokens > 1:
        raise UnsupportedModelError(
            f"{tokens} tokens came at once behind what a cache holds, where one is expected: the code of this model "
            "computes several as if nothing were before them. Get the cache by resume() with the whole prompt, or "
            "prefill the prompt as a whole."
        )
