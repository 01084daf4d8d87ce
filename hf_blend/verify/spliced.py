# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A dense forward in which the slots that a blended request did not choose hold the stored K and V.

It knows nothing of rows, hooks or masks: the plain model runs all tokens with a plain cache that lays stored K and V
over what was computed, at the layers behind the check layer. A model with mixers or indexers is compared as
`stale` says.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from ..prompt.pieces import Prompt
from ..selectors.base import KV
from .floor import distance
from .slots import unchosen
from .stale import stale_error
from .subject import Blended, ModelUnderTest


@torch.no_grad()
def fused_error(subject: ModelUnderTest, prompts: Sequence[Prompt], ratio: float) -> float:
    """How far a blended forward is from the dense one."""
    if any(subject.mixers) or any(style.beside for style in subject.styles):
        return stale_error(subject, prompts, ratio)
    got = subject.blend(prompts, ratio)
    dense = _Spliced(got, unchosen(got), got.cache.config.check_layers[0])
    wanted = subject.model(**subject.inputs(subject.cache(0.0), prompts), past_key_values=dense, use_cache=True).logits
    return distance(got.asked, wanted[:, -got.asked.shape[1] :].float())


class _Spliced(DynamicCache):
    """Lays K and V that a blended request kept from its store over those that were computed."""

    def __init__(self, got: Blended, slots: Tensor, check_layer: int) -> None:
        super().__init__()
        self._got, self._slots, self._check_layer = got, slots[:, None, :, None], check_layer

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> KV:
        """Append, then lay the stored K and V over the slots that were not chosen."""
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if layer_idx <= self._check_layer:
            return keys, values
        stored = self._got.layers[layer_idx]
        slots = self._slots.to(keys.device)
        return torch.where(slots, stored[0], keys), torch.where(slots, stored[1], values)
