# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Rotary tables of a model at any positions, made by the model's own rotary modules.

One forward of a few tokens shows which module makes the table of which layer: a layer receives the very object that
the module returned. A layer that receives none may make its own.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..errors import PromptError, UnsupportedModelError
from ..model.anatomy import (
    LayerCall,
    decoder_layers,
    decoder_of,
    hooked,
    input_device,
    is_extended,
    keeps_nothing,
    refuse_other_states,
    stock_layers,
    text_config,
    windowed_layer,
)
from ..model.calibrate import rotary_styles
from ..rotary.base import RotaryStyle, Table, compose, own_table, rotary_table

PROBE_TOKENS = 5  # not the number of axes that some positions have
MOVING = ("dynamic", "longrope")  # kinds of scaling whose frequencies depend on how long the prompt is

Maker = Callable[[Tensor], Any]  # positions `[1, tokens]` → a table as the model's layers receive it

_known: WeakKeyDictionary[nn.Module, "TableSource"] = WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class TableSource:
    """Makes the rotary tables of every layer; `TableSource.of` keeps one for each live model."""

    styles: tuple[type[RotaryStyle], ...]
    makers: tuple[Maker | None, ...]

    @classmethod
    def of(cls, model: nn.Module, below_regime: bool = False) -> "TableSource":
        """Find where a model's tables come from; `below_regime`: frequencies may change with the length."""
        if not below_regime:
            _refuse_moving(model)
        if model not in _known:
            refuse_other_states(model, only_keys=True)
            _refuse_shared(model)
            styles = rotary_styles(model)
            makers = _find_makers(model)
            _refuse_without_table(model, styles, makers)
            _known[model] = cls(styles, makers)
        return _known[model]

    @property
    def rotates(self) -> bool:
        """Whether any layer rotates its keys."""
        return any(style.turns for style in self.styles)

    def rotations(self, old: Tensor, new: Tensor) -> list[Table | None]:
        """For each layer the table that rotates keys from old to new positions, `[tokens]` each; None: no rotation."""
        if torch.equal(old, new):
            return [None] * len(self.styles)
        made: dict[Any, Table | None] = {}
        rotations = []
        for layer, kind in enumerate(zip(self.styles, self.makers, strict=True)):
            if kind not in made:
                made[kind] = self.rotation(layer, old, new)
            rotations.append(made[kind])
        return rotations

    def rotation(self, layer: int, old: Tensor, new: Tensor) -> Table | None:
        """The table that rotates the keys of one layer, also if no position changes; None: it has none."""
        old_table = self.table(layer, old)
        new_table = self.table(layer, new)
        if old_table is None or new_table is None:
            return None
        return compose(self.styles[layer], old_table, new_table)

    def table(self, layer: int, positions: Tensor) -> Table | None:
        """The table with which the model rotates the keys of one layer at some positions, `[tokens]`; None: none."""
        maker = self.makers[layer]
        return None if maker is None else _made(maker, positions)


def counted_in_tokens(model: nn.Module, source: TableSource) -> str:
    """Why a model's attention measures distances in tokens, not in positions; empty if it does not."""
    if windowed_layer(model) is not None:
        return "this model attends within windows, which transformers measures in tokens"
    if not source.rotates:
        return "this model's attention falls off with the distance, which it measures in tokens"
    return "Self-Extend is active, which measures distances in tokens" if is_extended(model) else ""


@torch.no_grad()
def _made(maker: Maker, positions: Tensor) -> Table:
    try:
        table = rotary_table({"position_embeddings": maker(positions[None])})
    except IndexError as error:
        raise PromptError(
            f"a key is at position {int(positions.max())}, but the model's rotary table ends before it ({error}). "
            "Keep the sequence below that length."
        ) from error
    if table is None:
        raise UnsupportedModelError(
            f"a rotary module returned no (cos, sin) for {positions.numel()} positions, but these are expected to "
            "move keys. Use a fresh prefill instead."
        )
    cos, sin = table
    return cos[0], sin[0]


def _refuse_shared(model: nn.Module) -> None:
    """Refuse layers that look at the K and V of others: only the latter would be moved."""
    for index, layer in enumerate(stock_layers(text_config(model))):
        if keeps_nothing(layer):
            raise UnsupportedModelError(
                f"layer {index} of {type(model).__name__} keeps no K and V of its own, but keys of every layer are "
                "expected to be moved in a cache. Use a fresh prefill instead."
            )


def regime_tokens(model: nn.Module) -> int | None:
    """The longest prompt with the rotary frequencies of short ones; None if they do not depend on the length."""
    config = text_config(model)
    rope = getattr(config, "rope_parameters", None) or {}
    ends = []
    for kind in (rope, *rope.values()):  # one for all layers, or one for each type of layer
        if isinstance(kind, dict) and kind.get("rope_type") in MOVING:
            end = kind.get("original_max_position_embeddings") or config.max_position_embeddings
            ends.append(min(end, config.max_position_embeddings) - 1)
    return min(ends, default=None)


def _refuse_moving(model: nn.Module) -> None:
    parameters = str(getattr(text_config(model), "rope_parameters", None) or "")
    for kind in MOVING:
        if kind in parameters:
            raise UnsupportedModelError(
                f"the rotary frequencies of {type(model).__name__} depend on the prompt's length ({kind} scaling), "
                "but tables at fixed positions are expected to move keys in a cache. Use a fresh prefill instead."
            )


def _refuse_without_table(
    model: nn.Module, styles: tuple[type[RotaryStyle], ...], makers: tuple[Maker | None, ...]
) -> None:
    for index, (style, maker) in enumerate(zip(styles, makers, strict=True)):
        if maker is None and style.turns:
            raise UnsupportedModelError(
                f"layer {index} of {type(model).__name__} rotates its keys ({style.__name__}), but neither receives a "
                "rotary table nor makes one in a way that is known, so its keys cannot be moved. Use a fresh prefill."
            )


def _find_makers(model: nn.Module) -> tuple[Maker | None, ...]:
    """Run a few tokens to find the module that made the table of each layer."""
    layers = decoder_layers(model)
    inner = {module for layer in layers for module in layer.modules()}
    outer = [(None, module) for module in model.modules() if module not in inner]
    made: list[tuple[Any, Maker]] = []  # what modules outside of the layers returned, and how it is made again
    received: dict[int, dict[str, Any]] = {}
    thread = threading.get_ident()  # others may run the model meanwhile

    def note_result(_: None, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if threading.get_ident() == thread:
            made.append((result, partial(_make, module, args, kwargs)))

    def note_arguments(index: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if threading.get_ident() == thread:
            received[index] = LayerCall.bind(layer, args, kwargs).arguments

    ids = torch.zeros((1, PROBE_TOKENS), dtype=torch.long, device=input_device(model))
    with hooked(outer, note_result, behind=True), hooked(enumerate(layers), note_arguments), torch.no_grad():
        decoder_of(model)(input_ids=ids, use_cache=False)
    return tuple(_known_maker(model, index, received.get(index, {}), made) for index in range(len(layers)))


def _known_maker(
    model: nn.Module, index: int, arguments: dict[str, Any], made: list[tuple[Any, Maker]]
) -> Maker | None:
    """How the table of a layer is made; None where it has none."""
    table = arguments.get("position_embeddings")
    layer = decoder_layers(model)[index]
    if table is None:
        return None if rotary_table(arguments, layer) is None else partial(own_table, layer)
    for result, maker in reversed(made):
        if result is table:
            return maker
    raise UnsupportedModelError(
        f"layer {index} of {type(model).__name__} receives a rotary table that no module of the model returned, so it "
        "cannot be made for other positions. Use a fresh prefill instead of moving keys."
    )


def _make(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], positions: Tensor) -> Any:
    """Repeat a call with other positions, `[1, tokens]`: integer tensors, with several axes in models of images."""

    def replaced(value: Any) -> Any:
        if isinstance(value, Tensor) and value.dim() >= 2 and value.dtype in (torch.long, torch.int):
            return positions.to(value.device).expand(*value.shape[:-1], -1)
        return value

    new_args = [replaced(value) for value in args]
    new_kwargs = {name: replaced(value) for name, value in kwargs.items()}
    return module(*new_args, **new_kwargs)
