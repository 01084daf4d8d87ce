# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Checks of moved keys, shared cells and grouped positions, against forwards of the stock model.

The expected side is computed by the stock model alone. The checks run before a model is first used with moved keys,
shared cells or Self-Extend; a model that fails is refused, and the message names the layer.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UnsupportedModelError
from ..model.anatomy import LayerCall, decoder_layers, full_cache
from ..model.cache_keyword import cache_argument
from ..model.checks import (
    FAILURES,
    FLOORS,
    CheckedModel,
    CheckResult,
    Comparison,
    check,
    nothing_shown,
    refused,
    relative_error,
    violations,
)
from ..model.hooks import hooked
from ..model.placement import input_device
from .self_extend import self_extend as extended
from .sequence_cache import SequenceCache

SHIFT = 77  # positions, not a multiple of a head's width
NEAREST: dict[str, Any] = {"trained_tokens": 64, "window_tokens": 1, "group_tokens": 1000}  # all others at distance 1
Measure = Callable[[CheckedModel], CheckResult]


def _unless_refused(measure: Measure) -> Measure:
    """Make a check neither pass nor fail for a model that is refused."""

    @wraps(measure)
    @torch.no_grad()
    def measured(subject: CheckedModel) -> CheckResult:
        try:
            return measure(subject)
        except UnsupportedModelError as error:
            return refused(error)

    return measured


@check(first_use="move")
@_unless_refused
def whole_shift(subject: CheckedModel) -> CheckResult:
    """A sequence that is shifted as a whole continues as a plain forward at its new positions does."""
    model, ids = subject.model, _ids(subject)
    prefix, cache = 3 * ids.shape[1] // 4, SequenceCache(model)
    model(ids[:, :prefix], **cache_argument(model, cache), use_cache=True)
    cache.shift(cache.active, 0, None, SHIFT)
    logits = model(ids[:, prefix:], **cache_argument(model, cache), use_cache=True).logits
    expected, plain = _plain(model, ids, SHIFT)
    compared = [*_by_layer(cache.materialize(), plain.layers), Comparison("the logits", logits, expected[:, prefix:])]
    return subject.compare(compared, "at the new positions")


@check(first_use="move")
@_unless_refused
def closed_hole(subject: CheckedModel) -> CheckResult:
    """After tokens are removed and the rest closes up, layer 0 has the K and V of a direct forward of what is left."""
    model, ids = subject.model, _ids(subject)
    start, stop, cache = ids.shape[1] // 4, ids.shape[1] // 2, SequenceCache(model)
    model(ids, **cache_argument(model, cache), use_cache=True)
    cache.remove(cache.active, start, stop)
    cache.shift(cache.active, stop, None, start - stop)
    _, plain = _plain(model, torch.cat([ids[:, :start], ids[:, stop:]], dim=1), 0)
    return subject.compare(_by_layer(cache.materialize()[:1], plain.layers[:1]), "of what is left")


@check(first_use="share")
@_unless_refused
def shared_cells(subject: CheckedModel) -> CheckResult:
    """A sequence that is forked and whose copies are shortened continues, all at once, as plain forwards of each."""
    model, ids = subject.model, _ids(subject)
    prefix, cache = ids.shape[1] // 2, SequenceCache(model)
    lengths = (prefix, prefix - 3, prefix)  # that the copies keep
    new = torch.stack([ids[0, prefix + number :][:4] for number in range(len(lengths))])
    model(ids[:, :prefix], **cache_argument(model, cache), use_cache=True)
    for number, length in zip(cache.fork(len(lengths)), lengths, strict=True):
        cache.remove(number, length)
    parts = [
        model(tokens, **cache_argument(model, cache), use_cache=True).logits for tokens in (new[:, :-1], new[:, -1:])
    ]
    logits, compared = torch.cat(parts, 1), []
    for row, length in enumerate(lengths):
        expected, _ = _plain(model, torch.cat([ids[:, :length], new[[row]]], 1), 0)
        compared.append(Comparison(f"the logits of sequence {row}", logits[[row]], expected[:, length:]))
    return subject.compare(compared, "of the same tokens alone")


@check(first_use="extend", overridable=False)
@_unless_refused
def asks_for_attention(subject: CheckedModel) -> CheckResult:
    """Every layer asks transformers for its attention, so that Self-Extend can change it."""
    model, extended_layers = subject.model, set[int]()
    name = type(model).__name__
    try:
        with extended(model, **NEAREST) as extension:
            extended_layers = extension.layers
            model(_ids(subject), use_cache=False)
    except UnsupportedModelError:
        raise
    except FAILURES as broken:
        return violations(
            [f"layer {len(extended_layers)} of {name} cannot be extended: {type(broken).__name__}: {broken}"]
        )
    deaf = [index for index in range(len(decoder_layers(model))) if index not in extended_layers]
    if not deaf:
        return violations([])
    return violations([
        f"layer {deaf[0]} of {name} computes its attention without asking for it by transformers' "
        "AttentionInterface, so Self-Extend would change nothing in it. Use a model whose layers all ask, or a "
        "shorter prompt."
    ])  # fmt: skip


@check(first_use="extend")
@_unless_refused
def self_extend(subject: CheckedModel) -> CheckResult:
    """With all other tokens at distance 1, Self-Extend's every layer gives what the stock layer gives at 0, … 0, 1.

    Each layer is compared by itself, at the last token: the stock layers receive what the extended ones received. What
    stock layers differ by where they are run in other ways is noise.
    """
    model, ids = subject.model, _ids(subject)
    with extended(model, **NEAREST):
        extended_run = _contributions(model, ids)
    inputs, got = zip(*extended_run, strict=True)
    plain = torch.arange(ids.shape[1], device=ids.device)[None]
    near = (plain == plain[:, -1:]).long()
    runs = [_contributions(model, ids, inputs, positions) for positions in (near, plain, plain + SHIFT)]
    runs.append(_contributions(model, ids, inputs, plain, alone=True))  # 8-bit products may depend on the rows beside
    expected, at_once, *again = ([added for _, added in run] for run in runs)
    noise = max(error for added in again for error in map(relative_error, added, at_once))
    allowed = max(FLOORS * noise, subject.contribution_tolerance(expected[0].dtype))
    if subject.must_show and max(map(relative_error, at_once, expected)) <= allowed:
        return nothing_shown("the distances change nothing in any layer, so nothing was shown.")
    errors = [*map(relative_error, got, expected)]
    largest = max(errors)
    off = f"with all other tokens at distance 1 the output of layer {errors.index(largest)} is off by {largest:.2g}"
    return CheckResult(largest, allowed, f"{off} of its size from the stock layer's, where {allowed:.2g} is allowed.")


def _contributions(
    model: nn.Module, ids: Tensor, inputs: Sequence[Tensor] = (), positions: Tensor | None = None, alone: bool = False
) -> list[tuple[Tensor, Tensor]]:
    """What each layer received and what it added to that at the last token, `[1, width]`, in a forward.

    `inputs` replace what the layers receive. With `alone` the last token has a forward of its own. Other threads may
    run the model meanwhile.
    """
    cache, contributed = full_cache(model), dict[int, tuple[Tensor, Tensor]]()

    def before(index: int, layer: nn.Module, args: Any, kwargs: Any) -> Any:
        call = LayerCall.bind(layer, args, kwargs)
        if call.cache is not cache or not inputs:
            return None
        rows, whole = call.hidden.shape[1], inputs[index]
        return (whole[:, -1:] if rows == 1 else whole[:, :rows],), call.arguments

    def after(index: int, layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        call = LayerCall.bind(layer, args, kwargs)
        if call.cache is cache:
            added = (output[0] if isinstance(output, tuple) else output) - call.hidden
            contributed[index] = call.hidden.clone(), added[..., -1, :].reshape(1, -1)

    layers, end = list(enumerate(decoder_layers(model))), ids.shape[1]
    with hooked(layers, before), hooked(layers, after, behind=True):
        for span in (slice(0, end - 1), slice(end - 1, end)) if alone else (slice(0, end),):
            placing: dict[str, Tensor] = {}
            if positions is not None:
                placing = {"position_ids": positions[:, span], "attention_mask": torch.ones_like(ids[:, : span.stop])}
            model(ids[:, span], **cache_argument(model, cache), use_cache=True, **placing)
    return [contributed[index] for index, _ in layers]


def _ids(subject: CheckedModel) -> Tensor:
    return torch.tensor([subject.ids(subject.sequence_tokens, seed=8)], device=input_device(subject.model))


def _plain(model: nn.Module, ids: Tensor, start: int) -> tuple[Tensor, Any]:
    """Logits and cache of a stock forward with its first token at position `start`."""
    cache = full_cache(model)
    positions = torch.arange(start, start + ids.shape[1], device=ids.device)[None]
    logits = model(ids, position_ids=positions, **cache_argument(model, cache), use_cache=True).logits
    return logits, cache


def _by_layer(got: Sequence[Any], expected: Sequence[Any]) -> list[Comparison]:
    return [
        Comparison(f"the {name} of layer {index}", getattr(layer, name), getattr(other, name), index)
        for index, (layer, other) in enumerate(zip(got, expected, strict=True))
        for name in ("keys", "values")
    ]
