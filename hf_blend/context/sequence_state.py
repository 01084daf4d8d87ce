# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The tensors of a saved `SequenceCache`, and the checks of tensors that come from a file.

`ids` and `origins` are `[cells]`: token ids, and the positions that the keys are rotated for. `active` is the number
of the active sequence. `sequence.N` is `[2, tokens]`: cells and positions of sequence N. `layer.N.k` and `.v` are
`[kv_heads, cells, width]`.
"""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from ..prompt.pieces import UNKNOWN
from ..store.chunk import Layout, has_usable_values
from ..store.tiers.base import EntryFault

END = 1 << 31  # of ids and positions
_SEQUENCE = re.compile(r"sequence\.(0|[1-9][0-9]{0,8})")


def sequences_of(state: Mapping[str, Tensor]) -> dict[int, Tensor]:
    """Cells and positions of each sequence, `[2, tokens]`."""
    rows = {}
    for name, row in state.items():
        if match := _SEQUENCE.fullmatch(name):
            rows[int(match[1])] = row
    return rows


def check_state(state: Mapping[str, Tensor], layout: Layout) -> None:
    """Raise EntryFault for tensors that no cache of this layout saves."""
    _check_forms(state, layout)
    cells = len(state["ids"])
    _check_range("ids", state["ids"], UNKNOWN, END)
    _check_range("origins", state["origins"], 0, END)
    _check_range("active", state["active"], 0, END)
    for number, (row, positions) in sequences_of(state).items():
        _check_range(f"cells of sequence {number}", row, 0, cells)
        _check_range(f"positions of sequence {number}", positions, 0, END)
        if len(row.unique()) < len(row):
            raise EntryFault("values", f"sequence {number} has a cell twice")
    for name, tensor in state.items():
        if tensor.is_floating_point() and not has_usable_values(tensor):
            raise EntryFault("values", f"{name} is NaN, infinite or absurd")


def _check_forms(state: Mapping[str, Tensor], layout: Layout) -> None:
    """Refuse other names, shapes and dtypes than those of this layout."""
    cells = state["ids"].numel()
    expected: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "active": ((), torch.int64),
        "ids": ((cells,), torch.int64),
        "origins": ((cells,), torch.int64),
    }
    for number, row in sequences_of(state).items():
        expected[f"sequence.{number}"] = (2, row.shape[-1]), torch.int64
    for index, pair in enumerate(layout.layers if cells else ()):
        for name, (heads, width, dtype) in zip("kv", pair, strict=True):
            expected[f"layer.{index}.{name}"] = (heads, cells, width), dtype
    got = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()}
    if got != expected:
        raise EntryFault(
            "layout", f"names, shapes or dtypes of {len(state)} tensors are not those of this model's layers"
        )


def _check_range(what: str, values: Tensor, low: int, end: int) -> None:
    if values.numel() and not low <= int(values.min()) <= int(values.max()) < end:
        raise EntryFault("values", f"one of the {what} is not from {low} up to {end}")
