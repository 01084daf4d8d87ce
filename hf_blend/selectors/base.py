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

import torch
from torch import Tensor

from ..errors import ConfigError, suggest
from .attention import Attention

KV = tuple[Tensor, Tensor]
LEAST_TOKENS = 6  # of its own that even the first token of a chunk counts as having; 4 to 16 do as well
GROWTH = 1.5  # power of what a token misses; 1 and 2 do nearly as well, 0 is `boundary`
Receive = Callable[[int, Attention, Tensor], None]  # index of a layer, what the question sees there, weights


def _unavailable(*_: Any) -> Any:
    raise ConfigError("a selector asked for K and V, got none computed yet. Set needs_kv = True on its class.")


def _no_question(*_: Any) -> Any:
    raise ConfigError("a selector asked what the question attends to. Set needs_question = True on its class.")


@dataclass(frozen=True)
class TokenView:
    """The tokens that flow through a layer, as a selector sees them. Nothing in it may be written.

    Attributes:
        layer: the layer at which the choice is made.
        columns: `[batch, tokens]`, the column of each token in the prompt.
        reusable: `[batch, tokens]`, True for tokens with stored KV that may be left as it is.
        chunk: `[batch, tokens]`, number of the token's chunk in its row; -1 where not reusable.
        offset: `[batch, tokens]`, index of the token in its chunk.
        chunk_tokens: `[batch, tokens]`, length of its chunk.
        pair: gives (fresh, stored) of K (0) or V (1), `[batch, kv_heads, tokens, head_dim]` each: what was computed in
            this prompt, K rotated for the prompt's positions, and what is stored, realigned to the same positions;
            equal where not reusable. An error for a selector that declares `needs_kv = False`.
        probe: for selectors with `needs_question`: runs the question alone over the stored KV of all chunks, charged.
            `probe(receive, layers, rows)` calls `receive` for some layers, increasing, and runs no further. With
            `rows`, no more than so many of the question's rows are computed, half of them its last.
        num_layers: how many layers the model has.
        weights: gives how much each token matters as far as it is known without computing, `[batch, columns]` float32;
            `weights(importance, words)` says what is multiplied, see `Plan.token_weights`. None: unknown.
    """

    layer: int
    columns: Tensor
    reusable: Tensor
    chunk: Tensor
    offset: Tensor
    chunk_tokens: Tensor
    pair: Callable[[int], tuple[Tensor, Tensor]] = _unavailable
    probe: Callable[..., None] = _no_question
    num_layers: int = 1
    weights: Callable[..., Tensor] | None = None

    def is_question(self, columns: Tensor) -> Tensor:
        """Which of some sorted columns are behind the last token with stored KV; a repeated column counts once.

        Shapes: `[batch, rows]` → the same.
        """
        last = torch.where(self.reusable, self.columns, -1).amax(dim=1, keepdim=True).to(columns.device)
        behind = columns > last
        if columns.shape[0] > 1:
            behind[:, 1:] &= columns[:, 1:] != columns[:, :-1]
        return behind

    def likely_error(self) -> Tensor:
        """How wrong each stored token probably is, by its place: `[batch, tokens]` float32, 0 where not reusable.

        What it misses, the tokens of chunks before its own up to the middle of that, over what it has, those of its
        own chunk before it.
        """
        starts = self.columns - self.offset
        first = torch.where(self.reusable, starts, starts.max()).amin(dim=1, keepdim=True)
        missing = (starts - first).float() + self.chunk_tokens / 2
        return torch.where(self.reusable, missing, 0) ** GROWTH / (self.offset + LEAST_TOKENS)

    def at_tokens(self, grid: Tensor) -> Tensor:
        """The entries of a `[batch, columns]` grid at the tokens of this view."""
        return grid.gather(1, self.columns.to(grid.device))


class Selector(ABC):
    """Gives every reusable token a score; those with the highest are recomputed."""

    needs_kv = True  # False: the choice needs no computed layer, so it is made before the first
    needs_question = False  # True: runs the question (`probe`), so that its choice depends on what follows the chunks
    defaults: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, options: Mapping[str, Any], seed: int = 0) -> None:
        """Check what the user set, by name, and fill it up with `defaults`; the seed is for those that draw."""
        for name in options:
            if name not in self.defaults:
                raise ConfigError(
                    f"{type(self).__name__} has no option {name!r} (got {options[name]!r}). "
                    f"{suggest(name, self.defaults)}"
                )
        typed = {name: self._typed(name, value) for name, value in options.items()}
        self.options = {**self.defaults, **typed}
        self.seed = seed

    def _typed(self, name: str, value: Any) -> Any:
        """Read a number or truth value that came as text, from a command line, by the type of its default."""
        kind = type(self.defaults[name])
        if not isinstance(value, str) or kind not in (bool, int, float):
            return value
        try:
            return {"true": True, "false": False}[value.lower()] if kind is bool else kind(value)
        except (KeyError, ValueError) as error:
            raise ConfigError(
                f"{type(self).__name__} has {name}={value!r}, expected a {kind.__name__}, such as "
                f"{self.defaults[name]!r}."
            ) from error

    def choice(self, name: str, choices: Sequence[Any]) -> Any:
        """Read an option that is one of some values, or refuse it."""
        value = self.options[name]
        if value not in choices:
            expected = " or ".join(f"{name}={choice!r}" for choice in choices)
            raise ConfigError(f"{type(self).__name__} has {name}={value!r}; give {expected}.")
        return value

    def count(self, ratio: float, tokens: int) -> int:
        """How many of `tokens` reusable tokens are recomputed at a nominal `ratio`."""
        return min(tokens, math.ceil(round(ratio * tokens, 6)))  # 0.15 * 100 is a hair above 15 in floating point

    @abstractmethod
    def score(self, view: TokenView) -> Tensor:
        """Say how much each token should be recomputed: `[batch, tokens]` float32, higher first.

        Scores of tokens that are not reusable are ignored. Of equal scores the earlier token goes first.
        """


def squared_distance(fresh: Tensor, stored: Tensor) -> Tensor:
    """Sum of squares over heads and width of the difference of `[batch, heads, tokens, width]`: `[batch, tokens]`."""
    return (fresh.float() - stored.float()).square_().sum(dim=(1, 3))
