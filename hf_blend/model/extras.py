# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Layers that keep something else than K and V of each token; extensions add them.

An extension has a module `extra_layers`, which registers what it adds. It is imported at the first call of
`layer_extensions`. A model with a layer that no extension knows is refused.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

from torch import nn

from .. import plugins

Spans = Sequence[tuple[slice, slice]]  # columns of an output, and where they are among those stored of a layer


class LayerExtra(Protocol):
    """A part of a decoder layer that keeps something of each token beside K and V."""

    @property
    def module(self) -> nn.Module:
        """The part."""

    @property
    def projections(self) -> Any:
        """Each has `module`, the linear module that computes it, and `width`, how much of it is stored."""

    def record(self, cache: Any, tokens: int) -> Any:
        """Note what it keeps of all tokens in calls with this cache, between `enter` and `leave` of what this gives.

        Behind the call its `states` are that, `[batch, tokens, width]`, or None.
        """


@dataclass(frozen=True)
class LayerExtension:
    """The layers that one extension adds.

    Attributes:
        states: the kinds of transformers' cache layers that it knows, less "Dynamic" and "Layer".
        find: gives of each decoder layer of a model what keeps something beside K and V, or None.
        make_layer: gives the layer for one of transformers; None: unknown.
    """

    states: tuple[str, ...]
    find: Callable[[nn.Module], Sequence[LayerExtra | None]]
    make_layer: Callable[[Any], Any]


_registered: list[LayerExtension] = []


def register(extension: LayerExtension) -> None:
    """Add the layers of an extension; called by its module `extra_layers`."""
    _registered.append(extension)


@cache
def layer_extensions() -> list[LayerExtension]:
    """The extensions that are installed."""
    plugins.extensions("extra_layers")
    return _registered


def extras_of(model: nn.Module, layers: int) -> list[LayerExtra | None]:
    """By decoder layer, the part that keeps something beside K and V; None for most."""
    extras: list[LayerExtra | None] = [None] * layers
    for extension in layer_extensions():
        extras = [mine or other for mine, other in zip(extras, extension.find(model), strict=True)]
    return extras
