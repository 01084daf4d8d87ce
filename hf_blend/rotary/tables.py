# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The rotary tables with which a layer turns its keys, as (cos, sin) of real numbers.

Most models make one table and hand it to every layer. Some layers make their own, from positions that they are handed.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ..errors import PromptError

Table = tuple[Tensor, Tensor]

_parts = WeakIdKeyDictionary()  # layers that share a complex table share its parts, which are known by identity


def rotary_table(arguments: dict[str, Any], layer: nn.Module | None = None) -> Table | None:
    """Find the rotary table of a decoder layer.

    Shapes: (cos, sin), each `[batch or 1, tokens, width]`, scaling factors included; None where none is known.
    """
    table = arguments.get("position_embeddings")
    if table is None and layer is not None:
        table = own_table(layer, arguments.get("position_ids"))
    if isinstance(table, Tensor) and table.is_complex() and table.dim() == 3:
        return _parts.setdefault(table, (table.real, table.imag))
    if not isinstance(table, tuple | list) or len(table) != 2:
        return None
    cos, sin = table
    if not isinstance(cos, Tensor) or not isinstance(sin, Tensor) or cos.shape != sin.shape:
        return None
    return (cos, sin) if cos.dim() == 3 and cos.is_floating_point() else None


@torch.no_grad()
def own_table(layer: nn.Module, positions: Any) -> Any:
    """The table of a layer that makes its own: with a rotary module (Moshi) or a buffer of sines and cosines (GPT-J).

    Shapes: positions `[batch, tokens]` → (cos, sin), each `[batch, tokens, width]`.
    """
    if not isinstance(positions, Tensor) or positions.dim() != 2:
        return None
    for module in layer.modules():
        if isinstance(getattr(module, "inv_freq", None), Tensor):
            return module(module.inv_freq, positions.to(module.inv_freq.device))
        buffer = getattr(module, "embed_positions", None)
        if not isinstance(buffer, Tensor) or buffer.dim() != 2:
            continue
        if positions.device.type == "cpu" and int(positions.max()) >= len(buffer):  # elsewhere the look-up says it
            raise PromptError(
                f"a key is at position {int(positions.max())}, but the model's rotary buffer has {len(buffer)} "
                "positions. Keep the sequence below that length."
            )
        sin, cos = buffer.to(positions.device)[positions].chunk(2, dim=-1)
        return cos, sin
    return None
