# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Attention over the part of a layer's columns that was loaded: of the block's rows, and of the answer's tokens."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...cache.blend_cache import BlendCache
from ...errors import ConfigError
from ...model.anatomy import LayerInfo, decoder_layers
from ...model.attention import STOCK, AttentionFn, open_door, with_taker
from ...model.row_masks import MadeLines, attend
from ..layout import is_cut


class PartDecoding:
    """Attention over what was loaded, while the answer is decoded."""

    def __init__(self, cache: BlendCache) -> None:
        self._cache = cache
        self._layers: list[Any] = list(cache.layers)

    def begin_layer(self, index: int) -> None:
        """A layer that was loaded in part hands over new K and V: let it, if its attention can be taken."""
        for module in self._attention(index):
            open_door(module.config._attn_implementation)
        self._layers[index].is_guarded = self.can_take(index)

    def can_take(self, index: int) -> bool:
        """Return True if the attention of a layer can be taken: some models look up no function for it."""
        return bool(self._attention(index))

    def _attention(self, index: int) -> Sequence[nn.Module]:
        return LayerInfo.of(decoder_layers(self._cache.model)[index]).attention

    def taken(self, index: int, keys: Tensor) -> Tensor:
        """Keys of a layer whose attention call is then taken, over the columns that are there."""
        return with_taker(keys, partial(self._attend, index))

    def _attend(
        self,
        index: int,
        stock: AttentionFn,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Any,
        **given: Any,
    ) -> Any:
        part = self.select_kv(index, query, key, value, mask, module.config._attn_implementation, given.get("scaling"))
        return stock(module, query, *(part or (key, value, mask)), **given)

    def select_kv(
        self, index: int, query: Tensor, key: Tensor, value: Tensor, mask: Any, name: str, scaling: float | None
    ) -> Any:
        """K, V and mask of the columns that are there, and of all behind the prompt."""
        layer = self._layers[index]
        visible = getattr(layer, "visible", None)
        if visible is None or key.shape[2] != layer.length:
            return None
        if not is_cut(mask, name):
            raise ConfigError(f"decoding over a part of the KV needs sdpa or eager attention, not {name!r}.")
        if visible.dim() == 3:
            cut = hidden_too(mask, _with_new(visible, key.shape[2]), query, key)
            return key, value, cut if name == "sdpa" or cut.dtype != torch.bool else _added(cut, query)
        prompt = int(visible[-1]) + 1
        columns = torch.cat([visible, torch.arange(prompt, key.shape[2], device=key.device)])
        rows = query.shape[2]
        seen = columns <= torch.arange(key.shape[2] - rows, key.shape[2], device=key.device)[:, None]
        cut = None if mask is None and rows == 1 else seen[None, None]
        if mask is not None:
            part = mask.index_select(-1, columns)
            cut = part & seen if part.dtype == torch.bool else part
        elif cut is not None and name != "sdpa":
            cut = _added(cut, query)
        return key.index_select(2, columns), value.index_select(2, columns), cut


def attend_part(
    stock: AttentionFn,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    visible: Tensor | None,
    given: dict[str, Any],
) -> Any:
    """Attention of the rows over what is there; `visible` is None for all, else as `BlendLayer.visible`."""
    part = mask.as_subclass(Tensor)
    if visible is not None and visible.dim() == 3:
        part = hidden_too(part, _with_new(visible, key.shape[2]), query, key)
        return stock(module, query, key, value, part, **given)
    if visible is not None:
        key, value = key.index_select(2, visible), value.index_select(2, visible)
        part = part.index_select(-1, visible.to(mask.device))
    if module.config._attn_implementation == STOCK and given.get("softcap") is None and given.get("s_aux") is None:
        output = attend(query, key, value, MadeLines(part), given.get("dropout", 0.0), given.get("scaling"))
        return output.transpose(1, 2).contiguous(), None
    return stock(module, query, key, value, part, **given)


def hidden_too(mask: Tensor | None, visible: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """A mask that hides what is not there as well, `[batch, heads or 1, rows, keys]`, of the kind of `mask`.

    Shapes: mask `[batch or 1, heads or 1, rows, keys]`, boolean or additive, None is the causal one of the last rows;
    visible `[batch, kv_heads or 1, keys]`; query and key `[batch, heads, rows or keys, head_dim]`.
    """
    heads = query.shape[1] // key.shape[1] if visible.shape[1] > 1 else 1
    lines = visible.to(query.device).repeat_interleave(heads, dim=1)[:, :, None]
    if mask is None:
        rows, keys = query.shape[2], key.shape[2]
        return lines & torch.ones(rows, keys, dtype=torch.bool, device=query.device).tril(keys - rows)
    return mask & lines if mask.dtype == torch.bool else mask.masked_fill(~lines, torch.finfo(mask.dtype).min)


def _added(mask: Tensor, query: Tensor) -> Tensor:
    """A boolean mask as it is added to the scores."""
    zeros = torch.zeros(mask.shape, dtype=query.dtype, device=query.device)
    return zeros.masked_fill_(~mask, torch.finfo(query.dtype).min)


def _with_new(visible: Tensor, keys: int) -> Tensor:
    """`[batch, kv_heads or 1, keys]`: what came behind the prompt is there."""
    return nn.functional.pad(visible, (0, keys - visible.shape[2]), value=True)
