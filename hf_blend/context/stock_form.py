# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What the stock cache of a model holds, as tensors by name, and a cache made of them again.

The form is read off a cache that the model has filled: classes of layers, their flags, shapes, dtypes and devices are
those of the installed transformers and of this model, and no list of types is kept here.
"""

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError, UnsupportedModelError
from ..model.calibrate import STATE_KINDS
from ..store.chunk import has_usable_values
from ..store.tiers.base import EntryFault

_TOKEN_AXES = {"keys": -2, "values": -2, "indexer_keys": 1, "indexer_position_ids": -1}  # where tokens are counted
_CONSTANTS = ("_sliding_window_tensor",)
_FLAGS = ("has_previous_state", "is_initialized", "is_indexer_initialized")

Parts = dict[str, Tensor]


class StockForm:
    """The form of a model's stock cache: what each layer holds of each token, of its window, and as a state."""

    def __init__(self, cache: Any) -> None:
        """Read the form off a cache."""
        self._filled = cache
        for what, one in (("the cache", cache), *((f"layer {n}", layer) for n, layer in enumerate(cache.layers))):
            strange = [name for name, value in vars(one).items() if _has_tensor(value) and name not in _NAMES]
            if strange:
                raise UnsupportedModelError(
                    f"{what} of a {type(cache).__name__} keeps {strange[0]}, expected K, V and states alone, so it "
                    "cannot be saved and taken up again. Prefill this model's prompts as a whole."
                )

    def tokens(self, cache: Any) -> int:
        """How many tokens a cache holds."""
        why = self._difference(cache)
        tokens = 0 if why else int(cache.get_seq_length())
        if not why and not tokens:
            why = "it is empty"
        if not why and any(count != tokens for count in _counts(cache)):
            why = f"its layers hold {sorted({*_counts(cache)})} tokens"
        why = why or self._misfit(self.take(cache, 0, tokens), 0, tokens)
        if why:
            raise ConfigError(
                f"a {type(cache).__name__} cannot be saved, because {why}, but what the model computed of one prompt "
                "without padding is expected, neither blended nor quantised. Use the cache of resume() or prefill(), "
                "or DynamicCache(config=model.config)."
            )
        return tokens

    def nbytes(self, tokens: int) -> int:
        """Most bytes that `take` gives of so many tokens."""
        held = ((tensor.nbytes, axis and tensor.shape[axis]) for _, _, axis, tensor in _held(self._filled))
        return sum(nbytes if length is None else nbytes // length * tokens for nbytes, length in held)

    def take(self, cache: Any, start: int, stop: int) -> Parts:
        """What a cache holds of some tokens, and its states."""
        taken, own = {}, {name: tensor for name, _, _, tensor in _held(self._filled)}
        for name, layer, axis, tensor in _held(cache):
            if axis is None:  # a state that records its past, for assisted decoding, holds more than is needed
                taken[name] = tensor[..., -own[name].shape[-1] :] if name in own else tensor
            else:
                first = max(0, tensor.shape[axis] - _window(layer)) if _window(layer) else start
                taken[name] = tensor.narrow(axis, first, tensor.shape[axis] - first)
        return taken

    def check(self, parts: Parts, start: int, stop: int) -> None:
        """Refuse what `take` never gives."""
        misfit = self._misfit(parts, start, stop)
        if misfit:
            raise EntryFault("layout", misfit)
        for name, tensor in parts.items():
            if tensor.is_floating_point() and not has_usable_values(tensor):
                raise EntryFault("values", f"{name} is NaN, infinite or absurd")

    def fill(self, segments: Sequence[Parts], tokens: int) -> Any:
        """Make a cache."""
        cache = copy.deepcopy(self._filled)
        for name, layer, axis, tensor in list(_held(cache)):
            whole = segments[-1][name]
            if axis is not None and not _window(layer) and len(segments) > 1:
                whole = torch.cat([part[name] for part in segments], dim=axis)
            _, _, kind, *at = name.split(".")
            if at:
                getattr(layer, kind)[int(at[0])] = whole.to(tensor.device)
            else:
                setattr(layer, kind, whole.to(tensor.device))
        for layer in cache.layers:
            if hasattr(layer, "cumulative_length"):
                layer.cumulative_length = tokens
        return cache

    def _misfit(self, parts: Parts, start: int, stop: int) -> str:
        """The first tensor that is not of this form; empty if all are."""
        expected = {}
        for name, layer, axis, tensor in _held(self._filled):
            shape = list(tensor.shape)
            if axis is not None:
                shape[axis] = min(stop, _window(layer)) if _window(layer) else stop - start
            expected[name] = tuple(shape), tensor.dtype
        found = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in parts.items()}
        wrong = next((name for name in {**expected, **found} if found.get(name) != expected.get(name)), None)
        return "" if wrong is None else f"{wrong} is {found.get(wrong)}, expected {expected.get(wrong)}"

    def _difference(self, cache: Any) -> str:
        """What is not as in the form; empty if all is."""
        layers, own = getattr(cache, "layers", None), self._filled.layers
        if not isinstance(layers, list) or len(layers) != len(own):
            return f"it does not have the {len(own)} layers of this model's stock cache"
        if getattr(cache, "offloading", False):
            return "its layers are offloaded, and may be on their way"
        for index, (layer, like) in enumerate(zip(layers, own, strict=True)):
            if type(layer) is not type(like):
                return f"layer {index} is a {type(layer).__name__}, and the stock cache has a {type(like).__name__}"
            if any(getattr(layer, name, None) != getattr(like, name, None) for name in _FLAGS):
                return f"layer {index} is empty"
        return ""


def is_state(name: str) -> bool:
    """Return True for a name of `StockForm.take` that is a state's."""
    return name.split(".")[2] in STATE_KINDS


_NAMES = {*_TOKEN_AXES, *STATE_KINDS, *_CONSTANTS, "layers"}


def _held(cache: Any) -> Iterator[tuple[str, Any, int | None, Tensor]]:
    """Name, layer, axis of tokens (None: a state) and tensor of all that a cache holds."""
    for index, layer in enumerate(cache.layers):
        for name, axis in _TOKEN_AXES.items():
            if isinstance(getattr(layer, name, None), Tensor):
                yield f"layer.{index}.{name}", layer, axis, getattr(layer, name)
        for name in STATE_KINDS:
            for at, state in getattr(layer, name, {}).items():
                if state is not None:
                    yield f"layer.{index}.{name}.{at}", layer, None, state


def _counts(cache: Any) -> Iterator[int]:
    """How many tokens each layer holds that counts them."""
    for _, layer, axis, tensor in _held(cache):
        if axis is not None:
            yield layer.cumulative_length if _window(layer) else tensor.shape[axis]


def _window(layer: Any) -> int:
    """How many tokens a layer with a window keeps; 0 without a window."""
    return layer.sliding_window - 1 if getattr(layer, "is_sliding", False) else 0


def _has_tensor(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_tensor, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_has_tensor, value))
    return isinstance(value, Tensor)
