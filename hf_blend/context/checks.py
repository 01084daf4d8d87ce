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
from ..model.anatomy import LayerCall, cache_argument, decoder_layers, full_cache, hooked, input_device
from ..model.checks import (
    FAILURES,
    FLOORS,
    CheckedModel,
    CheckResult,
    Comparison,
    check,
    inconclusive,
    refused,
    relative_error,
    violations,
)
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
    model = subject.model
    ids = _ids(subject)
    prefix = 3 * ids.shape[1] // 4
    cache = SequenceCache(model)
    _forward(model, cache, ids[:, :prefix])
    cache.shift(cache.active, 0, None, SHIFT)
    logits = _forward(model, cache, ids[:, prefix:])
    expected, plain = _plain(model, ids, SHIFT)
    compared = _by_layer(cache.compact(), plain.layers)
    compared.append(Comparison("the logits", logits, expected[:, prefix:]))
    return subject.compare(compared, "at the new positions")


@check(first_use="move")
@_unless_refused
def closed_hole(subject: CheckedModel) -> CheckResult:
    """After tokens are removed and the rest closes up, layer 0 has the K and V of a direct forward of what is left."""
    model = subject.model
    ids = _ids(subject)
    start, stop = ids.shape[1] // 4, ids.shape[1] // 2
    cache = SequenceCache(model)
    _forward(model, cache, ids)
    cache.remove(cache.active, start, stop)
    cache.shift(cache.active, stop, None, start - stop)
    _, plain = _plain(model, torch.cat([ids[:, :start], ids[:, stop:]], dim=1), 0)
    return subject.compare(_by_layer(cache.compact()[:1], plain.layers[:1]), "of what is left")


@check(first_use="extend", overridable=False)
@_unless_refused
def asks_for_attention(subject: CheckedModel) -> CheckResult:
    """Every layer asks transformers for its attention, so that Self-Extend can change it."""
    model = subject.model
    name = type(model).__name__
    extended_layers = set[int]()
    try:
        with extended(model, **NEAREST) as extension:
            extended_layers = extension.layers
            model(_ids(subject), use_cache=False)
    except UnsupportedModelError:
        raise
    except FAILURES as error:
        layer = len(extended_layers)
        return violations([f"layer {layer} of {name} cannot be extended: {type(error).__name__}: {error}"])
    for index in range(len(decoder_layers(model))):
        if index not in extended_layers:
            return violations([
                f"layer {index} of {name} computes its attention without asking for it by transformers' "
                "AttentionInterface, so Self-Extend would change nothing in it. Use a model whose layers all ask, or "
                "a shorter prompt."
            ])  # fmt: skip
    return violations([])


@check(first_use="extend")
@_unless_refused
def self_extend(subject: CheckedModel) -> CheckResult:
    """With all other tokens at distance 1, Self-Extend's every layer gives what the stock layer gives at 0, … 0, 1.

    Each layer is compared by itself, at the last token: the stock layers receive what the extended ones received. What
    stock layers differ by where they are run in other ways is noise.
    """
    model = subject.model
    ids = _ids(subject)
    with extended(model, **NEAREST):
        inputs, got = _contributions(model, ids)
    plain = torch.arange(ids.shape[1], device=ids.device)[None]
    near = (plain == plain[:, -1:]).long()
    _, expected = _contributions(model, ids, inputs, near)
    _, unchanged = _contributions(model, ids, inputs, plain)
    _, shifted = _contributions(model, ids, inputs, plain + SHIFT)
    _, alone = _contributions(model, ids, inputs, plain, alone=True)  # 8-bit products may depend on the rows beside
    noise = max(_largest_error(shifted, unchanged), _largest_error(alone, unchanged))
    allowed = max(FLOORS * noise, subject.contribution_tolerance(expected[0].dtype))
    if subject.must_show and _largest_error(unchanged, expected) <= allowed:
        return inconclusive("the distances change nothing in any layer, so nothing was shown.")
    errors = [relative_error(*pair) for pair in zip(got, expected, strict=True)]
    largest = max(errors)
    off = f"with all other tokens at distance 1 the output of layer {errors.index(largest)} is off by {largest:.2g}"
    return CheckResult(largest, allowed, f"{off} of its size from the stock layer's, where {allowed:.2g} is allowed.")


def _contributions(
    model: nn.Module, ids: Tensor, inputs: Sequence[Tensor] = (), positions: Tensor | None = None, alone: bool = False
) -> tuple[list[Tensor], list[Tensor]]:
    """What each layer received, and what it added to that at the last token, `[1, width]`, in a forward.

    `inputs` replace what the layers receive. With `alone` the last token has a forward of its own. Other threads may
    run the model meanwhile.
    """
    cache = full_cache(model)
    received = dict[int, Tensor]()
    added = dict[int, Tensor]()

    def before(index: int, layer: nn.Module, args: Any, kwargs: Any) -> Any:
        call = LayerCall.bind(layer, args, kwargs)
        if call.cache is not cache or not inputs:
            return None
        rows = call.hidden.shape[1]
        hidden = inputs[index][:, -1:] if rows == 1 else inputs[index][:, :rows]
        return (hidden,), call.arguments

    def after(index: int, layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        call = LayerCall.bind(layer, args, kwargs)
        if call.cache is cache:
            hidden = output[0] if isinstance(output, tuple) else output
            received[index] = call.hidden.clone()
            added[index] = (hidden - call.hidden)[..., -1, :].reshape(1, -1)

    layers = list(enumerate(decoder_layers(model)))
    end = ids.shape[1]
    spans = (slice(0, end - 1), slice(end - 1, end)) if alone else (slice(0, end),)
    with hooked(layers, before), hooked(layers, after, behind=True):
        for span in spans:
            arguments: dict[str, Tensor] = {}
            if positions is not None:
                arguments["position_ids"] = positions[:, span]
                arguments["attention_mask"] = torch.ones_like(ids[:, : span.stop])
            model(ids[:, span], **cache_argument(model, cache), use_cache=True, **arguments)
    return [received[index] for index, _ in layers], [added[index] for index, _ in layers]


def _largest_error(got: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    return max(relative_error(*pair) for pair in zip(got, expected, strict=True))


def _ids(subject: CheckedModel) -> Tensor:
    return torch.tensor([subject.ids(subject.sequence_tokens, seed=8)], device=input_device(subject.model))


def _forward(model: nn.Module, cache: SequenceCache, ids: Tensor) -> Tensor:
    """Logits of new tokens behind what the cache holds."""
    logits: Tensor = model(ids, **cache_argument(model, cache), use_cache=True).logits
    return logits


def _plain(model: nn.Module, ids: Tensor, start: int) -> tuple[Tensor, Any]:
    """Logits and cache of a stock forward with its first token at position `start`."""
    cache = full_cache(model)
    positions = torch.arange(start, start + ids.shape[1], device=ids.device)[None]
    logits = model(ids, position_ids=positions, **cache_argument(model, cache), use_cache=True).logits
    return logits, cache


def _by_layer(got: Sequence[Any], expected: Sequence[Any]) -> list[Comparison]:
    compared = []
    for index, (layer, other) in enumerate(zip(got, expected, strict=True)):
        compared.append(Comparison(f"the keys of layer {index}", layer.keys, other.keys, index))
        compared.append(Comparison(f"the values of layer {index}", layer.values, other.values, index))
    return compared
