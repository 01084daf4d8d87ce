# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Attention of a step of continuous batching, request by request.

With sdpa, transformers attends with the tokens of all requests of a step to the keys of all of them, under one dense
mask. Here the rows of a request attend to its own keys. A request that decodes is one row, for which K and V need not
be repeated for each query head. Kernels that take the lengths of the requests are left alone, such as flash attention.

On a CPU, copying K and V out of the blocks is half of a decoding step. There a row attends to them in place: in a
`BlendedPagedCache` those of consecutive blocks are a slice.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.hooks import RemovableHandle
from transformers.generation.continuous_batching.cache import PagedAttentionCache

from ..model.anatomy import LayerInfo, decoder_layers
from ..model.attention import OVERRIDE, STOCK, register_attention
from .paged import BlendedPagedCache

__all__ = ["attend_by_request", "walk_requests"]

AttentionFn = Callable[..., tuple[Tensor, Tensor | None]]
_Span = tuple[slice, slice, bool, list[slice]]  # rows, keys, whether causal, and slices of K to attend to in place

MOST_SLICES = 12  # of a request's K to attend to in place; for more, a copy costs as much
SPECIAL = ("position_bias", "softcap", "s_aux")  # of attention; the stock function knows or refuses them
ROWS = 4  # of a matrix product: a CPU multiplies 2 or 3 more slowly


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
    """Attend with the rows of each request to its own keys: in place, or to a copy by the stock function.

    The mask of a request is its block of the step's mask. If the last row sees the first key, the request is causal
    without a window; then one row, or as many rows as keys, need no mask.

    Shapes: query `[1, heads, rows, head_dim]`, key and value `[1, kv_heads, rows, head_dim]`, attention_mask
    `[1, 1, rows, keys]`, cu_seq_lens_q `[requests + 1]` → `[1, rows, heads, head_dim]`.
    """
    reads, lengths, blocks = None, kwargs["cu_seq_lens_k"], (key, value)
    is_plain = all(kwargs.get(name) is None for name in SPECIAL) and query.dtype == torch.float32
    if isinstance(cache, BlendedPagedCache) and query.device.type == "cpu" and is_plain:
        reads, lengths, blocks = kwargs["read_index"][0], lengths["full_attention"], cache.rows(module.layer_idx)
        copied = [
            reads[keys] for _, keys, _, slices in _spans(attention_mask, cu_seq_lens_q, lengths, reads) if not slices
        ]
        kwargs["read_index"] = [torch.cat([reads[:0], *copied])]
    key, value = cache.update(key, value, module.layer_idx, kwargs)
    outputs, at = [], 0
    for rows, keys, is_causal, slices in _spans(attention_mask, cu_seq_lens_q, kwargs["cu_seq_lens_k"], reads):
        if slices:
            outputs.append(_attend_in_place(query[:, :, rows], blocks, slices, kwargs.get("scaling")))
            continue
        own = slice(at, at := at + keys.stop - keys.start)
        states = (query[:, :, rows], key[:, :, own], value[:, :, own])
        mask = None if is_causal else attention_mask[:, :, rows, keys]
        outputs.append(stock(module, *states, mask, *args, **{**kwargs, "is_causal": is_causal})[0])
    return torch.cat(outputs, dim=1), None


def _attend_in_place(
    query: Tensor, blocks: tuple[Tensor, Tensor], slices: Sequence[slice], scaling: float | None
) -> Tensor:
    """Attend with one row to K and V in slices of the blocks.

    Shapes: query `[1, heads, 1, head_dim]`, blocks `[rows, kv_heads, head_dim]` each → `[1, 1, heads, head_dim]`.
    """
    keys, values = ([block[span].transpose(0, 1) for span in slices] for block in blocks)
    rows = query.view(len(keys[0]), -1, query.shape[3]) * (query.shape[3] ** -0.5 if scaling is None else scaling)
    padded = functional.pad(rows, (0, 0, 0, -rows.shape[1] % ROWS))
    shares = torch.cat([padded @ key.mT for key in keys], dim=2).softmax(dim=2)
    parts = zip(shares.split([value.shape[1] for value in values], dim=2), values, strict=True)
    output: Tensor = sum(share @ value for share, value in parts)
    return output[:, : rows.shape[1]].reshape(1, 1, -1, query.shape[3])


def _spans(mask: Tensor, rows: Tensor, keys: Tensor, reads: Tensor | None) -> list[_Span]:
    """Find the rows and keys of each request; only a step's first layer waits for the device.

    Shapes: mask `[1, 1, rows, keys]`, rows `[requests + 1]`, keys `[requests + 1]`, reads `[keys]`.
    """
    fields = vars(mask)  # each step makes a mask of its own for each kind of layer
    if "spans" not in fields:
        fields["spans"], ends, key_ends = [], rows.tolist(), keys.tolist()
        is_seen = (mask[0, 0, rows[1:] - 1, keys[:-1]] == 0).tolist()
        for start, end, first, last, sees in zip(ends, ends[1:], key_ends, key_ends[1:], is_seen, strict=False):
            is_causal = sees and end - start in (1, last - first)
            slices = _slices(reads[first:last]) if reads is not None and is_causal and end - start == 1 else []
            fields["spans"].append((slice(start, end), slice(first, last), is_causal, slices))
    spans: list[_Span] = fields["spans"]
    return spans


def _slices(reads: Tensor) -> list[slice]:
    """Cut the rows of the blocks that a request reads into slices; none if there are too many."""
    cuts = [0, *((reads.diff() != 1).nonzero()[:, 0] + 1).tolist(), len(reads)]
    if not len(reads) or len(cuts) > MOST_SLICES + 1:
        return []
    return [slice(at, at + end - cut) for at, cut, end in zip(reads[cuts[:-1]].tolist(), cuts, cuts[1:], strict=False)]


def walk_requests(model: nn.Module) -> list[RemovableHandle]:
    """Let continuous batching of a model attend request by request, until the handles are removed."""

    def begins(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
        """Take the cache from a step's arguments: transformers 5.24 would update it before the attention function."""
        cache = next((value for value in (kwargs or {}).values() if isinstance(value, PagedAttentionCache)), None)
        if cache is None or model.config._attn_implementation != STOCK:
            return None
        register_attention(STOCK)
        others = {name: value for name, value in kwargs.items() if value is not cache}  # type: ignore[union-attr]
        return args, {**others, OVERRIDE: partial(attend_by_request, cache=cache)}

    modules = (module for layer in decoder_layers(model) for module in LayerInfo.of(layer).attention)
    return [module.register_forward_pre_hook(begins, with_kwargs=True) for module in modules]
