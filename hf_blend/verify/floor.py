# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The floor: how far two full prefills of one model differ that are equal on paper.

A blended prefill adds up the same numbers in another order, so it can be no nearer to a plain one than plain ones are
to each other. Every prompt is run whole and alone, and again in each of these ways, none of our code in the model:

    other attention   eager in place of sdpa, or the other way round; alone and side by side
    other kernel      torch's plain attention kernel in place of its fused one; alone and side by side
    pieces            in 2, 3 and 7 pieces, each continuing the cache of those before
    batch             side by side with the other prompts, padded on the left

The floor is the largest difference over all ways, prompts and rows: more rows than any claim of the ladder looks at.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..model.anatomy import full_cache, text_config
from ..model.placement import input_device
from ..prompt.pieces import Prompt, batch

PIECES = (2, 3, 7)
States = tuple[Tensor, ...]  # (K, V) of a layer, or () where it keeps none


@dataclass(frozen=True)
class PrefillLogits:
    """What one forward gave for one prompt."""

    logits: Tensor
    layers: tuple[States, ...]


@dataclass(frozen=True)
class Floor:
    """Largest absolute differences between full prefills."""

    logits: float
    layer_0: float
    states: float


def measure_floor(model: nn.Module, prompts: Sequence[Prompt]) -> Floor:
    """Run the prompts plainly in several ways and compare."""
    wanted = [prefill(model, [prompt])[0] for prompt in prompts]
    ways = [prefill(model, prompts), *(in_pieces(model, prompts, count) for count in PIECES)]
    with sdpa_kernel(SDPBackend.MATH):
        ways += [[prefill(model, [prompt])[0] for prompt in prompts], prefill(model, prompts)]
    other = "eager" if attention_of(model) != "eager" else "sdpa"
    if other in attentions(model):
        with attending(model, other):
            ways += [[prefill(model, [prompt])[0] for prompt in prompts], prefill(model, prompts)]
    pairs = [(one, other) for way in ways for one, other in zip(wanted, way, strict=True)]
    return Floor(
        max(distance(one.logits, other.logits) for one, other in pairs),
        max(_apart(one.layers[:1], other.layers[:1]) for one, other in pairs),
        max(_apart(one.layers, other.layers) for one, other in pairs),
    )


@torch.no_grad()
def prefill(model: nn.Module, prompts: Sequence[Prompt]) -> list[PrefillLogits]:
    """Run prompts side by side through the plain model."""
    built = batch(prompts, 0)
    cache = full_cache(model)
    given = placed(model, {"input_ids": built.input_ids, "attention_mask": built.attention_mask})
    logits = model(**given, past_key_values=cache, use_cache=True).logits.float()
    return [_cut(logits, cache, row, len(prompt.ids)) for row, prompt in enumerate(prompts)]


@torch.no_grad()
def in_pieces(model: nn.Module, prompts: Sequence[Prompt], count: int) -> list[PrefillLogits]:
    """Run each prompt alone, in pieces that continue each other's cache."""
    done = []
    for prompt in prompts:
        cache, logits = full_cache(model), []
        for piece in torch.tensor([prompt.ids], device=device_of(model)).tensor_split(count, dim=1):
            logits.append(model(piece, past_key_values=cache, use_cache=True).logits.float())
        done.append(_cut(torch.cat(logits, dim=1), cache, 0, len(prompt.ids)))
    return done


def placed(model: nn.Module, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Inputs on the model's device, with the positions that `generate` would give to a padded batch.

    Shapes: inputs `[batch, tokens]`.
    """
    inputs = {name: value.to(device_of(model)) for name, value in inputs.items()}
    return {**inputs, "position_ids": (inputs["attention_mask"].cumsum(-1) - 1).clamp_min(0)}


def device_of(model: nn.Module) -> torch.device:
    """Where the model takes its ids."""
    return input_device(model)


def attention_of(model: nn.Module) -> str:
    """The attention implementation that the model uses."""
    return text_config(model)._attn_implementation or "eager"


def attentions(model: nn.Module) -> list[str]:
    """Those of eager and sdpa that the model can use."""
    return ["eager", "sdpa"] if getattr(model, "_supports_sdpa", True) else ["eager"]


@contextmanager
def attending(model: nn.Module, implementation: str) -> Iterator[None]:
    """Let the model use another attention implementation for a while."""
    before = attention_of(model)
    model.set_attn_implementation(implementation)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def kv_of(cache: Any) -> list[States]:
    """(K, V) of each layer of a cache, `[batch, kv_heads, tokens, head_dim]`, not copied; () where it has none."""
    keys = [getattr(layer, "keys", None) for layer in cache.layers]
    return [() if one is None else (one, layer.values) for one, layer in zip(keys, cache.layers, strict=True)]


def distance(one: Tensor, other: Tensor) -> float:
    """Largest absolute difference of two tensors of one shape; NaN counts as infinite."""
    if one.shape != other.shape:
        return float("inf")
    if not one.numel():
        return 0.0
    largest = float((one.float() - other.float()).abs().amax())
    return largest if largest == largest else float("inf")


def _apart(one: Sequence[States], other: Sequence[States]) -> float:
    pairs = (pair for layers in zip(one, other, strict=True) for pair in zip(*layers, strict=True))
    return max((distance(*pair) for pair in pairs), default=0.0)


def _cut(logits: Tensor, cache: Any, row: int, tokens: int) -> PrefillLogits:
    layers = tuple(tuple(states[row, :, -tokens:] for states in layer) for layer in kv_of(cache))
    return PrefillLogits(logits[row, -tokens:], layers)
