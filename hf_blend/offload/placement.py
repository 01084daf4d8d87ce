# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Where the K and V of each layer are kept, by the same maths with which accelerate places weights."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..errors import ConfigError

DISK = "disk"

Place = int | str  # a device as accelerate names it: a number for a GPU, "mps", "cpu" or "disk"
Shapes = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # of a layer's K and V, and their dtype


class LayerStates(nn.Module):
    """K and V of one layer as a module on the meta device, which accelerate can size and place."""

    def __init__(self, keys: tuple[int, ...], values: tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__()
        for name, shape in (("keys", keys), ("values", values)):
            empty = torch.empty(shape, dtype=dtype, device="meta")
            self.register_parameter(name, nn.Parameter(empty, requires_grad=False))

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return sum(states.numel() * states.element_size() for states in self.parameters())


def memory_budget(max_memory: Mapping[Place, int | str] | None) -> dict[Place, int]:
    """Bytes that may be used of each device, in the order in which accelerate fills them."""
    from accelerate.utils import get_max_memory

    try:
        return dict(get_max_memory(None if max_memory is None else dict(max_memory)))
    except ValueError as error:
        raise ConfigError(
            f"max_memory is {dict(max_memory or {})!r}, which accelerate refuses: {error}. Expected bytes for each "
            'device, such as {0: "4GB", "cpu": "16GB"}.'
        ) from error


def place_layers(layers: Mapping[int, Shapes], budget: Mapping[Place, int]) -> dict[int, Place]:
    """Let accelerate distribute the K and V of some layers over devices, host memory and disk.

    accelerate fills the devices in order and leaves room on the first, and in host memory, for the largest layer that
    is not there: the one at work. What fits nowhere goes to the disk.
    """
    from accelerate import infer_auto_device_map

    tree = nn.Module()
    for index, shapes in layers.items():
        tree.add_module(str(index), LayerStates(*shapes))
    memory: Any = dict(budget)
    found = infer_auto_device_map(tree, memory, [LayerStates.__name__], clean_result=False)
    places: dict[int, Place] = {int(name): place for name, place in found.items()}
    on_disk = sum(tree.get_submodule(str(index)).nbytes for index, place in places.items() if place == DISK)
    if on_disk > budget.get(DISK, on_disk):
        raise ConfigError(
            f"the K and V of {sum(place == DISK for place in places.values())} of {len(places)} layers, {on_disk:,} "
            f"bytes, go to the disk, but max_memory allows {budget[DISK]:,} there. Raise max_memory, or shorten the "
            "prompt."
        )
    return places
