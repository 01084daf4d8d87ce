# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The tensors of a saved `SequenceCache`, and the checks of tensors that come from a file.

`ids` and `origins` are `[cells]`: token ids, and the positions that the keys are rotated for. `active` is the number
of the active sequence. `sequence.N` is `[2, tokens]`: cells and positions of sequence N. `layer.N.k` and `.v` are
`[kv_heads, cells, width]`; with `kv_bits`, which is saved too, layers have the tensors of `PackedCells.parts`.
"""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from ..cache.quantised_layer import forms, is_grouping
from ..prompt.history import UNKNOWN
from ..store.chunk import Layout, has_usable_values
from ..store.tiers.base import EntryFault

END = 1 << 31  # of ids and positions
_SEQUENCE = re.compile(r"sequence\.(0|[1-9][0-9]{0,8})")


def sequences_of(state: Mapping[str, Tensor]) -> dict[int, Tensor]:
    """Cells and positions of each sequence, `[2, tokens]`."""
    matches = ((_SEQUENCE.fullmatch(name), row) for name, row in state.items())
    return {int(match[1]): row for match, row in matches if match}


def layer_of(state: Mapping[str, Tensor], index: int) -> dict[str, Tensor]:
    """The tensors of one layer, without its number in their names."""
    start = f"layer.{index}."
    return {name.removeprefix(start): tensor for name, tensor in state.items() if name.startswith(start)}


def check_state(state: Mapping[str, Tensor], layout: Layout, kv_bits: int | None) -> None:
    """Raise EntryFault for tensors that no cache of this layout saves."""
    cells, rows = state["ids"].numel(), sequences_of(state)
    expected: dict[str, tuple[tuple[int, ...], torch.dtype]] = {"active": ((), torch.int64)}
    expected |= dict.fromkeys(("ids", "origins"), ((cells,), torch.int64))
    expected |= {} if kv_bits is None else {"kv_bits": ((), torch.int64)}
    expected |= {f"sequence.{number}": ((2, row.shape[-1]), torch.int64) for number, row in rows.items()}
    for index, pair in enumerate(layout.layers if cells else ()):
        packed = state["layer.0.groups"].numel() if kv_bits else 0
        groups = state[f"layer.{index}.k.scale"].shape[1] if kv_bits else 0
        parts = forms(kv_bits, pair, (packed, groups, cells - packed))
        expected |= {f"layer.{index}.{name}": form for name, form in parts.items()}
    if {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()} != expected:
        raise EntryFault(
            "layout", f"names, shapes or dtypes of {len(state)} tensors are not those of this model's layers"
        )
    bounds = [(state["ids"], UNKNOWN, END), (state["origins"], 0, END), (state["active"], 0, END)]
    bounds += [(row[0], 0, cells) for row in rows.values()] + [(row[1], 0, END) for row in rows.values()]
    if not all(low <= int(values.min()) and int(values.max()) < end for values, low, end in bounds if values.numel()):
        raise EntryFault("values", f"of {cells} cells one holds a token or a position that cannot be")
    if any(len(row[0].unique()) < row.shape[1] for row in rows.values()):
        raise EntryFault("values", f"of {len(rows)} sequences one holds a cell twice")
    groups_of = {name: tensor for name, tensor in state.items() if name.endswith(".groups")}
    if not all(is_grouping(of, state[name.replace("groups", "k.scale")].shape[1]) for name, of in groups_of.items()):
        raise EntryFault("values", f"of {cells} cells one has the scales of a group that cannot be")
    floats = [tensor for name, tensor in state.items() if name.startswith("layer.") and tensor.is_floating_point()]
    if not all(map(has_usable_values, floats)):
        raise EntryFault("values", f"keys or values of {cells} cells are NaN, infinite or absurd")
