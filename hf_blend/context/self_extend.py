# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Self-Extend: plain attention to near tokens, grouped positions for far ones, so that no distance is untrained.

    with self_extend(model):
        model.generate(**inputs, max_new_tokens=64)

For a key at a distance of at least the window, positions are divided by the group size, rounding down; queries are
moved by window - window // group, so that the two scales meet at the edge of the window (Jin et al. 2024, arXiv
2401.01325, equations 3 and 4). Keys and queries are rotated from their positions by the model's own tables. Inside the
block, in this thread, the model's layers compute eager attention; after the block the model is as before.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_mask

from ..errors import ConfigError, UnsupportedModelError
from ..model.anatomy import EXTENDED, LayerInfo, decoder_layers, is_extended, other_states, text_config, windowed_layer
from ..model.attention import AttentionFn, AttentionOverride, hook_attention
from ..model.checks import CheckedModel, Use, ensure_passed
from .tables import TableSource

EXTENSION = 4  # times the trained length, where nothing else is asked for
EXTEND = Use(
    "extend",
    "hf_blend.context.checks",
    "{} cannot be extended",
    "Use a fresh prefill instead, or pass allow_unverified=True to use it all the same.",
)
UNKNOWN_ARGUMENTS = ("sliding_window", "softcap", "s_aux", "position_bias")  # that change attention in some family


@dataclass(frozen=True)
class Extension:
    """The window, the group size, and the layers that have attended so."""

    source: TableSource
    window_tokens: int
    group_tokens: int
    layers: set[int] = field(default_factory=set)


@contextmanager
def self_extend(
    model: nn.Module,
    *,
    trained_tokens: int | None = None,
    max_tokens: int | None = None,
    window_tokens: int | None = None,
    group_tokens: int | None = None,
    allow_unverified: bool = False,
) -> Iterator[Extension]:
    """A context manager in which a model attends beyond its trained length.

    Args:
        model: a causal language model with rotary positions and full attention in every layer.
        trained_tokens: the longest prompt it was trained on; None is its `max_position_embeddings`.
        max_tokens: the longest prompt that is expected; None is four times the trained length.
        window_tokens: keys nearer than this keep their distance; None is half of the trained length.
        group_tokens: far positions are divided by this; None is the least that keeps `max_tokens` within the trained
            length.
        allow_unverified: use a model that fails the self-test, with one warning.

    Yields:
        What was chosen.

    Raises:
        ConfigError: a number is out of range, or no group is large enough.
        UnsupportedModelError: the model has windows of its own, or keys that cannot be moved; a layer does not ask
            transformers for its attention, or attends otherwise than the model does at the grouped positions. The
            layer is named.
    """
    extension = _extension(model, trained_tokens, max_tokens, window_tokens, group_tokens)
    ensure_passed(CheckedModel(model), EXTEND, allow_unverified)
    attend_extended = partial(attend, extension)

    def choose(_: tuple[Any, ...]) -> AttentionOverride | None:
        return attend_extended if is_extended(model) else None

    modules = [module for layer in decoder_layers(model) for module in LayerInfo.of(layer).attention]
    handles = hook_attention(modules, choose)
    token = EXTENDED.set((*EXTENDED.get(), text_config(model)))
    try:
        yield extension
    finally:
        EXTENDED.reset(token)
        for handle in handles:
            handle.remove()


def attend(
    extension: Extension,
    _: AttentionFn,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Eager attention in the place of the model's, with two scales of distance.

    Shapes: query `[batch, heads, rows, head_dim]`, key `[batch, kv_heads, keys, head_dim]`, value `[batch, kv_heads,
    keys, value_dim]` → `[batch, rows, heads, value_dim]`.
    """
    for name in UNKNOWN_ARGUMENTS:
        if kwargs.get(name) is not None:
            raise UnsupportedModelError(
                f"layer {module.layer_idx}, a {type(module).__name__}, attends with {name}, which Self-Extend does "
                "not know. Use it with a model of plain softmax attention."
            )
    layer = int(module.layer_idx)
    extension.layers.add(layer)

    # Positions as the mask shows them: padding does not count
    hidden = _hidden(module, attention_mask, query, key)
    positions = _positions(hidden)
    rows = positions[:, -query.shape[2] :]

    # Rotate queries and keys to grouped positions
    window = extension.window_tokens
    group = extension.group_tokens
    grouped_rows = rows // group + window - window // group
    far_query = _moved(extension.source, layer, query, rows, grouped_rows)
    far_key = _moved(extension.source, layer, key, positions, positions // group)

    # Attend to near keys as they are, to far ones at grouped positions
    groups = getattr(module, "num_key_value_groups", 1)
    near = query @ key.repeat_interleave(groups, 1).transpose(2, 3)
    far = far_query @ far_key.repeat_interleave(groups, 1).transpose(2, 3)
    distances = rows[:, :, None] - positions[:, None, :]
    scores = torch.where((distances < window)[:, None], near, far) * scaling + hidden
    weights = nn.functional.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    output = weights @ value.repeat_interleave(groups, 1)
    return output.transpose(1, 2).contiguous(), weights


def _extension(
    model: nn.Module, trained: int | None, longest: int | None, window: int | None, group: int | None
) -> Extension:
    complaint = other_states(text_config(model), only_keys=True)
    if complaint:
        raise UnsupportedModelError(f"{type(model).__name__} cannot be extended: {complaint}")
    windowed = windowed_layer(model)
    if windowed is not None:
        raise UnsupportedModelError(
            f"layer {windowed} of {type(model).__name__} attends within a window of its own, so it sees no far tokens "
            "to group. Self-Extend needs full attention in every layer."
        )
    source = TableSource.of(model)
    if not source.rotates:
        raise UnsupportedModelError(
            f"layer 0 of {type(model).__name__} does not rotate its keys, and neither does any other, but Self-Extend "
            "groups rotary positions. Use it with a model that has them."
        )
    trained = trained or getattr(text_config(model), "max_position_embeddings", None)
    if trained is None or trained < 2:
        raise ConfigError(f"the trained length is {trained}, expected 2 or more. Pass trained_tokens.")
    longest = longest or EXTENSION * trained
    window = trained // 2 if window is None else window
    if not 1 <= window < trained:
        raise ConfigError(f"window_tokens is {window}, expected 1 to {trained - 1}, below the trained length.")
    if group is None:
        group = max(1, math.ceil((longest - window) / (trained - window)))
    if group < 1:
        raise ConfigError(f"group_tokens is {group}, expected a whole number from 1 on.")
    return Extension(source, window, group)


def _hidden(module: nn.Module, mask: Any, query: Tensor, key: Tensor) -> Tensor:
    """The additive mask `[batch, 1, rows, keys]` that any form of mask stands for; positions are read from it."""
    batch, _, rows, _ = query.shape
    keys = key.shape[2]
    if isinstance(mask, BlockMask):
        mask = create_mask(mask.mask_mod, batch, 1, rows, keys, device=query.device)
    if mask is None or mask.dim() == 2:  # the model's function hides what is ahead, and padding
        visible = torch.ones((1, 1, rows, keys), dtype=torch.bool, device=query.device).tril(keys - rows)
        if mask is not None:
            visible = visible & mask[:, None, None, -keys:].bool()
        mask = visible
    if mask.dim() != 4 or mask.shape[1] != 1:
        raise UnsupportedModelError(
            f"layer {module.layer_idx}, a {type(module).__name__}, attends with a mask of shape {tuple(mask.shape)}, "
            "but Self-Extend expects one of [batch, 1, rows, keys] that only hides tokens. Use it with a model of "
            "plain softmax attention."
        )
    mask = mask.expand(batch, -1, -1, -1)
    if mask.dtype != torch.bool:
        return mask
    zeros = torch.zeros(mask.shape, dtype=query.dtype, device=query.device)
    return zeros.masked_fill(~mask, torch.finfo(query.dtype).min)


def _positions(mask: Tensor) -> Tensor:
    """Positions of the keys, `[batch, keys]`: padding, which the last row does not see, does not count."""
    visible = mask[:, 0, -1] == 0
    return (visible.long().cumsum(-1) - 1).clamp_min(0)


def _moved(source: TableSource, layer: int, states: Tensor, old: Tensor, new: Tensor) -> Tensor:
    """Queries or keys `[batch, heads, tokens, head_dim]` rotated from old to new positions, `[batch, tokens]` each."""
    moved = states.clone()
    style = source.styles[layer]
    for row in range(len(states)):
        by = source.rotation(layer, old[row], new[row])
        if by is None:
            continue
        begin = 0
        if style.slot:  # latent attention puts what rotates behind the rest
            begin = -2 * by[0].shape[-1]
        style.move(states[row, ..., begin:], by, out=moved[row, ..., begin:])
    return moved
