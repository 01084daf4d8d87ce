# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Attention over the part of a layer's columns that was loaded: of the block's rows, and of the answer's tokens."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...cache.blend_cache import BlendCache
from ...errors import ConfigError
from ...model.anatomy import decoder_layers
from ...model.attention import Glance
from ...model.row_attention import attend
from ...model.row_lines import MadeLines
from ..decoding import stock_attention
from ..looking import is_cut


class PartDecoding:
    """What a `Door` asks of its guest while the answer is decoded.

    Args:
        cache: of the request; a layer that was loaded in part holds the columns that are there in `visible`.
    """

    def __init__(self, cache: BlendCache) -> None:
        self._cache = cache
        self._layers: list[Any] = list(cache.layers)
        self._glances: dict[int, Glance] = {}

    def take_step(self, index: int) -> None:
        """Take a layer's next attention call, over the columns that are there; nothing stays in the model behind it.

        Args:
            index: of a layer that was loaded in part and hands over new K and V now.
        """
        if index not in self._glances:
            self._glances[index] = Glance(decoder_layers(self._cache.model)[index], partial(self._attend, index))
        self._layers[index].is_guarded = self._glances[index].open()

    def _attend(
        self, index: int, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **given: Any
    ) -> Any:
        name = module.config._attn_implementation
        few = self.few(index, query, key, value, mask, name, given.get("scaling"))
        return stock_attention(module, name)(module, query, *(few or (key, value, mask)), **given)

    def owns(self, cache: Any) -> bool:
        """Whether a forward is one of this request."""
        return cache is self._cache

    def begin_step(self, tokens: int) -> bool:
        """Whether a forward looks at a part only."""
        parts = [getattr(one, "visible", None) for one in self._cache.layers]
        return not self._cache.is_expecting and any(one is not None for one in parts)

    def end(self, failed: bool) -> None:
        """The forward is over."""

    def few(
        self, index: int, query: Tensor, key: Tensor, value: Tensor, mask: Any, name: str, scaling: float | None
    ) -> Any:
        """K, V and mask of the columns that are there, and of all behind the prompt."""
        layer = self._layers[index]
        visible = getattr(layer, "visible", None)
        if visible is None or key.shape[2] != layer.length:
            return None
        if not is_cut(mask, name):
            raise ConfigError(f"decoding over a part of the KV needs sdpa or eager attention, not {name!r}.")
        prompt = int(visible[-1]) + 1
        columns = torch.cat([visible, torch.arange(prompt, key.shape[2], device=key.device)])
        rows = query.shape[2]
        seen = columns <= torch.arange(key.shape[2] - rows, key.shape[2], device=key.device)[:, None]
        cut = None if mask is None and rows == 1 else seen[None, None]
        if mask is not None:
            part = mask.index_select(-1, columns)
            cut = part & seen if part.dtype == torch.bool else part
        elif cut is not None and name != "sdpa":
            zeros = torch.zeros(cut.shape, dtype=query.dtype, device=query.device)
            cut = zeros.masked_fill(~cut, torch.finfo(query.dtype).min)
        return key.index_select(2, columns), value.index_select(2, columns), cut


def attend_part(
    attention: nn.Module,
    layer: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    visible: Tensor | None,
    given: dict[str, Any],
) -> Any:
    """Attention of the rows over the columns that are there; `visible` is None for all."""
    part = mask.as_subclass(Tensor)
    if visible is not None:
        key, value = key.index_select(2, visible), value.index_select(2, visible)
        part = part.index_select(-1, visible.to(mask.device))
    name = attention.config._attn_implementation
    if name == "sdpa" and given.get("softcap") is None and given.get("s_aux") is None:
        output = attend(query, key, value, MadeLines(part), given.get("dropout", 0.0), given.get("scaling"))
        return output.transpose(1, 2).contiguous(), None
    return stock_attention(attention, name)(attention, query, key, value, part, **given)
