# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What a selector sees, and what it promises.

Promises, kept by tests that run over every selector found: scores are finite, a function of the view and the options
alone, and independent of the batch they are computed in; so the chosen sets are deterministic, nested as the ratio
grows, and of exactly the asked size.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from ..errors import ConfigError, suggest

KV = tuple[Tensor, Tensor]


def _unavailable(*_: Any) -> Any:
    raise ConfigError("a selector asked for K and V, got none computed yet. Set needs_kv = True on its class.")


@dataclass(frozen=True)
class TokenView:
    """The tokens that flow through a layer, as a selector sees them. Nothing in it may be written.

    Attributes:
        layer: the layer at which the choice is made.
        columns: `[batch, tokens]`, where each token stands in the prompt.
        reusable: `[batch, tokens]`, True for tokens with stored KV that may be left as it is.
        chunk: `[batch, tokens]`, number of the token's chunk in its row; -1 where not reusable.
        offset: `[batch, tokens]`, place of the token in its chunk.
        chunk_tokens: `[batch, tokens]`, length of its chunk.
        fresh: (K, V) computed in this prompt, `[batch, kv_heads, tokens, head_dim]`, K rotated for the prompt's
            positions; None for a selector that declares `needs_kv = False`.
        stored: (K, V) from the store, K realigned to the same positions; equal to `fresh` where not reusable.
        full_prefill: computes (K, V) of every layer as a full prefill would have them, for all columns; for research.
        stored_at: stored (K, V) of a layer at the tokens of this view, realigned.
    """

    layer: int
    columns: Tensor
    reusable: Tensor
    chunk: Tensor
    offset: Tensor
    chunk_tokens: Tensor
    fresh: KV | None = None
    stored: KV | None = None
    full_prefill: Callable[[], Sequence[KV]] = _unavailable
    stored_at: Callable[[int], KV] = _unavailable

    @property
    def both(self) -> tuple[KV, KV]:
        """(fresh, stored); an error for a selector that declares that it needs neither."""
        return (self.fresh, self.stored) if self.fresh and self.stored else _unavailable()


class Selector(ABC):
    """Gives every reusable token a score; the fusor takes the highest."""

    needs_kv = True  # False: the choice needs no computed layer, so it is made before the first
    needs_full_prefill = False  # True: for research; costs as much as what blending saves
    defaults: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, options: Mapping[str, Any], seed: int = 0) -> None:
        """Check the options.

        Args:
            options: what the user set, by name; `defaults` fills in the rest.
            seed: for selectors that draw at random.

        Raises:
            ConfigError: an option does not exist.
        """
        for name in options:
            if name not in self.defaults:
                raise ConfigError(
                    f"{type(self).__name__} has no option {name!r} (got {options[name]!r}). "
                    f"{suggest(name, self.defaults)}"
                )
        self.options = {**self.defaults, **options}
        self.seed = seed

    def count(self, ratio: float, tokens: int) -> int:
        """How many of `tokens` reusable tokens are recomputed at a nominal `ratio`."""
        return min(tokens, math.ceil(round(ratio * tokens, 6)))  # 0.15 * 100 is a hair above 15 in floating point

    @abstractmethod
    def score(self, view: TokenView) -> Tensor:
        """Say how much each token should be recomputed.

        Args:
            view: the tokens.

        Returns:
            `[batch, tokens]` float32, higher first; what stands at tokens that are not reusable is ignored. Of equal
            scores the earlier token goes first.
        """


def squared_distance(fresh: Tensor, stored: Tensor) -> Tensor:
    """Sum of squares over heads and width of the difference of `[batch, heads, tokens, width]`: `[batch, tokens]`."""
    return (fresh.float() - stored.float()).square_().sum(dim=(1, 3))
