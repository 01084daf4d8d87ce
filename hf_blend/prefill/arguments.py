# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The arguments of a layer that runs for some rows only: the rows' part of what the model made for all tokens.

The mask is, for eager, an additive one; for sdpa the rows' `RowLines`, attended by blocks; for flex the model's
block mask at the rows' columns. Flash attention has no mask that could say where scattered rows are, and reads
their positions as those of packed sequences: layers with scattered rows go through sdpa, which is logged once.
"""

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from ..errors import UnsupportedModelError
from ..model.anatomy import LayerCall, gather_rows
from ..model.attention import ROWS, STOCK, register_attention
from ..model.row_masks import MadeLines, cut_block_mask, is_flash, row_lines
from .rows import Rows

logger = logging.getLogger(__name__)

Taken = Mapping[int, Tensor]  # number of rows → which of them are kept, `[batch, kept]`; all tokens first
_warned: set[str] = set()  # attention implementations of which a warning was logged


class RowArguments:
    """Cuts the arguments of one forward's layers; what several layers are given is cut once for the same rows."""

    def __init__(
        self, config: Any, layers: Sequence[Any], past: int, width: int, handing_on: Collection[int] = ()
    ) -> None:
        """Prepare for one forward of a model with this config, of `width` columns behind `past` tokens.

        `layers` are those of the cache; `handing_on` are the numbers of `layers_handing_on`.
        """
        self._implementation = config._attn_implementation or "eager"
        # the cache layer whose K and V each layer attends to: the last of its kind, up to itself, that has any
        self._sources: list[Any] = []
        last: dict[str, Any] = {}
        layer_types = getattr(config, "layer_types", None) or [""] * len(layers)
        for kind, layer in zip(layer_types, layers, strict=False):
            if hasattr(layer, "sizes_behind"):
                last[kind] = layer
            self._sources.append(last.get(kind, layer))
        self._past = past
        self._width = width
        self._is_flash = is_flash(self._implementation)
        self._handing_on = handing_on
        register_attention(self._implementation)
        # What was cut, each with what it was cut from; few, so that they are searched one by one
        self._arguments: list[tuple[Any, Rows, Any]] = []
        self._masks: list[tuple[Any, Rows, int | None, bool, Any]] = []

    def cut(self, index: int, call: LayerCall, rows: Rows, mask: Any, attends: bool, taken: Taken) -> None:
        """Cut every argument of a call but the hidden states to the rows, and the model's mask for a layer.

        A tensor is per token where its second axis, or the third of four, has a number of entries that `taken` knows;
        rotary tables may come as a tuple.
        """
        for name, value in call.given.items():
            if name in call.arguments and name != call.mask_name and isinstance(value, (Tensor, tuple, list)):
                call.arguments[name] = self._cut_argument(value, rows, taken)
        if not attends:
            return
        if self._is_flash and index not in self._handing_on:
            raise UnsupportedModelError(
                f"the attention of layer {index}, {type(call.layer).__name__}, was not found, so it cannot go "
                f"through sdpa instead of {self._implementation}. Load the model with attn_implementation='sdpa'."
            )
        is_kept = self._takes_lines and index in self._handing_on
        made = self._cut_mask(index, rows, mask, is_kept)
        if is_kept:
            call.arguments[call.mask_name] = None
            call.arguments[ROWS] = made
        else:
            call.arguments[call.mask_name] = made

    def _cut_argument(self, value: Any, rows: Rows, taken: Taken) -> Any:
        """An argument's part for some rows; several layers are given the same one."""
        for known, of_rows, cut in self._arguments:
            if known is value and of_rows is rows:
                return cut
        cut = _rows(value, taken)
        self._arguments.append((value, rows, cut))
        return cut

    def _cut_mask(self, index: int, rows: Rows, mask: Any, is_kept: bool) -> Any:
        """A layer's mask for some rows; layers with the same mask and window share it."""
        window = getattr(self._sources[index], "sliding_window", None)  # says how many keys a row of a mask has
        for known, of_rows, of_window, of_kept, made in self._masks:
            if known is mask and of_rows is rows and of_window == window and of_kept == is_kept:
                return made
        made = self._mask(index, rows, mask, window, is_kept)
        self._masks.append((mask, rows, window, is_kept, made))
        return made

    def _mask(self, index: int, rows: Rows, model_mask: Any, window: int | None, is_kept: bool) -> Any:
        """The rows' lines of a mask, or a plain mask in the form that the model's attention takes."""
        keys, offset = self._past + self._width, 0  # all, but of a window
        if window is not None:
            keys, offset = self._sources[index].sizes_behind(self._past, self._width)
        if isinstance(model_mask, BlockMask):
            return cut_block_mask(model_mask, rows.columns, keys)
        if getattr(model_mask, "ndim", 0) == 4 and model_mask.shape[2] == rows.columns.shape[1] < self._width:
            # Gemma 4 has cut it: behind its last K and V only the rows that are asked for continue
            return MadeLines(model_mask) if is_kept else model_mask
        if self._is_flash and self._implementation not in _warned:
            _warned.add(self._implementation)
            logger.warning(
                "attention is %s, which cannot see scattered rows: layers that compute only some rows use sdpa",
                self._implementation,
            )
        window = window if self._is_flash else None  # of others the model's mask says it
        past = self._past - offset
        lines = row_lines(model_mask, rows.columns, past, keys, lambda: rows.numbers[0], window)
        if is_kept:
            return lines
        mask = lines.plain()
        if self._implementation == "eager" and model_mask is None:  # a boolean mask that a model made it expects
            return torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, torch.finfo(torch.float32).min)
        return mask

    @property
    def _takes_lines(self) -> bool:
        return self._is_flash or self._implementation == STOCK


def _rows(value: Any, taken: Taken) -> Any:
    """Take rows of a tensor, or of those in a tuple or list, that has a row for each of so many tokens.

    Heads may be as many as rows: the first count of `taken` is tried on all axes before the next.
    """
    if isinstance(value, (tuple, list)):
        return type(value)([_rows(item, taken) for item in value])
    if not isinstance(value, Tensor) or value.dim() < 2:
        return value
    for count, index in taken.items():
        if value.shape[1] == count:
            if index.shape[0] == 1:
                return value.index_select(1, index[0].to(value.device))
            return gather_rows(value, index)
        if value.dim() == 4 and value.shape[2] == count:  # by head: a factor of queries, a bias
            return gather_rows(value.transpose(1, 2), index).transpose(1, 2)
    return value
