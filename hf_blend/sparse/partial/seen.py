# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Attention over the part of a layer's columns that was loaded: of the block's rows, and of the answer's tokens."""

from typing import Any

import torch
from torch import Tensor, nn

from ...errors import ConfigError
from ...model.attention import STOCK, AttentionFn
from ...model.row_masks import MadeLines, attend
from ..masks import as_taken, is_cut, narrowed


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
    visible, name, rows = layer.visible, module.config._attn_implementation, query.shape[2]
    if visible is None or key.shape[2] != layer.length:
        return stock(module, query, key, value, mask, **kwargs)
    if not is_cut(mask, name):
        raise ConfigError(f"decoding over a part of the KV needs sdpa or eager attention, not {name!r}.")
    if visible.dim() == 3:
        cut = as_taken(hidden_too(mask, visible, query, key), query, name)
        return stock(module, query, key, value, cut, **kwargs)
    columns = torch.cat([visible, torch.arange(int(visible[-1]) + 1, key.shape[2], device=key.device)])
    if mask is not None:
        cut = mask.index_select(-1, columns)
    elif rows == 1:
        cut = None
    else:
        seen = columns <= torch.arange(key.shape[2] - rows, key.shape[2], device=key.device)[:, None]
        cut = as_taken(seen[None, None], query, name)
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
    """Attention of the rows over the loaded columns; `visible` is None for all, else as `BlendLayer.visible`."""
    lines = mask.as_subclass(Tensor)
    if visible is not None and visible.dim() == 3:
        return stock(module, query, key, value, hidden_too(lines, visible, query, key), **kwargs)
    if visible is not None:
        key, value = key.index_select(2, visible), value.index_select(2, visible)
        lines = lines.index_select(-1, visible.to(mask.device))
    if module.config._attn_implementation == STOCK and kwargs.get("softcap") is None and kwargs.get("s_aux") is None:
        output = attend(query, key, value, MadeLines(lines), kwargs.get("dropout", 0.0), kwargs.get("scaling"))
        return output.transpose(1, 2).contiguous(), None
    return stock(module, query, key, value, lines, **kwargs)


def hidden_too(mask: Tensor | None, visible: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """A mask that hides what is not there as well, `[batch, heads or 1, rows, keys]`, of the kind of `mask`.

    Shapes: mask `[batch or 1, heads or 1, rows, keys]`, boolean or additive, None is the causal one of the last rows;
    visible `[batch, kv_heads or 1, keys of the prompt]`; query and key `[batch, heads, rows or keys, head_dim]`.
    """
    rows, keys = query.shape[2], key.shape[2]
    heads = query.shape[1] // key.shape[1] if visible.shape[1] > 1 else 1
    there = nn.functional.pad(visible, (0, keys - visible.shape[2]), value=True)  # so is what came behind the prompt
    lines = there.to(query.device).repeat_interleave(heads, dim=1)[:, :, None]
    if mask is None:
        return lines & torch.ones(rows, keys, dtype=torch.bool, device=query.device).tril(keys - rows)
    return narrowed(mask, lines)
