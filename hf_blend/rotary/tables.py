# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The rotary tables that a model hands to its layers, as (cos, sin) of real numbers."""

from typing import Any

from torch import Tensor

Table = tuple[Tensor, Tensor]


def rotary_table(arguments: dict[str, Any]) -> Table | None:
    """Find the rotary table among the arguments of a decoder layer.

    Args:
        arguments: the layer's arguments by name, as `LayerCall` holds them.

    Returns:
        (cos, sin), each `[batch or 1, tokens, width]` as the model made them, scaling factors included; None where
        the layer is handed no table in a form that is understood.
    """
    table = arguments.get("position_embeddings")
    if isinstance(table, tuple | list) and len(table) == 2 and all(isinstance(part, Tensor) for part in table):
        cos, sin = table
        return (cos, sin) if cos.shape == sin.shape and cos.dim() == 3 and cos.is_floating_point() else None
    return None
