# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What moved keys and grouped positions must equal: forwards of the stock model at the positions in question.

Nothing here knows how keys are moved or how far tokens are grouped: the expected side is computed by the model alone.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..model.anatomy import LayerCall, decoder_layers
from ..model.placement import input_device

if TYPE_CHECKING:
    from .sequence_cache import SequenceCache

ELSEWHERE = 37  # positions, not a multiple of a head's width
Layers = Sequence[tuple[Tensor, Tensor]]  # (K, V) of each layer, `[1, kv_heads, tokens, width]`


@dataclass(frozen=True)
class Comparison:
    """One tensor beside what it must equal."""

    name: str
    got: Tensor
    expected: Tensor


@dataclass(frozen=True)
class FarRow:
    """What a layer adds to the last token, all others being at distance 1: `[1, width]` each."""

    layer: int
    got: Tensor
    expected: Tensor
    plain: Tensor
    again: Tensor


@torch.no_grad()
def whole_shift(model: nn.Module, cache: "SequenceCache", ids: Tensor, held: int, delta: int) -> list[Comparison]:
    """Prefill, shift the whole sequence, go on: as a plain forward at the shifted positions.

    Shapes: ids `[1, tokens]`.
    """
    ids = ids.to(input_device(model))
    with cache:
        model(ids[:, :held], past_key_values=cache, use_cache=True)
        cache.shift(cache.active, 0, None, delta)
        logits = model(ids[:, held:], past_key_values=cache, use_cache=True).logits
    expected, layers = _plain(model, ids, delta)
    return [*_layer_by_layer(_kv(cache.shown()), layers), Comparison("the logits", logits, expected[:, held:])]


@torch.no_grad()
def closed_hole(model: nn.Module, cache: "SequenceCache", ids: Tensor, start: int, stop: int) -> list[Comparison]:
    """Remove tokens and close up: layer 0, which does not depend on context, is as for the shortened prompt.

    Shapes: ids `[1, tokens]`.
    """
    first = cache.positions()[0]
    cache.remove(cache.active, first + start, first + stop)
    cache.shift(cache.active, first + stop, None, start - stop)
    shortened = torch.cat([ids[:, :start], ids[:, stop:]], dim=1).to(input_device(model))
    return _layer_by_layer(_kv(cache.shown()[:1]), _plain(model, shortened, first)[1][:1])


@torch.no_grad()
def shared_cells(
    model: nn.Module, cache: "SequenceCache", ids: Tensor, held: int, lengths: Sequence[int]
) -> list[Comparison]:
    """Fork a sequence, shorten the copies, and go on with all of them at once: as a plain forward of each.

    Shapes: ids `[1, tokens]`.
    """
    ids = ids.to(input_device(model))
    more = [ids[0, held + place :][: ids.shape[1] - held - len(lengths)] for place in range(len(lengths))]
    new = torch.stack(more)
    with cache:
        model(ids[:, :held], past_key_values=cache, use_cache=True)
        for number, length in zip(cache.fork(len(lengths)), lengths, strict=True):
            cache.remove(number, length)
        parts = [model(part, past_key_values=cache, use_cache=True).logits for part in (new[:, :-1], new[:, -1:])]
    logits, found = torch.cat(parts, 1), []
    for place, length in enumerate(lengths):
        expected, _ = _plain(model, torch.cat([ids[:, :length], new[[place]]], 1), 0)
        found.append(Comparison(f"the logits of sequence {place}", logits[[place]], expected[:, length:]))
    return found


@torch.no_grad()
def far_rows(model: nn.Module, ids: Tensor, block: Callable[[], AbstractContextManager[Any]]) -> list[FarRow]:
    """Run every layer with window 1 and one group for all: the last token has all others at distance 1.

    The stock layer gives the same if it is called at positions 0, 0, … 0, 1. Each layer is compared by itself: the
    stock layers receive the inputs that those inside the block received.

    Shapes: ids `[1, tokens]`.
    """
    ids = ids.to(input_device(model))
    tokens = ids.shape[1]
    with block():
        got = _contributions(model, ids, None, None)
    inputs = [entered for entered, _ in got]
    near = torch.zeros((1, tokens), dtype=torch.long, device=ids.device)
    near[:, -1] = 1
    expected = _contributions(model, ids, near, inputs)
    places = torch.arange(tokens, device=ids.device)[None]
    plain, again = (_contributions(model, ids, at, inputs) for at in (places, places + ELSEWHERE))
    runs = zip(got, expected, plain, again, strict=True)
    return [FarRow(layer, *(added[..., -1, :].reshape(1, -1) for _, added in run)) for layer, run in enumerate(runs)]


def _contributions(
    model: nn.Module, ids: Tensor, positions: Tensor | None, inputs: Sequence[Tensor] | None
) -> list[tuple[Tensor, Tensor]]:
    """What each layer received and what it added to that, in a forward of which `inputs` replaces what it receives."""
    from transformers import DynamicCache

    cache = DynamicCache()
    given = {} if positions is None else {"position_ids": positions, "attention_mask": torch.ones_like(ids)}
    with _watched(model, cache, inputs) as seen:
        model(ids, past_key_values=cache, use_cache=True, **given)
    return [seen[layer] for layer in range(len(decoder_layers(model)))]


@contextmanager
def _watched(
    model: nn.Module, cache: Any, inputs: Sequence[Tensor] | None
) -> Iterator[dict[int, tuple[Tensor, Tensor]]]:
    """Record, and replace, what layers receive in calls with a cache; other threads may run the model meanwhile."""
    seen: dict[int, tuple[Tensor, Tensor]] = {}

    def bound(layer: nn.Module, args: Any, kwargs: Any) -> LayerCall | None:
        call = LayerCall.bind(layer, args, kwargs)
        return call if any(value is cache for value in call.arguments.values()) else None

    def before(index: int) -> Callable[..., Any]:
        def hook(layer: nn.Module, args: Any, kwargs: Any) -> Any:
            call = bound(layer, args, kwargs)
            if call is None or inputs is None:
                return None
            call.arguments[call.hidden_name] = inputs[index]
            return call.as_hook_result()

        return hook

    def after(index: int) -> Callable[..., None]:
        def hook(layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            call = bound(layer, args, kwargs)
            if call is not None:
                left = output[0] if isinstance(output, tuple) else output
                seen[index] = call.hidden.clone(), left - call.hidden

        return hook

    handles = []
    try:
        for index, layer in enumerate(decoder_layers(model)):
            handles.append(layer.register_forward_pre_hook(before(index), with_kwargs=True))
            handles.append(layer.register_forward_hook(after(index), with_kwargs=True))
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _plain(model: nn.Module, ids: Tensor, start: int) -> tuple[Tensor, Layers]:
    """Logits, K and V of a stock forward with its first token at position `start`."""
    from transformers import DynamicCache

    cache = DynamicCache()  # without a config no layer forgets what lies outside its window
    positions = torch.arange(start, start + ids.shape[1], device=ids.device)[None]
    logits = model(ids, position_ids=positions, past_key_values=cache, use_cache=True).logits
    return logits, _kv(cache.layers)


def _kv(layers: Sequence[Any]) -> Layers:
    return [(layer.keys, layer.values) for layer in layers]


def _layer_by_layer(got: Layers, expected: Layers) -> list[Comparison]:
    return [
        Comparison(f"the {part} of layer {index}", one, other)
        for index, pairs in enumerate(zip(got, expected, strict=True))
        for part, one, other in zip(("keys", "values"), *pairs, strict=True)
    ]
