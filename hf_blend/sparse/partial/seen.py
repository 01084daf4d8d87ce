# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Attention over the part of a layer's columns that was loaded: of the block's rows, and of the answer's tokens."""

from typing import Any

import torch
from torch import Tensor, nn

from ...errors import ConfigError
from ...model.attention import ROWS, STOCK, AttentionFn, MadeLines
from ..masks import cut_mask, is_cut


def attend_step(
    layer: Any,
    stock: AttentionFn,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    **kwargs: Any,
) -> Any:
    """Attention of new tokens over the loaded columns of a prompt, and over all columns behind it."""
    keys = key.shape[2]
    if layer.visible is None or keys != layer.length:
        return stock(module, query, key, value, mask, **kwargs)
    name = module.config._attn_implementation
    if not is_cut(mask, name):
        raise ConfigError(f"decoding over a part of the KV needs sdpa or eager attention, not {name!r}.")
    columns = torch.cat([layer.visible, torch.arange(layer.visible_tokens, keys, device=layer.visible.device)])
    cut = cut_mask(mask, columns.expand(key.shape[0], -1), query, keys, name)
    return stock(module, query, key.index_select(2, columns), value.index_select(2, columns), cut, **kwargs)


def attend_part(
    stock: AttentionFn,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    visible: Tensor | None,
    kwargs: dict[str, Any],
) -> Any:
    """Attention of a prompt's rows over the loaded columns; None for all."""
    rows = kwargs.pop(ROWS, None)
    lines = mask if rows is None else rows.plain()
    if visible is not None:
        key = key.index_select(2, visible)
        value = value.index_select(2, visible)
        lines = lines.index_select(-1, visible.to(lines.device))
    if module.config._attn_implementation == STOCK:
        return MadeLines(lines).attend(stock, module, query, key, value, None, **kwargs)
    return stock(module, query, key, value, lines, **kwargs)
