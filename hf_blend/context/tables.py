# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Rotary tables of a model at any positions, made by the model's own rotary modules.

Which module makes the table of which layer is found by watching one forward of a few tokens: the table that a layer is
handed is the very object that some module returned.
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..anatomy import LayerCall, decoder_layers, text_config
from ..calibrate import rotary_styles
from ..errors import UnsupportedModelError
from ..placement import input_device
from ..rotary.base import RotaryStyle
from ..rotary.tables import Table, rotary_table

PROBE_TOKENS = 3
MOVING = ("dynamic", "longrope")  # kinds of scaling whose frequencies depend on how long the prompt is

_known: WeakKeyDictionary[nn.Module, "TableSource"] = WeakKeyDictionary()


class TableSource:
    """Makes the rotary tables of every layer; one for each live model, from `TableSource.of`."""

    def __init__(
        self, styles: tuple[type[RotaryStyle], ...], makers: tuple[Callable[[Tensor], Any] | None, ...]
    ) -> None:
        """Keep what was found.

        Args:
            styles: rotary style of each layer.
            makers: for each layer, what makes its table from positions `[1, tokens]`; layers that share a table share
                the maker; None where a layer is handed none.
        """
        self.styles, self._makers = styles, makers

    @classmethod
    def of(cls, model: nn.Module) -> "TableSource":
        """Find where a model's tables come from.

        Args:
            model: a causal language model, probed at first use.

        Returns:
            Its source.

        Raises:
            UnsupportedModelError: a layer's keys do not turn by a table that can be made at will.
        """
        if model not in _known:
            _refuse_moving(model)
            _known[model] = cls(rotary_styles(model), _find_makers(model))
        return _known[model]

    @torch.no_grad()
    def tables(self, positions: Tensor) -> list[Table | None]:
        """Make tables.

        Args:
            positions: `[tokens]`, integers.

        Returns:
            For each layer (cos, sin), each `[tokens, width]`; the same object where layers share it; None where a
            layer is handed none.
        """
        made: dict[int, Table] = {}
        for maker in self._makers:
            if maker is not None and id(maker) not in made:
                cos, sin = rotary_table({"position_embeddings": maker(positions[None])}) or _no_table()
                made[id(maker)] = (cos[0], sin[0])
        return [None if maker is None else made[id(maker)] for maker in self._makers]


def _refuse_moving(model: nn.Module) -> None:
    found = str(getattr(text_config(model), "rope_parameters", None) or "")
    for kind in MOVING:
        if kind in found:
            raise UnsupportedModelError(
                f"the rotary frequencies of {type(model).__name__} depend on the prompt's length ({kind} scaling), "
                "but tables at fixed positions are wanted to move keys in a cache. Use a fresh prefill instead."
            )


def _find_makers(model: nn.Module) -> tuple[Callable[[Tensor], Any] | None, ...]:
    """Run a few tokens and see which module made what each layer was handed."""
    layers = decoder_layers(model)
    inner = {id(module) for layer in layers for module in layer.modules()}
    outer = [module for module in model.modules() if id(module) not in inner]
    makers: dict[int, Callable[[Tensor], Any]] = {}
    results: list[Any] = []  # kept alive, or their ids would be used again
    handed: dict[int, Any] = {}

    def made(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        results.append(result)
        makers[id(result)] = _maker(module, args, kwargs)

    def given(index: int) -> Callable[..., None]:
        def hook(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            handed[index] = LayerCall.bind(layer, args, kwargs).arguments.get("position_embeddings")

        return hook

    with ExitStack() as stack, torch.no_grad():
        for module in outer:
            stack.callback(module.register_forward_hook(made, with_kwargs=True).remove)
        for index, layer in enumerate(layers):
            stack.callback(layer.register_forward_pre_hook(given(index), with_kwargs=True).remove)
        device = input_device(model)
        model.get_decoder()(input_ids=torch.zeros((1, PROBE_TOKENS), dtype=torch.long, device=device), use_cache=False)
    return tuple(_known_maker(model, index, handed.get(index), makers) for index in range(len(layers)))


def _known_maker(
    model: nn.Module, index: int, table: Any, makers: dict[int, Callable[[Tensor], Any]]
) -> Callable[[Tensor], Any] | None:
    if table is None:
        return None
    if id(table) not in makers:
        raise UnsupportedModelError(
            f"layer {index} of {type(model).__name__} is handed a rotary table that no module of the model returned, "
            "so it cannot be made for other positions. Use a fresh prefill instead of moving keys."
        )
    return makers[id(table)]


def _maker(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[Tensor], Any]:
    """The same call with other positions: those are the integer matrix among its arguments."""

    def make(positions: Tensor) -> Any:
        def swap(value: Any) -> Any:
            whole = isinstance(value, Tensor) and value.dim() == 2 and not value.is_floating_point()
            return positions.to(value.device) if whole else value

        return module(*map(swap, args), **{name: swap(value) for name, value in kwargs.items()})

    return make


def _no_table() -> Table:
    raise UnsupportedModelError(
        "a rotary module returned something else than (cos, sin), but these are wanted to move keys. Use a fresh "
        "prefill instead."
    )
