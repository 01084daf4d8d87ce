# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What every cache refuses of a forward: one table, through which all of them go.

A cache describes a forward before it runs (`CacheCall`), and `refuse` raises by the first line of `REFUSALS` that
objects: what one cache refuses, all refuse. Behind the forward `check_length` compares what is cached with what came.

`generate` leaves out as many first tokens of its prompt as a cache has, whatever they are, and the cache never sees
them. So behind cached tokens the first forward of a `generate` must bring what the cache's own `inputs` has built.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, GenerationMixin

from ..errors import ConfigError, PromptError, UnsupportedModelError
from ..model.anatomy import cache_argument, other_inputs

ADAPTERS = ("adapter_names", "alora_offsets")  # of PEFT, which puts hooks into the model for one call
MARKS_CACHES = "_is_user_defined" in GenerationMixin._prepare_cache_for_generation.__code__.co_names


class GuardedCache(Cache):
    """A cache that notices when a `generate` begins: transformers marks the caches that its caller gave."""

    model: nn.Module
    begins_turn = False  # the next forward is the first one of a `generate`
    _is_marked = False

    @property
    def keyword(self) -> dict[str, Any]:
        """This cache by the name of the model's argument for it, which is another since transformers 5.24."""
        return cache_argument(self.model, self)

    @property
    def _is_user_defined(self) -> bool:
        return self._is_marked

    @_is_user_defined.setter
    def _is_user_defined(self, value: bool) -> None:
        self._is_marked = self.begins_turn = value


@dataclass(frozen=True)
class CacheCall:
    """A forward that carries a cache, and what the cache knows of it.

    Attributes:
        model: whose forward it is.
        layers: its decoder layers.
        arguments: of the model, by name.
        past: how many columns are cached.
        past_rows: their batch entries; 0 where none is.
        kv: the cache's layers.
        begins_turn: a `generate` begins.
        is_expected: the new tokens are those that the cache's `inputs` built.
        advice: how a prompt is given behind cached tokens.
        next_position: of a cache that continues one sequence at a time, and gives the model positions and no mask.
        dropped: how many tokens such a cache has dropped by itself.
    """

    model: nn.Module
    layers: Sequence[nn.Module]
    arguments: Mapping[str, Any]
    past: int
    past_rows: int
    kv: Sequence[Any]
    begins_turn: bool
    is_expected: bool
    advice: str
    next_position: int | None = None
    dropped: int = 0

    @property
    def is_single(self) -> bool:
        """Whether the cache continues one sequence at a time."""
        return self.next_position is not None

    @property
    def shape(self) -> tuple[int, int]:
        """Batch entries and columns that come."""
        for name in ("input_ids", "inputs_embeds"):
            new = self.arguments.get(name)
            if new is not None:
                return new.shape[0], new.shape[1]
        return 0, 0


def _without_cache(call: CacheCall) -> str:
    if call.arguments.get("use_cache") is not False:
        return ""
    return (
        f"use_cache is False, but a cache came with the call of {type(call.model).__name__}: each step would bring "
        "the whole prompt, and the cache would append it again. Pass use_cache=True (fine-tuning leaves it off in "
        "generation_config and config), or no cache."
    )


def _nothing_new(call: CacheCall) -> str:
    if 0 not in call.shape:
        return ""
    return (
        f"{call.shape[1]} tokens of {call.shape[0]} requests came, but at least one of one is expected. Pass "
        "input_ids or inputs_embeds with a token."
    )


def _checkpointed(call: CacheCall) -> str:
    if not call.model.training:
        return ""
    count = sum(layer.training and bool(getattr(layer, "gradient_checkpointing", False)) for layer in call.layers)
    if not count:
        return ""
    return (
        f"{count} layers of {type(call.model).__name__} checkpoint their gradients in training mode, and then keep no "
        "cache. Call model.eval(), or model.gradient_checkpointing_disable()."
    )


def _adapters_of_one_call(call: CacheCall) -> str:
    name = next((name for name in ADAPTERS if call.arguments.get(name) is not None), None)
    if name is None:
        return ""
    return (
        f"{name}={call.arguments[name]!r:.60} chooses adapters for this request alone, which neither the keys of "
        "stored chunks nor a cache name. Choose the adapter for the model with set_adapter."
    )


def _other_mask(call: CacheCall) -> str:
    mask = call.arguments.get("attention_mask")
    rows, columns = call.shape
    if not isinstance(mask, Tensor):
        return ""
    total = call.past + columns
    fits = False  # of another form than a model takes
    if call.is_single:  # which attends to all that it holds
        fits = mask.shape[-1] >= total
    elif mask.dim() == 2:
        fits = tuple(mask.shape) == (rows, total)
    elif mask.dim() == 4:
        keys = {mask.shape[3]}
        for layer in call.kv:
            if hasattr(layer, "sizes_behind"):  # a window shows fewer
                keys.add(layer.sizes_behind(call.past, columns)[0])
        fits = mask.shape[0] in (1, rows) and mask.shape[2] == columns and len(keys) == 1
    if fits:
        return ""
    return (
        f"attention_mask has the shape {tuple(mask.shape)}, but ({rows}, {total}) is expected: {columns} new tokens "
        f"behind {call.past} that are cached. Pass a mask of all of them, or none; a mask by rows has the keys that "
        "each layer keeps."
    )


def _other_width(call: CacheCall) -> str:
    positions = call.arguments.get("position_ids")
    _, columns = call.shape
    if not isinstance(positions, Tensor) or positions.shape[-1] == columns:
        return ""
    return (
        f"position_ids has the shape {tuple(positions.shape)}, but {columns} tokens came: generate counts them along "
        "the attention_mask. Pass both for all tokens, or neither."
    )


def _other_rows(call: CacheCall) -> str:
    rows, _ = call.shape
    if not call.past_rows or rows == call.past_rows:
        return ""
    return (
        f"{rows} requests came behind {call.past_rows} that the cache holds, but the same ones are expected: beams, "
        f"samples and a smaller batch have rows of their own. {call.advice}"
    )


def _not_single(call: CacheCall) -> str:
    if not call.is_single:
        return ""
    rows, _ = call.shape
    mask = call.arguments.get("attention_mask")
    has_gaps = mask is not None and (mask.dim() != 2 or not bool(mask.all()))
    if rows == 1 and not has_gaps:
        return ""
    return (
        f"{rows or 'no'} requests came{' with padding' * has_gaps}, but this cache expects one, without padding: it "
        "continues one sequence at a time. Use a BlendCache for a batch or beams."
    )


def _other_positions(call: CacheCall) -> str:
    positions = call.arguments.get("position_ids")
    if call.next_position is None or positions is None:
        return ""
    given = positions.reshape(-1, positions.shape[-1])[-1].cpu()
    start = int(given[0])
    # `generate` counts tokens, also those that were dropped since it began
    is_counted = call.past <= start <= call.past + call.dropped or start == call.next_position
    if is_counted and torch.equal(given, start + torch.arange(len(given))):
        return ""
    return (
        f"position_ids begin with {positions.flatten()[:4].tolist()}, but this cache gives its tokens the positions "
        f"from {call.next_position} on. Leave position_ids out; to move tokens use shift()."
    )


def _other_inputs(call: CacheCall) -> str:
    others = other_inputs(call.model, call.arguments) if call.is_single else ()
    if not others:
        return ""
    return (
        f"{', '.join(others)} came with a cache that gives a token the position behind the last, but text alone is "
        "expected: images have positions of their own. Use DynamicCache."
    )


def _unknown_beginning(call: CacheCall) -> str:
    _, columns = call.shape
    # where generate marks no cache, nobody knows whose call it is
    begins_turn = call.begins_turn or (columns > 1 and not MARKS_CACHES)
    if not call.past or call.is_expected or not begins_turn:
        return ""
    return (
        f"{columns} tokens of a prompt came behind the {call.past} that the cache holds, but only the rest of a "
        "prompt that was built with the cache is known to continue these: generate leaves out the first tokens of a "
        "prompt without comparing them, or passes all of them again (assisted decoding; prefill_chunk_size of "
        f"transformers 5.17). {call.advice}"
    )


REFUSALS = (
    (ConfigError, _without_cache),
    (ConfigError, _checkpointed),
    (UnsupportedModelError, _adapters_of_one_call),
    (PromptError, _other_inputs),
    (PromptError, _not_single),
    (PromptError, _unknown_beginning),
    (PromptError, _nothing_new),
    (PromptError, _other_width),
    (PromptError, _other_positions),
    (PromptError, _other_mask),
    (PromptError, _other_rows),
)


def refuse(call: CacheCall) -> None:
    """Raise the error of the first refusal in the table that a forward meets."""
    for error, objection in REFUSALS:
        if text := objection(call):
            raise error(text)


def check_length(model: nn.Module, cached: int, expected: int) -> None:
    """Refuse to go on behind a forward of a model that has not cached each of its tokens."""
    if cached != expected:
        raise ConfigError(
            f"{type(model).__name__} has returned, and {cached} tokens are cached, but {expected} are expected: the "
            "model has left the cache out, or appended other tokens to it. Call it with use_cache=True, in evaluation "
            "mode."
        )
