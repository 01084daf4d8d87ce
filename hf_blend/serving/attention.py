# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Attention of a step of continuous batching that walks the requests of the step.

With sdpa, transformers attends with the tokens of all requests of a step to the keys of all of them, under one dense
mask, although each request sees its own keys alone. Here each request's rows meet its own keys. The scores that are
computed are then the sum over the requests of rows x keys, and a request that decodes is one row, whose K and V need
not be repeated for each query head. Kernels that take the lengths of the requests, as flash attention does, are left
as they are.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers.generation.continuous_batching.cache import PagedAttentionCache

from ..model.anatomy import LayerInfo, decoder_layers
from ..model.attention import STOCK, hook_attention

__all__ = ["attend_by_request", "walk_requests"]

AttentionFn = Callable[..., tuple[Tensor, Tensor | None]]


def attend_by_request(
    stock: AttentionFn,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    *args: Any,
    cache: PagedAttentionCache,
    cu_seq_lens_q: Tensor,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend with the rows of each request to its own keys, by the stock function.

    The mask of a request is its block of the step's mask. Where the last row sees the first key, the request is
    causal without a window, and one row, or as many rows as keys, need no mask.

    Shapes: query `[1, heads, rows, head_dim]`, key and value `[1, kv_heads, rows, head_dim]`, attention_mask
    `[1, 1, rows, keys]`, cu_seq_lens_q `[requests + 1]` → `[1, rows, heads, head_dim]`.
    """
    key, value = cache.update(key, value, module.layer_idx, kwargs)
    outputs = []
    for start, end, first, last, is_causal in _spans(attention_mask, cu_seq_lens_q, kwargs["cu_seq_lens_k"]):
        mask = None if is_causal else attention_mask[:, :, start:end, first:last]
        states = (query[:, :, start:end], key[:, :, first:last], value[:, :, first:last])
        outputs.append(stock(module, *states, mask, *args, **{**kwargs, "is_causal": is_causal})[0])
    return torch.cat(outputs, dim=1), None


def _spans(mask: Tensor, rows: Tensor, keys: Tensor) -> Sequence[tuple[int, int, int, int, bool]]:
    """Rows and keys of each request, and whether it needs no mask; a device is asked at a step's first layer alone.

    Shapes: mask `[1, 1, rows, keys]`, rows `[requests + 1]`, keys `[requests + 1]`.
    """
    known = vars(mask)  # each step makes a mask of its own for each kind of layer
    if "spans" not in known:
        starts, key_starts = rows.tolist(), keys.tolist()
        is_seen = (mask[0, 0, rows[1:] - 1, keys[:-1]] == 0).tolist()
        bounds = zip(starts, starts[1:], key_starts, key_starts[1:], is_seen, strict=False)
        known["spans"] = [(*one, sees and one[1] - one[0] in (1, one[3] - one[2])) for *one, sees in bounds]
    found: Sequence[tuple[int, int, int, int, bool]] = known["spans"]
    return found


def walk_requests(model: nn.Module) -> list[RemovableHandle]:
    """Let continuous batching of a model attend by requests, until the handles are removed."""

    def choose(given: tuple[Any, ...]) -> AttentionFn | None:
        is_step = any(isinstance(one, PagedAttentionCache) for one in given)
        return attend_by_request if is_step and model.config._attn_implementation == STOCK else None

    return hook_attention((one for layer in decoder_layers(model) for one in LayerInfo.of(layer).attention), choose)
