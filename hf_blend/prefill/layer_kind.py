# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What a layer of the cache keeps of each token, as hooks on its part of a prefill.

A cache layer names its kind as the class attribute `prefill_kind`. For layers that keep something else than
K and V there are subclasses of `LayerKind`; the prefill itself knows these hooks only.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from ..model.anatomy import LayerCall
from ..rotary.tables import Table
from ..selectors.base import KV
from .context import PrefillContext
from .plan import PlacedChunk
from .rows import Rows


class RunningPrefill(Protocol):
    """What a layer may ask of the prefill that runs."""

    @property
    def context(self) -> PrefillContext:
        """All that the prefill works on."""

    @property
    def width(self) -> int:
        """How many new columns there are."""

    def layer_of(self, index: int) -> Any:
        """The layer of the cache to which a layer of the model writes."""

    def stored_chunks(self) -> list[PlacedChunk]:
        """The chunks of which something stored is used, now."""

    def is_compared(self, index: int) -> bool:
        """Whether what a layer keeps is compared with what is stored, or computed twice."""

    def check_stored(self, computed: Sequence[Tensor]) -> None:
        """Refuse chunks whose stored states at layer 0 are not what this model computes for these tokens here."""

    def stop_when_ready(self, name: str) -> None:
        """End a partial run of a layer when the last of the `parts` that it waits for has come."""


class LayerKind:
    """A layer that hands K and V of each token to the cache."""

    has_hooks = False  # whether a prefill calls the methods: a kind that overrides one has hooks
    has_keys = True  # False: it keeps no K and V
    has_states = True  # False: it keeps nothing at all
    attends = True  # False: it has no attention
    compares_keys = True  # False: at layer 0 it checks what is stored by something else
    # what a partial run of the layer waits for, see `RunningPrefill.stop_when_ready`
    parts: frozenset[str] = frozenset({"keys"})

    def __init_subclass__(cls) -> None:
        """Find out whether a prefill has anything to call."""
        methods = (name for name, member in vars(cls).items() if callable(member))
        cls.has_hooks = cls.has_hooks or not vars(LayerKind).keys().isdisjoint(methods)

    def enter(self, prefill: RunningPrefill, index: int, call: LayerCall, table: Table | None) -> Table | None:
        """Begin a layer with the arguments that the model gave it, and the rotary table among them.

        Returns that of the new tokens, `[batch or 1, tokens, width]` each; None where there is none.
        """
        return table

    def take_rows(self, prefill: RunningPrefill, call: LayerCall, rows: Rows) -> None:
        """The layer runs for these rows; `call` has their arguments."""

    def computed(self) -> KV | None:
        """What a layer without K and V keeps in their stead, of all new tokens, `[batch, 1, tokens, width]` each."""
        return None

    def snapshot(self, layer: Any) -> Any:
        """What a partial run of the layer would change beside K and V."""
        return None

    def restore(self, layer: Any, snapshot: Any) -> None:
        """Undo what a partial run has changed."""

    def pause(self) -> None:
        """Another forward of the model begins while this layer runs."""

    def resume(self) -> None:
        """The other forward is over."""

    def leave(self) -> None:
        """The layer is done, or the forward failed."""


class StatelessKind(LayerKind):
    """A layer that keeps nothing: it has no attention, or attends to the K and V of another layer."""

    has_keys = has_states = False
    parts = frozenset[str]()
