# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Which tokens are still computed: a sorted set of columns per batch entry, which shrinks from layer to layer.

`RowArguments` cuts what the model made for all tokens to them. The mask is, for eager, an additive one; for sdpa the
rows' `RowLines`, attended by blocks; for flex the model's block mask at the rows' columns. Flash attention has no mask
that could say where scattered rows are, and reads their positions as those of packed sequences: layers with scattered
rows go through sdpa, which is logged once.
"""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from ..errors import UnsupportedModelError
from ..model.anatomy import LayerCall, gather_rows
from ..model.attention import ROWS, STOCK, MadeLines, cut_block_mask, is_flash, register_attention, row_lines

logger = logging.getLogger(__name__)

Taken = Mapping[int, Tensor]  # number of rows → which of them are kept, `[batch, kept]`; all tokens first
_warned: set[str] = set()  # attention implementations of which a warning was logged


@dataclass
class Rows:
    """The rows of the hidden states, by their columns in the prompt.

    Batch entries with fewer rows than others repeat their first one: it is computed twice to the same result, and the
    outcome of an entry does not depend on its neighbours.
    """

    columns: Tensor
    filler: Tensor | None
    counts: tuple[int, ...]
    is_all: bool = False
    _moved: dict[torch.device, Tensor] = field(default_factory=dict, repr=False)

    @classmethod
    def of(
        cls, selected: Tensor, counts: Sequence[int] | None = None, is_alike: bool = False
    ) -> tuple["Rows", Tensor]:
        """Keep the selected columns, `[batch, columns]` → `[batch, kept]`; if alike, each entry keeps those of all."""
        if is_alike:
            selected = selected.any(dim=0, keepdim=True).repeat(selected.shape[0], 1)
            counts = None
        lengths = tuple(selected.sum(dim=1).tolist() if counts is None else counts)
        width = max(lengths)
        device = selected.device
        # Stable, so that the selected columns come first and in order
        index = torch.argsort(selected.view(torch.uint8), dim=1, descending=True, stable=True)[:, :width]
        if min(lengths) == width:
            return cls(index, None, lengths), index
        is_filler = torch.arange(width, device=device) >= torch.tensor(lengths, device=device)[:, None]
        index = torch.where(is_filler, index[:, :1], index).sort(dim=1).values
        is_repeated = torch.zeros_like(index, dtype=torch.bool)
        is_repeated[:, 1:] = index[:, 1:] == index[:, :-1]  # sorted, a row that equals the one before it
        return cls(index, is_repeated, lengths), index

    @classmethod
    def at(cls, numbers: list[list[int]], device: torch.device) -> "Rows":
        """Rows at columns that the host knows, as many in each entry."""
        rows = cls(torch.tensor(numbers).to(device), None, (len(numbers[0]),) * len(numbers))
        rows.numbers = numbers
        return rows

    @classmethod
    def every(cls, grid: Tensor) -> "Rows":
        """All columns of a `[batch, columns]` grid."""
        batch, width = grid.shape
        columns = torch.arange(width, device=grid.device).expand(batch, -1)
        return cls(columns, None, (width,) * batch, is_all=True)

    @cached_property
    def numbers(self) -> list[list[int]]:
        """The columns of each entry, repetitions included, known to the host; asks the device once."""
        numbers: list[list[int]] = self.columns.tolist()
        return numbers

    def keep(
        self, selected: Tensor, counts: Sequence[int] | None = None, is_alike: bool = False
    ) -> tuple["Rows", Tensor]:
        """Keep some of these rows as `of` does, `[batch, rows]` → `[batch, kept]`."""
        if self.filler is not None:
            selected = selected & ~self.filler
        rest, index = Rows.of(selected, counts, is_alike)
        if self.is_all:
            return rest, index
        return Rows(self.columns.gather(1, index), rest.filler, rest.counts), index

    def last(self, count: int) -> tuple["Rows", Tensor]:
        """Keep the last `count` rows, none of which is a repetition; otherwise as `keep`."""
        batch, width = self.columns.shape
        index = torch.arange(width - count, width, device=self.columns.device).expand(batch, -1)
        rest = Rows(self.columns[:, -count:], None, (count,) * batch)
        if "numbers" in vars(self):
            rest.numbers = [numbers[-count:] for numbers in self.numbers]
        return rest, index

    def take(self, grid: Tensor) -> Tensor:
        """The entries of a `[batch, tokens]` grid at these rows: `[batch, rows]`."""
        return grid if self.is_all else grid.gather(1, self.columns)

    def take_pair(self, states: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """The columns of K and V `[batch, heads, tokens, width]` at these rows: `[batch, heads, rows, width]` each."""
        if self.is_all:
            return states
        keys = gather_rows(states[0].transpose(1, 2), self.columns)
        values = gather_rows(states[1].transpose(1, 2), self.columns)
        return keys.transpose(1, 2), values.transpose(1, 2)

    def write_states(self, states: Sequence[Tensor], rows: Sequence[Tensor]) -> None:
        """Write K and V `[batch, heads, rows, width]` to these rows' columns of `[batch, heads, tokens, width]`."""
        device = states[0].device
        columns = self._moved.get(device)
        if columns is None:
            columns = self.columns[0] if self.columns.shape[0] == 1 else self.columns
            columns = columns.to(device)
            self._moved[device] = columns
        for into, new in zip(states, rows, strict=True):
            if columns.dim() == 1:  # of a single entry
                into.index_copy_(2, columns, new)
            else:
                into.scatter_(2, columns[:, None, :, None].expand_as(new), new)

    def behind(self, table: Tensor, tokens: int) -> Tensor:
        """Append the rows' part of a table, `[batch or 1, past + tokens, width]`, to it: layers read its last rows."""
        own = gather_rows(table[:, -tokens:], self.columns)
        return torch.cat((table.expand(own.shape[0], -1, -1), own), dim=1)


def highest(scores: Tensor, eligible: Tensor, counts: Sequence[int]) -> Tensor:
    """Mark the highest of the eligible scores of each batch entry, `[batch, rows]`; of equal ones the earlier."""
    marks = torch.zeros_like(eligible)
    if not any(counts):
        return marks
    lowest = torch.finfo(torch.float32).min  # still above -inf, the score of what is not eligible
    scores = scores.float().nan_to_num(nan=lowest, neginf=lowest)
    scores = torch.where(eligible, scores, float("-inf"))
    order = torch.argsort(scores, dim=1, descending=True, stable=True)[:, : max(counts)]
    if min(counts) == max(counts):
        return marks.scatter_(1, order, True) & eligible
    ranks = torch.arange(max(counts), device=scores.device)
    is_chosen = ranks < torch.tensor(counts, device=scores.device)[:, None]
    return marks.scatter_(1, order, is_chosen) & eligible


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
        self._takes_lines = self._is_flash or self._implementation == STOCK
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
            if name == call.mask_name or name not in call.arguments or not isinstance(value, (Tensor, tuple, list)):
                continue
            for known, of_rows, cut in self._arguments:
                if known is value and of_rows is rows:
                    call.arguments[name] = cut
                    break
            else:
                call.arguments[name] = _rows(value, taken)
                self._arguments.append((value, rows, call.arguments[name]))
        if not attends:
            return
        if self._is_flash and index not in self._handing_on:
            raise UnsupportedModelError(
                f"the attention of layer {index}, {type(call.layer).__name__}, was not found, so it cannot go "
                f"through sdpa instead of {self._implementation}. Load the model with attn_implementation='sdpa'."
            )

        # Layers with the same mask and window share what is cut
        is_kept = self._takes_lines and index in self._handing_on
        window = getattr(self._sources[index], "sliding_window", None)  # says how many keys a row of a mask has
        for known, of_rows, of_window, of_kept, cut in self._masks:
            if known is mask and of_rows is rows and of_window == window and of_kept == is_kept:
                made = cut
                break
        else:
            made = self._mask(index, rows, mask, window, is_kept)
            self._masks.append((mask, rows, window, is_kept, made))
        if is_kept:
            call.arguments[call.mask_name] = None
            call.arguments[ROWS] = made
        else:
            call.arguments[call.mask_name] = made

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
