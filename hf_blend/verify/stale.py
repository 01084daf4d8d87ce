# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A dense forward in which the tokens that a blended request did not choose come from their chunks alone.

It knows nothing of rows, keys, projections or stores: the plain model runs all tokens, and at the input of each
decoder layer behind the check layer, and of the mixer in it, the hidden states of the tokens that were not chosen are
those which came there when the chunk was run alone behind the sink. Whatever a layer makes of a token for others to
look at is then what it made of it there; only its position is the prompt's.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..model.anatomy import LayerCall, decoder_layers, full_cache
from ..prompt.pieces import Prompt
from .floor import device_of, distance, placed
from .slots import unchosen
from .subject import Blended, ModelUnderTest


@torch.no_grad()
def stale_error(subject: ModelUnderTest, prompts: Sequence[Prompt], ratio: float) -> float:
    """How far a blended forward is from the dense one."""
    got = subject.blend(prompts, ratio)
    alone = _inputs_alone(subject, got)
    slots, first = unchosen(got).to(device_of(subject.model)), first_stale_layer(got) + 1

    def replace(index: int, hidden: Tensor) -> Tensor:
        layer = index % subject.num_layers
        flat = _by_token(hidden, slots.shape[1])
        return torch.where(slots[..., None], alone[index], flat).view_as(hidden) if layer >= first else hidden

    with _inputs(subject, replace):
        given = subject.inputs(subject.cache(0.0), prompts)
        wanted = subject.model(**given, past_key_values=full_cache(subject.model), use_cache=True).logits
    return distance(got.asked, wanted[:, -got.asked.shape[1] :].float())


def first_stale_layer(got: Blended) -> int:
    """The layer at which tokens were chosen: the first from the check layer on that keeps anything of a token."""
    asked = got.cache.config.check_layers[0]
    return next(
        index
        for index, layer in enumerate(got.cache.layers)
        if index >= asked and (getattr(layer, "keys", None) is not None or hasattr(layer, "recurrent_states"))
    )


def _inputs_alone(subject: ModelUnderTest, got: Blended) -> list[Tensor]:
    """By layer, then by mixer, what came there of the chunks when each was run alone, `[…, batch, tokens, width]`."""
    width = max(len(prompt.ids) for prompt in got.prompts)
    whole = [Tensor()] * (2 * subject.num_layers)

    def keep(index: int, hidden: Tensor, row: int, start: int, count: int) -> Tensor:
        kept, flat = whole[index], _by_token(hidden, len(subject.chunk_prefix_ids) + count)
        if not kept.numel():
            shape = (*flat.shape[:-3], len(got.prompts), width, flat.shape[-1])
            kept = whole[index] = flat.new_zeros(shape)
        kept[..., row, start : start + count, :] = flat[..., 0, -count:, :]
        return hidden

    for row, prompt in enumerate(got.prompts):
        for start, ids, *_ in prompt.spans():
            place = {"row": row, "start": width - len(prompt.ids) + start, "count": len(ids)}
            with _inputs(subject, partial(keep, **place)):
                tokens = torch.tensor([[*subject.chunk_prefix_ids, *ids]])
                given = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
                subject.model(**placed(subject.model, given))
    return whole


def _by_token(hidden: Tensor, tokens: int) -> Tensor:
    """Hidden states `[…, batch, tokens, width]`; streams of each token, `[batch, tokens, streams, width]`, joined."""
    return hidden.flatten(2) if hidden.dim() == 4 and hidden.shape[1] == tokens else hidden


@contextmanager
def _inputs(subject: ModelUnderTest, change: Callable[[int, Tensor], Tensor]) -> Iterator[None]:
    """Change the hidden states that each decoder layer receives, and its mixer, which counts behind all layers."""

    def enter(index: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = LayerCall.bind(layer, args, kwargs)
        call.arguments[call.hidden_name] = change(index, call.hidden)
        return call.as_hook_result()

    handles = []
    mixers = [None if mixer is None else mixer.module for mixer in subject.mixers]
    try:
        for index, layer in enumerate([*decoder_layers(subject.model), *mixers]):
            if layer is None:
                continue
            hook = lambda one, args, kwargs, index=index: enter(index, one, args, kwargs)  # noqa: E731
            handles.append(layer.register_forward_pre_hook(hook, with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()
