# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The mixers of one blended forward: which rows they project, and what stands in for the others."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ..model.anatomy import LayerCall
from ..model.mixer import ActiveRows, Lay, Mixer, MixerPass, whole_arguments
from .rows import Rows


class MixerRows:
    """Enters the mixer of one layer after the other. A model without mixers is left alone."""

    def __init__(
        self, mixers: Sequence[Mixer | None], layers: Sequence[Any], tokens: int, padding: Tensor | None
    ) -> None:
        """Prepare for one forward.

        Shapes: padding `[batch, tokens]`.
        """
        self._mixers, self._layers = mixers, layers
        self._tokens, self._padding = tokens, padding
        self._index, self._whole, self._kept = -1, dict[str, Any](), list[Any]()
        self._pass: MixerPass | None = None

    def __getitem__(self, index: int) -> Mixer | None:
        """The mixer of a layer, None where it has none."""
        return self._mixers[index]

    def begin(self, index: int, call: LayerCall, lay: Lay, reached: Callable[[], None], keeps: bool) -> None:
        """A layer begins; nothing is entered yet."""
        self.leave()
        mixer = self._mixers[index]
        if mixer is None:
            return
        self._index, self._whole = index, dict(call.arguments)
        cache = next(value for value in call.arguments.values() if hasattr(value, "update_conv_state"))
        self._pass = MixerPass(mixer, cache, ActiveRows(None, self._tokens, {}), lay, reached, keeps)
        self._pass.enter()

    def take(self, call: LayerCall, rows: Rows | None) -> None:
        """The layer runs for some rows."""
        if self._pass is None or rows is None:
            return
        self._kept.append(dict(call.arguments))  # kept alive: they are told by their ids
        whole = whole_arguments(call.arguments, self._whole)
        self._pass.rows = ActiveRows(rows.columns, self._tokens, whole, self._padding)

    def emptied(self) -> "MixerRows":
        """For another forward over the same tokens and layers."""
        return MixerRows(self._mixers, self._layers, self._tokens, self._padding)

    def pause(self) -> None:
        """Another forward of the model begins inside this one."""
        if self._pass is not None:
            self._pass.leave()

    def resume(self) -> None:
        """The other forward is done."""
        if self._pass is not None:
            self._pass.enter()

    def leave(self) -> None:
        """The layer is done, or the forward failed."""
        if self._pass is not None:
            self._pass.leave()
        self._pass, self._whole, self._kept = None, {}, []

    def kept(self, index: int) -> Tensor | None:
        """What is stored of a layer's mixer for all tokens, `[batch, 1, tokens, width]`; None if it is not known."""
        states = None if self._pass is None or index != self._index else self._pass.states
        return None if states is None else states[:, None]

    def states(self) -> Any:
        """The state of the layer's mixer as it is, to be given back by `restore`."""
        return None if self._pass is None else self._layers[self._index].snapshot_mixer()

    def restore(self, states: Any) -> None:
        """The mixer ran as a look only: take its state back."""
        if states is not None:
            self._layers[self._index].restore_mixer(states)


def side_by_side(projections: Tensor) -> tuple[Tensor, Tensor]:
    """Projections in the place of K and of V, for selectors: `[batch, 1, tokens, width]` each."""
    return projections, projections


def keeps_keys(layer: Any) -> bool:
    """Whether a layer of a blend cache holds K and V."""
    return hasattr(layer, "sizes_behind")


def keeps_states(layer: Any) -> bool:
    """Whether a layer of a blend cache holds anything of each token, or a mixer's state."""
    return keeps_keys(layer) or hasattr(layer, "snapshot_mixer")


def at_layers_that_keep(ratios: dict[int, float], layers: Sequence[Any], with_keys: bool) -> dict[int, float]:
    """Move each check layer to the first one from there on at which there is something to compare."""
    keeps = keeps_keys if with_keys else keeps_states
    places = [index for index, layer in enumerate(layers) if keeps(layer)]
    moved = {layer: next((place for place in places if place >= layer), None) for layer in ratios}
    return {place: ratios[layer] for layer, place in sorted(moved.items()) if place is not None}
