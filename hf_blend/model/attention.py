# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Attention for scattered rows, entered for one call at a time.

`RowMask` works inside the stock sdpa function already, but that function first copies K and V once per query head.
So the name of the model's attention is changed to ours when a layer has handed over its K and V, and changed back
when the attention function begins, which is the next thing that happens. Whoever else comes by in between, on another
thread, gets the stock function: without a `RowMask` ours is the stock one.

`AttentionCapture` uses the same door to see what a layer's attention is given: there queries and keys are normed and
rotated, for any family.
"""

import threading
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..errors import UnsupportedModelError
from .anatomy import decoder_layers, kv_groups
from .masks import RowMask
from .row_attention import attend
from .row_lines import PackedLines

STOCK, OURS, GLANCE = "sdpa", "hf_blend_rows_over_", "hf_blend_glance"  # OURS: before the name of the stock one
AttentionFn = Callable[..., tuple[Tensor, None]]  # what an attention function of transformers is

_detours: WeakKeyDictionary[nn.Module, tuple[list[nn.Module], list["AttentionOverride"]]] = WeakKeyDictionary()
_taking = threading.local()  # who takes the next attention call of this thread


class StopForward(Exception):
    """A layer has come as far as it should."""


def is_flash(implementation: str) -> bool:
    """Whether an attention implementation is one of flash attention, which transformers knows by its name too."""
    return "flash" in implementation


class AttentionOverride:
    """Sends the next attention call of a layer to `attend_rows`."""

    def __init__(self, layer: nn.Module) -> None:
        """Find the attention of a layer."""
        found = [module for module in layer.modules() if hasattr(module, "num_key_value_groups")]
        self._config = getattr(found[0], "config", None) if len(found) == 1 else None
        self.groups = kv_groups(layer)

    @classmethod
    def of_layers(cls, model: nn.Module) -> list["AttentionOverride"]:
        """One for each decoder layer, found once while these layers are the model's."""
        layers = decoder_layers(model)
        known, detours = _detours.get(model, (None, []))
        if known != layers:
            detours = [cls(layer) for layer in layers]
            _detours[model] = (layers, detours)
        return detours

    def __bool__(self) -> bool:
        """Whether the layer's attention was found."""
        return self._config is not None

    def open(self) -> None:
        """Take the next call; a layer whose attention is not found, or is not sdpa or flash, goes its own way."""
        name = "" if self._config is None else self._config._attn_implementation or ""
        if self._config is not None and not name.startswith(OURS) and (name == STOCK or is_flash(name)):
            if OURS + name not in ALL_ATTENTION_FUNCTIONS:
                AttentionInterface.register(OURS + name, attend_rows)
                AttentionMaskInterface.register(OURS + name, ALL_MASK_ATTENTION_FUNCTIONS[name])
            self._config._attn_implementation_internal = OURS + name

    def close(self) -> None:
        """Give the name back, if the call has not done so."""
        if self._config is not None and self._config._attn_implementation.startswith(OURS):
            self._config._attn_implementation_internal = self._config._attn_implementation.removeprefix(OURS)


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
    """The attention function of transformers, for a `RowMask`; for other masks and packed chunks the stock one.

    Shapes: query `[batch, heads, rows, head_dim]`, key `[batch, kv_heads, keys, head_dim]`, value `[batch, kv_heads,
    keys, value_dim]` → `[batch, rows, heads, value_dim]`.
    """
    stock = module.config._attn_implementation.removeprefix(OURS)
    module.config._attn_implementation_internal = stock
    if not isinstance(attention_mask, RowMask):
        take = ALL_ATTENTION_FUNCTIONS[stock]
        return take(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
    lines, given = attention_mask.lines, {"dropout": dropout, "scaling": scaling, **kwargs}
    if isinstance(lines, PackedLines) and kwargs.get("position_bias") is None:
        return _each_alone(ALL_ATTENTION_FUNCTIONS[stock], module, (query, key, value), lines, given)
    special = [name for name in ("position_bias", "softcap", "s_aux") if kwargs.get(name) is not None]
    if special and is_flash(stock):
        raise UnsupportedModelError(
            f"attention is {stock} with {' and '.join(special)}, but scattered rows go through sdpa, which has none. "
            "Load the model with attn_implementation='eager'."
        )
    if special:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    output = attend(query, key, value, attention_mask.lines, dropout, scaling)
    return output.transpose(1, 2).contiguous(), None


def _each_alone(
    take: AttentionFn, module: nn.Module, states: tuple[Tensor, ...], lines: PackedLines, given: dict[str, Any]
) -> tuple[Tensor, None]:
    """The model's own attention for each chunk of a pack, by the kernel that the chunk alone has."""
    outputs = [
        take(module, *(one[:, :, block.rows] for one in states), mask, **given)[0]
        for block, mask in zip(lines.blocks, lines.masks, strict=True)
    ]
    return torch.cat(outputs, dim=1), None


class AttentionCapture:
    """Gives the next attention call of a layer to somebody, whatever attention the model uses."""

    def __init__(self, layer: nn.Module, take: AttentionFn) -> None:
        """Find the config that a layer's attention reads its function from."""
        configs = {id(one.config): one.config for one in layer.modules() if hasattr(one, "config")}
        found = [config for config in configs.values() if hasattr(config, "_attn_implementation_internal")]
        self._config, self._take, self._before = (found[0] if len(found) == 1 else None), take, None

    def open(self) -> bool:
        """Take the next call; a layer whose attention is not found goes its own way."""
        if self._config is not None and self._config._attn_implementation != GLANCE:
            AttentionInterface.register(GLANCE, show_rows)
            AttentionMaskInterface.register(GLANCE, sdpa_mask)
            self._before = self._config._attn_implementation_internal
            _taking.glance, self._config._attn_implementation_internal = self, GLANCE
        return self._config is not None

    def close(self) -> None:
        """Give the name back, if the call has not done so."""
        if self._config is not None and self._config._attn_implementation == GLANCE:
            self._config._attn_implementation_internal = self._before
        _taking.glance = None

    def take(self, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        """Close, and pass the call on."""
        self.close()
        return self._take(*args, **kwargs)


def show_rows(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The attention function that an `AttentionCapture` stands behind; for another thread the stock one.

    Shapes: query `[batch, heads, rows, head_dim]`, key `[batch, kv_heads, keys, head_dim]`, value `[batch, kv_heads,
    keys, value_dim]` → `[batch, rows, heads, value_dim]`.
    """
    glance = getattr(_taking, "glance", None)
    take = sdpa_attention_forward if glance is None else glance.take
    return take(module, query, key, value, *args, **kwargs)
