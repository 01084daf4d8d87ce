# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Attention for scattered rows, entered for one call at a time.

`RowMask` works inside the stock sdpa function already, but that function first copies K and V once per query head.
So the name of the model's attention is changed to ours when a layer has handed over its K and V, and changed back
when the attention function begins, which is the next thing that happens. Whoever else comes by in between, on another
thread, gets the stock function: without a `RowMask` ours is the stock one.
"""

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from .masks import RowMask, attend

STOCK, OURS = "sdpa", "hf_blend_rows"


class Detour:
    """Sends the next attention call of a layer to `attend_rows`."""

    def __init__(self, layer: nn.Module) -> None:
        """Find the attention of a layer.

        Args:
            layer: a decoder layer.
        """
        found = [module for module in layer.modules() if hasattr(module, "num_key_value_groups")]
        self._config = getattr(found[0], "config", None) if len(found) == 1 else None

    def open(self) -> None:
        """Take the next call; a layer whose attention is not found, or is not sdpa, goes its own way."""
        if self._config is not None and self._config._attn_implementation == STOCK:
            AttentionInterface.register(OURS, attend_rows)
            AttentionMaskInterface.register(OURS, sdpa_mask)
            self._config._attn_implementation_internal = OURS

    def close(self) -> None:
        """Give the name back, if the call has not done so."""
        if self._config is not None and self._config._attn_implementation == OURS:
            self._config._attn_implementation_internal = STOCK


def attend_rows(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function of transformers, for a `RowMask`; for any other mask the stock one.

    Args:
        module: the attention module.
        query: `[batch, heads, rows, head_dim]`.
        key: `[batch, kv_heads, keys, head_dim]`.
        value: `[batch, kv_heads, keys, value_dim]`.
        attention_mask: which keys each row sees.
        dropout: share of the weights that is dropped.
        scaling: of the scores.
        **kwargs: passed to the stock function.

    Returns:
        `[batch, rows, heads, value_dim]`, and no weights.
    """
    module.config._attn_implementation_internal = STOCK
    special = kwargs.get("position_bias") is not None or kwargs.get("softcap") is not None
    if special or not isinstance(attention_mask, RowMask) or attention_mask.shape[2] == 1:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    output = attend(query, key, value, attention_mask, dropout, scaling)
    return output.transpose(1, 2).contiguous(), None
