# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Saving a model's stock cache, and testing that the model's own code continues a cache that was loaded.

Both are found out by running the model, never taken from a list of types. The form is read off a cache that the model
has filled: layer classes, flags, shapes, dtypes and devices are those of the installed transformers.

Some code ignores a state before several tokens (`ignores_states`; 16 bits could hide it here). Some keeps a state in
its modules, which no cache brings back (RecurrentGemma). So a prefix is saved, continued in pieces after another
prompt, and compared with one forward: logits behind each border, and every state at the end. One of the pieces is
longer than a chunk of a chunked scan.
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UnsupportedModelError
from ..model.anatomy import other_states, stock_cache, text_config
from ..model.cache_keyword import cache_argument
from ..model.calibrate import HELD_TOKENS, STATE_KINDS, ignores_states
from ..model.checks import FAILURES, FINE, LOGITS, MOST_ALLOWED, allowed_of, norm_error
from ..model.fingerprint import PerStructure
from ..model.identity.canonical import canonical, notes_kept
from ..model.modality import text_ids
from ..model.placement import input_device
from ..store.chunk import has_usable_values
from ..store.tiers.base import EntryFault

COMPARED_TOKENS = 4
# of what logits may be off: code for one token may clamp a step that a scan does not (1e-3, zamba2)
STATE_FACTOR = 10.0
CHUNK_FIELDS = ("mamba_chunk_size", "chunk_size", "block_size")  # tokens that a scan takes at once, where it is said
LEAST_CHUNK = 64  # of a delta rule, whose config does not say
_TOKEN_AXES = {"keys": -2, "values": -2, "indexer_keys": 1, "indexer_position_ids": -1}  # where tokens are counted
_NAMES = {*_TOKEN_AXES, *STATE_KINDS, "_sliding_window_tensor", "layers"}  # of all that holds a tensor

Parts = dict[str, Tensor]


class StockForm:
    """The form of a model's stock cache: the tensors of each layer by token, by window, and as a state."""

    def __init__(self, cache: Any) -> None:
        """Read the form off a cache."""
        self._filled = cache
        for what, owner in (("the cache", cache), *((f"layer {n}", layer) for n, layer in enumerate(cache.layers))):
            strange = [name for name, value in vars(owner).items() if _has_tensor(value) and name not in _NAMES]
            if strange:
                raise UnsupportedModelError(
                    f"{what} of a {type(cache).__name__} keeps {strange[0]}, expected K, V and states alone, so it "
                    "cannot be saved and taken up again. Prefill this model's prompts as a whole."
                )

    def take(self, cache: Any, start: int, stop: int) -> Parts:
        """The tensors of tokens `start <= token < stop`, and the states, by name."""
        taken, own = {}, {name: tensor for name, _, _, tensor in _held(self._filled)}
        for name, layer, axis, tensor in _held(cache):
            if axis is None:  # a state that records its past, for assisted decoding, holds more than is needed
                taken[name] = tensor[..., -own[name].shape[-1] :] if name in own else tensor
            else:
                length = tensor.shape[axis]
                first, last = (
                    (max(0, length - _window(layer)), length) if _window(layer) else (start, min(stop, length))
                )
                taken[name] = tensor.narrow(axis, first, last - first)
        return taken

    def check(self, parts: Parts, start: int, stop: int) -> None:
        """Raise EntryFault for tensors that `take` never gives."""
        misfit = self._misfit(parts, start, stop)
        if misfit:
            raise EntryFault("layout", misfit)
        for name, tensor in parts.items():
            if tensor.is_floating_point() and not has_usable_values(tensor):
                raise EntryFault("values", f"{name} is NaN, infinite or absurd")

    def fill(self, segments: Sequence[Parts], tokens: int) -> Any:
        """Make a cache of `tokens` tokens from what `take` gave of neighbouring ranges."""
        cache = copy.deepcopy(self._filled)
        for name, layer, axis, tensor in list(_held(cache)):
            whole = segments[-1][name]
            if axis is not None and not _window(layer) and len(segments) > 1:
                whole = torch.cat([segment[name] for segment in segments], dim=axis)
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
        """Describe the first tensor that does not have this form; empty if all have it."""
        expected = {}
        for name, layer, axis, tensor in _held(self._filled):
            shape = list(tensor.shape)
            if axis is not None:
                shape[axis] = min(stop, _window(layer)) if _window(layer) else stop - start
            expected[name] = tuple(shape), tensor.dtype
        stored = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in parts.items()}
        wrong = next((name for name in {**expected, **stored} if stored.get(name) != expected.get(name)), None)
        return "" if wrong is None else f"{wrong} is {stored.get(wrong)}, expected {expected.get(wrong)}"


@dataclass(frozen=True)
class Continuing:
    """How a model's stock cache is continued; `at_once`: several tokens in one forward are computed correctly."""

    form: StockForm
    at_once: bool

    @torch.no_grad()
    def advance(self, model: nn.Module, cache: Any, ids: Tensor) -> None:
        """Compute more tokens, `[tokens]`, into a cache: one by one if several would be computed wrongly."""
        size = len(ids) if self.at_once or not cache.get_seq_length() else 1
        for piece in ids.split(size) if len(ids) else ():
            advance(model, cache, piece[None])


@PerStructure
def continuing(model: nn.Module) -> Continuing:
    """Find out how a model's stock cache is continued; remembered until the fingerprint changes."""
    complaint = other_states(text_config(model)) or _notes(model)
    if complaint:
        raise UnsupportedModelError(f"{type(model).__name__} cannot be continued from a saved prefix: {complaint}")
    long = _longest_chunk(model) + 2
    try:
        with torch.inference_mode(False), canonical(model), notes_kept(model):
            form = StockForm(_whole(model, text_ids(model, HELD_TOKENS)[None])[1])
            one_by_one = _error(model, form, (1,) * COMPARED_TOKENS)
            several = _error(model, form, (COMPARED_TOKENS, long, COMPARED_TOKENS - 1))
    except UnsupportedModelError:
        raise
    except FAILURES as broken:
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot be continued from a saved prefix: the test ended in "
            f"{type(broken).__name__}: {broken} Prefill its prompts as a whole."
        ) from broken
    if not one_by_one <= 1:
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot be continued from a saved prefix: tokens that come one by one differ from "
            f"one forward by {one_by_one:.2g} times what is allowed. Prefill its prompts as a whole."
        )
    return Continuing(form, several <= 1 and not ignores_states(model))


def _notes(model: nn.Module) -> str:
    """What a model keeps of its last prompt, outside of the cache, and applies to any cache; empty if nothing."""
    if not any("rope_deltas" in vars(module) for module in model.modules()):
        return ""
    return (
        "it notes in its modules by how much the images of its last prompt moved the positions behind them "
        "(rope_deltas), and moves the tokens behind any filled cache by as much. Load its text model alone."
    )


def _error(model: nn.Module, form: StockForm, pieces: tuple[int, ...]) -> float:
    """The error of a model that continues a saved prefix in pieces, against one forward; 1 is the largest allowed.

    Logits behind each border and every state at the end are compared. In 16 bits the median counts: there a token may
    be sent to another expert for a rounding error.
    """
    ids = text_ids(model, HELD_TOKENS + sum(pieces))[None]
    whole, cache = _whole(model, ids)
    other = form.fill([_saved(model, form, ids)], HELD_TOKENS)
    with torch.no_grad():
        rest = [
            advance(model, other, piece, piece.shape[1]).logits for piece in ids[:, HELD_TOKENS:].split(pieces, dim=1)
        ]
    logits = torch.cat((whole[:, :HELD_TOKENS], *rest), dim=1)
    starts = torch.tensor((HELD_TOKENS, *pieces)).cumsum(0).tolist()[:-1]
    rows = {row for start in starts for row in range(start, min(start + COMPARED_TOKENS, ids.shape[1]))}
    expected, filled = (form.take(source, 0, ids.shape[1]) for source in (cache, other))
    errors = [norm_error(logits[0, row], whole[0, row]) for row in sorted(rows)]
    states = [norm_error(filled[name], expected[name]) for name in expected if name.split(".")[2] in STATE_KINDS]
    bound = allowed_of(LOGITS, model.dtype)
    allowed = ((errors, bound), (states, min(MOST_ALLOWED, STATE_FACTOR * bound)))
    if model.dtype in FINE:
        return max(max(shares) / most for shares, most in allowed if shares)
    return max(float(torch.tensor(shares).median()) / most for shares, most in allowed if shares)


@torch.no_grad()
def _whole(model: nn.Module, ids: Tensor) -> tuple[Tensor, Any]:
    """Logits of one forward, and the cache behind it."""
    cache = stock_cache(model)
    return advance(model, cache, ids, ids.shape[1]).logits, cache


def _saved(model: nn.Module, form: StockForm, ids: Tensor) -> Parts:
    """What is saved of the first tokens; then others are computed, so that states outside the cache are seen."""
    parts = form.take(_whole(model, ids[:, :HELD_TOKENS])[1], 0, HELD_TOKENS)
    _whole(model, ids[:, :HELD_TOKENS].flip(1))
    return parts


def advance(model: nn.Module, cache: Any, ids: Tensor, logits: int = 1) -> Any:
    """Compute more tokens, `[1, tokens]`, into a cache, at the positions that `generate` gives."""
    length, taken = cache.get_seq_length(), signature(model.forward).parameters
    ids = ids.to(input_device(model))
    positions = torch.arange(length, length + ids.shape[1], device=ids.device)[None]
    inputs = {"position_ids": positions, "logits_to_keep": logits}
    few = {name: value for name, value in inputs.items() if name in taken}
    return model(input_ids=ids, **cache_argument(model, cache), use_cache=True, **few)


def _longest_chunk(model: nn.Module) -> int:
    named = (getattr(text_config(model), name, None) for name in CHUNK_FIELDS)
    return max(LEAST_CHUNK, *(size for size in named if isinstance(size, int)), 0)


def _held(cache: Any) -> Iterator[tuple[str, Any, int | None, Tensor]]:
    """Name, layer, axis of tokens (None: a state) and tensor, of each tensor of a cache."""
    for index, layer in enumerate(getattr(cache, "layers", ())):
        for name, axis in _TOKEN_AXES.items():
            if isinstance(getattr(layer, name, None), Tensor):
                yield f"layer.{index}.{name}", layer, axis, getattr(layer, name)
        for name in STATE_KINDS:
            for at, state in getattr(layer, name, {}).items():
                if state is not None:
                    yield f"layer.{index}.{name}.{at}", layer, None, state


def _window(layer: Any) -> int:
    """How many tokens a layer with a window keeps; 0 without a window."""
    return layer.sliding_window - 1 if getattr(layer, "is_sliding", False) else 0


def _has_tensor(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_tensor, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_has_tensor, value))
    return isinstance(value, Tensor)
