# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A check of requests that recompute some tokens, against dense forwards in which the others are stale.

The dense forwards know nothing of rows, hooks or masks: the plain model runs all tokens. Either a plain cache puts
stored K and V over what was computed, at the layers behind the check layer. Or, for a model with mixers or indexers,
the hidden states of the tokens that were not chosen are replaced, at the input of each decoder layer behind the check
layer and of the mixer in it, by those which came there when the chunk was run alone behind its prefix. So what others
see of such a token is what its chunk had of it alone; only its position is the prompt's.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache

from .. import plugins
from ..model.anatomy import LayerCall, cache_argument, decoder_layers, full_cache, hooked, input_device
from ..model.checks import BlendedPrefill, CheckResult, check
from ..prompt.pieces import Prompt
from ..selectors.base import KV
from .model_under_test import ModelUnderTest, distance, placed, unchosen

RATIO = 0.3
SELECTORS = ("kv-deviation", "ramp")  # which choose behind a layer, and before the first


@check()
def fused_ratio(subject: ModelUnderTest) -> CheckResult:
    """Below 1 the sparse path equals a dense forward in which tokens not chosen have the stored K and V.

    Alone and in a padded batch; with some tokens chosen, with all but one, where no full prefill can be taken instead,
    and with none, where the question alone is computed.
    """
    trials = [(group, RATIO, selector) for group in (subject.prompts[:1], subject.prompts) for selector in SELECTORS]
    for prompt in subject.prompts:
        chunk_tokens = sum(map(len, prompt.chunks))
        trials.append(([prompt], 1 - 1 / chunk_tokens, "kv-deviation"))
        if not _keeps_more(subject):  # the mixers of a chunk that was run alone end otherwise
            trials.append(([prompt], 0.0, "kv-deviation"))
    errors = [_fused_error(subject, *trial) for trial in trials]
    return CheckResult(max(errors), subject.logit_tolerance)


def _keeps_more(subject: ModelUnderTest) -> bool:
    """Whether a model keeps mixers' or indexers' states beside K and V."""
    return any(subject.mixers) or any(style.beside for style in subject.styles)


@torch.no_grad()
def _fused_error(subject: ModelUnderTest, prompts: Sequence[Prompt], ratio: float, selector: str) -> float:
    """How far a blended forward is from the dense one."""
    if _keeps_more(subject):
        return _stale_error(subject, prompts, ratio, selector)
    got = subject.blend(prompts, ratio, selector=selector)
    last_fresh = _check_layer(got) if ratio else -1
    return distance(got.logits, _dense_logits(subject, got, _Spliced(got, unchosen(got), last_fresh)))


def _dense_logits(subject: ModelUnderTest, got: BlendedPrefill, cache: Cache) -> Tensor:
    """Logits of the questions' rows where the model runs all tokens with another cache."""
    inputs = subject.inputs(subject.cache(0.0), got.prompts)
    logits: Tensor = subject.model(**inputs, **cache_argument(subject.model, cache), use_cache=True).logits
    return logits[:, -got.logits.shape[1] :].float()


class _Spliced(DynamicCache):
    """Puts K and V that a blended request has from its store over those that were computed."""

    def __init__(self, got: BlendedPrefill, slots: Tensor, check_layer: int) -> None:
        super().__init__()
        self._got = got
        self._slots = slots[:, None, :, None]
        self._check_layer = check_layer

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> KV:
        """Append, then put the stored K and V over the tokens that were not chosen."""
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if layer_idx <= self._check_layer:
            return keys, values
        stored = self._got.layers[layer_idx]
        slots = self._slots.to(keys.device)
        return torch.where(slots, stored[0], keys), torch.where(slots, stored[1], values)


@torch.no_grad()
def _stale_error(subject: ModelUnderTest, prompts: Sequence[Prompt], ratio: float, selector: str) -> float:
    """How far a blended forward is from the dense one."""
    got = subject.blend(prompts, ratio, selector=selector)
    alone = _inputs_alone(subject, got)
    slots = unchosen(got).to(input_device(subject.model))
    first = _first_stale_layer(got) + 1

    def swap(index: int, hidden: Tensor) -> Tensor:
        layer = index % subject.num_layers
        if layer < first:
            return hidden
        flat = _by_token(hidden, slots.shape[1])
        return torch.where(slots[..., None], alone[index], flat).view_as(hidden)

    with _inputs(subject, swap):
        expected = _dense_logits(subject, got, full_cache(subject.model))
    return distance(got.logits, expected)


def _check_layer(got: BlendedPrefill) -> int:
    """The last layer whose K and V are all fresh; those of layer 0 are, wherever tokens are chosen."""
    selector: Any = plugins.load("selectors", got.cache.config.selector)
    return got.cache.config.check_layer if selector.needs_kv else 0


def _first_stale_layer(got: BlendedPrefill) -> int:
    """The layer at which tokens were chosen: the first from the check layer on that keeps anything of a token."""
    index = _check_layer(got)
    layers = got.cache.layers
    while getattr(layers[index], "keys", None) is None and not hasattr(layers[index], "recurrent_states"):
        index += 1
    return index


def _inputs_alone(subject: ModelUnderTest, got: BlendedPrefill) -> list[Tensor]:
    """By layer, then by mixer, what came there of the chunks when each was run alone, `[…, batch, tokens, width]`."""
    width = max(len(prompt.ids) for prompt in got.prompts)
    alone = [Tensor()] * (2 * subject.num_layers)

    def record(index: int, hidden: Tensor, row: int, start: int, count: int) -> Tensor:
        flat = _by_token(hidden, len(subject.chunk_prefix_ids) + count)
        if not alone[index].numel():
            shape = (*flat.shape[:-3], len(got.prompts), width, flat.shape[-1])
            alone[index] = flat.new_zeros(shape)
        alone[index][..., row, start : start + count, :] = flat[..., 0, -count:, :]
        return hidden

    for row, prompt in enumerate(got.prompts):
        for start, ids, *_ in prompt.spans:
            first = width - len(prompt.ids) + start
            with _inputs(subject, partial(record, row=row, start=first, count=len(ids))):
                tokens = torch.tensor([[*subject.chunk_prefix_ids, *ids]])
                inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
                subject.model(**placed(subject.model, inputs))
    return alone


def _by_token(hidden: Tensor, tokens: int) -> Tensor:
    """Hidden states `[…, batch, tokens, width]`; streams of each token, `[batch, tokens, streams, width]`, joined."""
    return hidden.flatten(2) if hidden.dim() == 4 and hidden.shape[1] == tokens else hidden


def _inputs(subject: ModelUnderTest, change: Callable[[int, Tensor], Tensor]) -> AbstractContextManager[None]:
    """Change the hidden states that each decoder layer receives, and its mixer, which counts behind all layers."""

    def enter(index: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = LayerCall.bind(layer, args, kwargs)
        return (change(index, call.hidden),), call.arguments

    mixers = [None if mixer is None else mixer.module for mixer in subject.mixers]
    entered = enumerate([*decoder_layers(subject.model), *mixers])
    return hooked([(index, module) for index, module in entered if module is not None], enter)
