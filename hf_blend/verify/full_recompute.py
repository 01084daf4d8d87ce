# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Checks of recomputed tokens: with every one recomputed a request is a full prefill; with some, a dense one.

The dense forwards know nothing of rows, hooks or masks: the plain model runs all tokens. Either a plain cache puts
stored K and V over what was computed, at the layers behind the check layer. Or, for a model with mixers or indexers,
the hidden states of the tokens that were not chosen are, at the input of each decoder layer behind the check layer and
of the mixer in it, those which came there when the chunk was run alone behind its prefix: whatever a layer makes of a
token for others to look at is then what it made of it there; only its position is the prompt's.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from .. import plugins
from ..model.anatomy import LayerCall, decoder_layers, full_cache
from ..model.cache_keyword import cache_argument
from ..model.checks import Blended, CheckResult, check, nothing_shown
from ..model.hooks import hooked
from ..model.placement import input_device
from ..prompt.pieces import Prompt
from ..selectors.base import KV
from ..store import ChunkStore
from ..store.chunk import ChunkKV
from .model_under_test import ModelUnderTest, distance, placed, states_apart, unchosen

RATIO = 0.3
NEW_TOKENS = 8


@check()
def ratio_1_batch(subject: ModelUnderTest) -> CheckResult:
    """Ratio 1.0 of three requests side by side, padded on the left, gives the logits of their full prefill."""
    got = subject.blend(subject.prompts, 1.0)
    if not all(got.cache.report.chosen_columns):
        return nothing_shown(f"the sparse path was not taken: {got.cache.report}")
    return subject.compare_with_plain(subject.prompts, got.logits)


@check()
def ratio_1_states(subject: ModelUnderTest) -> CheckResult:
    """Ratio 1.0 leaves the K and V of a full prefill in the cache, at every layer and token, in a padded batch too."""
    got, errors = subject.blend(subject.prompts, 1.0), []
    for row, run in enumerate(subject.plain(subject.prompts)):
        mine = [tuple(states[row, :, -len(run.logits) :] for states in layer) for layer in got.layers]
        errors.append(states_apart(mine, run.layers))
    return CheckResult(max(errors), max(subject.floor.states, subject.logit_tolerance))


@check()
def ratio_1_ignores_store(subject: ModelUnderTest) -> CheckResult:
    """Ratio 1.0 does not depend on what is stored: garbage behind layer 0 changes no logit beyond noise.

    Every stored K and V is overwritten by a fresh one before anything attends to it.
    """
    prompt, store = subject.prompts[0], ChunkStore.open("memory://")
    for ids in prompt.chunks:
        store.put(_garbage(subject.chunk(ids)))
    got = subject.blend([prompt], 1.0, store)
    if got.cache.report.loaded_chunks < len(prompt.chunks):
        return nothing_shown("the garbage was not read, so nothing was shown")
    return subject.compare_with_plain([prompt], got.logits)


@check()
def ratio_1_text(subject: ModelUnderTest) -> CheckResult:
    """Ratio 1.0 writes the same greedy text as plain generate, alone and in a batch padded on the left.

    Where a token differs, the error is by how much plain generate preferred its own; ties within noise may fall, and
    each of two logits may be off by the tolerance.
    """
    groups = [*([prompt] for prompt in subject.prompts), subject.prompts]
    return CheckResult(max(_preference(subject, group) for group in groups), 2 * subject.logit_tolerance)


@check()
def all_but_one(subject: ModelUnderTest) -> CheckResult:
    """With every reusable token but one recomputed, the sparse path equals a dense forward in which that one is stale.

    For each request alone, at ratio 1 - 1/n: the sparse path cannot fall back to a full prefill.
    """
    ratios = [(prompt, 1 - 1 / sum(map(len, prompt.chunks))) for prompt in subject.prompts]
    errors = [_fused_error(subject, [prompt], ratio) for prompt, ratio in ratios]
    return CheckResult(max(errors), subject.logit_tolerance)


@check()
def fused_ratio(subject: ModelUnderTest) -> CheckResult:
    """Between 0 and 1 the sparse path equals a dense forward in which tokens not chosen have the stored K and V."""
    groups = [subject.prompts[:1], subject.prompts]
    selectors = ["kv-deviation", "ramp"]  # which choose behind a layer, and before the first
    errors = [_fused_error(subject, group, RATIO, selector) for group in groups for selector in selectors]
    return CheckResult(max(errors), subject.logit_tolerance)


def _garbage(chunk: ChunkKV) -> ChunkKV:
    """The same chunk with large random K and V at every layer but 0, where a guard would notice."""
    generator = torch.Generator().manual_seed(0)
    spoilt = [
        tuple((10 * torch.randn(states.shape, generator=generator)).to(states) for states in layer)
        for layer in chunk.layers[1:]
    ]
    return replace(chunk, layers=(chunk.layers[0], *spoilt))


@torch.no_grad()
def _preference(subject: ModelUnderTest, prompts: Sequence[Prompt]) -> float:
    cache = subject.cache(1.0)
    inputs = subject.inputs(cache, prompts)
    inputs.pop("position_ids")
    settings: dict[str, Any] = {
        "max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0,
    }  # fmt: skip
    model, start = subject.model, inputs["input_ids"].shape[1]
    plain = model.generate(**inputs, **settings, output_scores=True, return_dict_in_generate=True)
    mine = model.generate(**inputs, **settings, **cache_argument(model, cache))[:, start:]
    gaps = [0.0]
    for row, (ours, theirs) in enumerate(zip(mine.tolist(), plain.sequences[:, start:].tolist(), strict=True)):
        step = next((step for step, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]), None)
        if step is not None:
            scores = plain.scores[step][row].float()
            gaps.append(float(scores[theirs[step]] - scores[ours[step]]))
    return max(gaps)


@torch.no_grad()
def _fused_error(
    subject: ModelUnderTest, prompts: Sequence[Prompt], ratio: float, selector: str = "kv-deviation"
) -> float:
    """How far a blended forward is from the dense one."""
    if any(subject.mixers) or any(style.beside for style in subject.styles):
        return _stale_error(subject, prompts, ratio, selector)
    got = subject.blend(prompts, ratio, selector=selector)
    dense = _Spliced(got, unchosen(got), _check_layer(got))
    expected = subject.model(
        **subject.inputs(subject.cache(0.0), prompts), **cache_argument(subject.model, dense), use_cache=True
    ).logits
    return distance(got.logits, expected[:, -got.logits.shape[1] :].float())


class _Spliced(DynamicCache):
    """Puts K and V that a blended request has from its store over those that were computed."""

    def __init__(self, got: Blended, slots: Tensor, check_layer: int) -> None:
        super().__init__()
        self._got, self._slots, self._check_layer = got, slots[:, None, :, None], check_layer

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
    slots, first = unchosen(got).to(input_device(subject.model)), _first_stale_layer(got) + 1

    def swap(index: int, hidden: Tensor) -> Tensor:
        layer = index % subject.num_layers
        flat = _by_token(hidden, slots.shape[1])
        return torch.where(slots[..., None], alone[index], flat).view_as(hidden) if layer >= first else hidden

    with _inputs(subject, swap):
        inputs = subject.inputs(subject.cache(0.0), prompts)
        expected = subject.model(
            **inputs, **cache_argument(subject.model, full_cache(subject.model)), use_cache=True
        ).logits
    return distance(got.logits, expected[:, -got.logits.shape[1] :].float())


def _check_layer(got: Blended) -> int:
    """The last layer whose K and V are all fresh; those of layer 0 are, wherever tokens are chosen."""
    selector: Any = plugins.load("selectors", got.cache.config.selector)
    return got.cache.config.check_layers[0] if selector.needs_kv else 0


def _first_stale_layer(got: Blended) -> int:
    """The layer at which tokens were chosen: the first from the check layer on that keeps anything of a token."""
    first = _check_layer(got)
    return next(
        index
        for index, layer in enumerate(got.cache.layers)
        if index >= first and (getattr(layer, "keys", None) is not None or hasattr(layer, "recurrent_states"))
    )


def _inputs_alone(subject: ModelUnderTest, got: Blended) -> list[Tensor]:
    """By layer, then by mixer, what came there of the chunks when each was run alone, `[…, batch, tokens, width]`."""
    width = max(len(prompt.ids) for prompt in got.prompts)
    alone = [Tensor()] * (2 * subject.num_layers)

    def record(index: int, hidden: Tensor, row: int, start: int, count: int) -> Tensor:
        states, flat = alone[index], _by_token(hidden, len(subject.chunk_prefix_ids) + count)
        if not states.numel():
            shape = (*flat.shape[:-3], len(got.prompts), width, flat.shape[-1])
            states = alone[index] = flat.new_zeros(shape)
        states[..., row, start : start + count, :] = flat[..., 0, -count:, :]
        return hidden

    for row, prompt in enumerate(got.prompts):
        for start, ids, *_ in prompt.spans():
            position = {"row": row, "start": width - len(prompt.ids) + start, "count": len(ids)}
            with _inputs(subject, partial(record, **position)):
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
