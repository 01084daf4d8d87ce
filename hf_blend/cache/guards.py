# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What every cache refuses of a forward: what one refuses, all refuse.

`refuse` reads a forward before it runs. Behind it `check_length` compares what is cached with what came.

`generate` leaves out as many first tokens of its prompt as a cache has, whatever they are, and the cache never sees
them. So behind cached tokens the first forward of a `generate` must bring what the cache's own `inputs` has built.
"""

from collections.abc import Mapping, Sequence
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


def refuse(
    *,
    model: nn.Module,
    layers: Sequence[nn.Module],
    arguments: Mapping[str, Any],
    past: int,
    past_rows: int,
    kv: Sequence[Any],
    begins_turn: bool,
    is_expected: bool,
    advice: str,
    next_position: int | None = None,
    dropped: int = 0,
) -> None:
    """Refuse a forward that carries a cache before it runs.

    Args:
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

    Raises:
        ConfigError: the model would keep no cache.
        UnsupportedModelError: adapters are chosen for this call alone.
        PromptError: the new tokens do not continue the cached ones.
    """
    # Does the model use the cache, with the adapters that it names?
    if arguments.get("use_cache") is False:
        raise ConfigError(
            f"use_cache is False, but a cache came with the call of {type(model).__name__}: each step would bring the "
            "whole prompt, and the cache would append it again. Pass use_cache=True (fine-tuning leaves it off in "
            "generation_config and config), or no cache."
        )
    if model.training:
        count = sum(layer.training and bool(getattr(layer, "gradient_checkpointing", False)) for layer in layers)
        if count:
            raise ConfigError(
                f"{count} layers of {type(model).__name__} checkpoint their gradients in training mode, and then keep "
                "no cache. Call model.eval(), or model.gradient_checkpointing_disable()."
            )
    for name in ADAPTERS:
        if arguments.get(name) is not None:
            raise UnsupportedModelError(
                f"{name}={arguments[name]!r:.60} chooses adapters for this request alone, which neither the keys of "
                "stored chunks nor a cache name. Choose the adapter for the model with set_adapter."
            )

    # Are there new tokens, and do they continue the cached ones?
    new = arguments.get("input_ids")
    if new is None:
        new = arguments.get("inputs_embeds")
    rows, columns = (0, 0) if new is None else new.shape[:2]
    if next_position is not None:
        _refuse_for_one_sequence(model, arguments, rows)
    # where generate marks no cache, nobody knows whose call it is
    is_unknown = begins_turn or (columns > 1 and not MARKS_CACHES)
    if past and is_unknown and not is_expected:
        raise PromptError(
            f"{columns} tokens of a prompt came behind the {past} that the cache holds, but only the rest of a prompt "
            "that was built with the cache is known to continue these: generate leaves out the first tokens of a "
            "prompt without comparing them, or passes all of them again (assisted decoding; prefill_chunk_size of "
            f"transformers 5.17). {advice}"
        )
    if not rows or not columns:
        raise PromptError(
            f"{columns} tokens of {rows} requests came, but at least one of one is expected. Pass input_ids or "
            "inputs_embeds with a token."
        )

    # Do positions, mask and batch fit them?
    positions = arguments.get("position_ids")
    if isinstance(positions, Tensor) and positions.shape[-1] != columns:
        raise PromptError(
            f"position_ids has the shape {tuple(positions.shape)}, but {columns} tokens came: generate counts them "
            "along the attention_mask. Pass both for all tokens, or neither."
        )
    if next_position is not None and positions is not None:
        given = positions.reshape(-1, positions.shape[-1])[-1].cpu()
        start = int(given[0])
        # `generate` counts tokens, also those that were dropped since it began
        is_counted = past <= start <= past + dropped or start == next_position
        if not is_counted or not torch.equal(given, start + torch.arange(len(given))):
            raise PromptError(
                f"position_ids begin with {positions.flatten()[:4].tolist()}, but this cache gives its tokens the "
                f"positions from {next_position} on. Leave position_ids out; to move tokens use shift()."
            )
    mask = arguments.get("attention_mask")
    if isinstance(mask, Tensor):
        total = past + columns
        fits = False  # of another form than a model takes
        if next_position is not None:  # that cache attends to all that it holds
            fits = mask.shape[-1] >= total
        elif mask.dim() == 2:
            fits = tuple(mask.shape) == (rows, total)
        elif mask.dim() == 4:
            keys = {mask.shape[3]}
            for layer in kv:
                if hasattr(layer, "sizes_behind"):  # a window shows fewer
                    keys.add(layer.sizes_behind(past, columns)[0])
            fits = mask.shape[0] in (1, rows) and mask.shape[2] == columns and len(keys) == 1
        if not fits:
            raise PromptError(
                f"attention_mask has the shape {tuple(mask.shape)}, but ({rows}, {total}) is expected: {columns} new "
                f"tokens behind {past} that are cached. Pass a mask of all of them, or none; a mask by rows has the "
                "keys that each layer keeps."
            )
    if past_rows and rows != past_rows:
        raise PromptError(
            f"{rows} requests came behind {past_rows} that the cache holds, but the same ones are expected: beams, "
            f"samples and a smaller batch have rows of their own. {advice}"
        )


def _refuse_for_one_sequence(model: nn.Module, arguments: Mapping[str, Any], rows: int) -> None:
    """Refuse what a cache that continues one sequence at a time cannot take: several, padding, or images."""
    others = other_inputs(model, arguments)
    if others:
        raise PromptError(
            f"{', '.join(others)} came with a cache that gives a token the position behind the last, but text alone "
            "is expected: images have positions of their own. Use DynamicCache."
        )
    mask = arguments.get("attention_mask")
    has_gaps = mask is not None and (mask.dim() != 2 or not bool(mask.all()))
    if rows != 1 or has_gaps:
        raise PromptError(
            f"{rows or 'no'} requests came{' with padding' * has_gaps}, but this cache expects one, without padding: "
            "it continues one sequence at a time. Use a BlendCache for a batch or beams."
        )


def check_length(model: nn.Module, cached: int, expected: int) -> None:
    """Refuse to go on behind a forward of a model that has not cached each of its tokens."""
    if cached != expected:
        raise ConfigError(
            f"{type(model).__name__} has returned, and {cached} tokens are cached, but {expected} are expected: the "
            "model has left the cache out, or appended other tokens to it. Call it with use_cache=True, in evaluation "
            "mode."
        )
