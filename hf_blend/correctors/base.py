# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What a corrector sees, and what it may change.

Promises, kept by tests that run over every corrector found: what was computed in this prompt is left as it is, to the
bit; what is changed is finite, and does not depend on the batch it is changed in.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from ..errors import ConfigError, suggest

KV = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class LayerView:
    """The new tokens of one layer, at the moment when its K and V are whole and nobody has looked at them yet.

    Attributes:
        layer: which layer.
        chunk: `[batch, columns]`, number of each token's chunk in its row; -1 where nothing stored may be changed.
        fresh: `[batch, columns]`, True where K and V were computed in this prompt.
        stored: (K, V) as stored, K realigned, `[batch, kv_heads, columns, head_dim]`; what stands where nothing is
            stored has no meaning.
        states: (K, V) of all, likewise; to be written in place, but only where not `fresh` and `chunk` is not -1.
        unturned: takes keys like `stored` and gives them as they would be at position 0, or back again with
            `unturned(keys, True)`; new tensors.
        charge: receives the FLOPs of what is computed.
    """

    layer: int
    chunk: Tensor
    fresh: Tensor
    stored: KV
    states: KV
    unturned: Callable[..., Tensor]
    charge: Callable[[float], None]

    @property
    def stale(self) -> Tensor:
        """`[batch, columns]`: what may be changed."""
        return ~self.fresh & (self.chunk >= 0)


class Corrector(ABC):
    """Changes stored K and V that are not recomputed."""

    is_active = True  # False: there is nothing to call
    defaults: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, options: Mapping[str, Any]) -> None:
        """Check what the user set, by name, numbers also as text, and fill it up with `defaults`."""
        self.options = {**self.defaults, **{name: self._number(name, value) for name, value in options.items()}}

    def _number(self, name: str, value: Any) -> float:
        if name not in self.defaults:
            raise ConfigError(
                f"{type(self).__name__} has no option {name!r} (got {value!r}). {suggest(name, self.defaults)}"
            )
        try:
            return float(value)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{type(self).__name__} has {name}={value!r}, expected a number, such as {self.defaults[name]}."
            ) from error

    @abstractmethod
    def correct(self, view: LayerView) -> None:
        """Write better K and V over those that are not fresh."""
