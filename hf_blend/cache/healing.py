# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Healing: blended K and V become those of a full prefill, from left to right, while nobody waits.

A token's K and V are exact as soon as those of all tokens before it are. So blocks of tokens run through the stock
model behind the exact part of the cache, and their K and V take the place of the blended ones. After as much work as
one prefill the cache holds what stock's chunked prefill of the same ids leaves. At any moment before it can be used:
exact on the left, blended on the right.

The frontier is the first column that is not exact. The model is given a cache of twins: the twin of a layer shows only
what is before the frontier, and writes what comes to the layer itself. A window or a mixer's state no longer has its
first tokens, so its twin computes them again, from the first token on.
"""

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from ..errors import ConfigError
from ..model.anatomy import decoder_of
from ..model.author import Author, author_of, refuse_other_author
from ..model.cache_keyword import cache_argument
from ..model.identity.canonical import canonical
from ..model.own_cache import fitted
from ..model.placement import input_device
from .healable import Obstacle, refuse_other_rows, refuse_other_tokens
from .layers import BlendLayer, BlendSlidingLayer, Pair

BLOCK_TOKENS = 256  # in one forward; a multiple of the groups that share a scale in 8 and 4 bits


class RewritingTwin(DynamicLayer):
    """The twin of a layer that keeps all tokens: new K and V overwrite those of the layer, but for the exact ones."""

    begins_at_zero = False
    compares = False  # what comes is compared with what the layer holds

    def __init__(self, own: Any) -> None:
        super().__init__()
        self._own, self._start, self._exact, self._length, self.is_initialized = own, 0, 0, 0, True

    def snapshot(self) -> None:
        """Nothing: the layer itself copies its columns."""

    def restore(self, snapshot: None) -> None:
        """Nothing: the layer itself writes its columns back."""

    def begin(self, start: int, exact: int) -> None:
        """Expect tokens from column `start` on; the first `exact` columns stay as they are."""
        self._start = self._length = start
        self._exact = exact

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> Pair:
        """Write K and V, `[batch, kv_heads, rows, head_dim]`; gives all columns up to the last of them."""
        if self.compares:
            refuse_other_tokens(self._own, self._start, key_states, value_states)
        self._length = self._start + key_states.shape[2]
        pair: Pair = self._own.rewrite(self._start, key_states, value_states, self._exact)
        return pair

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Write the indexer's keys, `[batch, rows, width]`; gives those of all tokens up to the last of them."""
        keys: Tensor = self._own.rewrite_indexer(self._start, indexer_key_states, self._exact)
        return keys

    @property
    def indexer_position_ids(self) -> Any:
        """The positions of the tokens in front of the next one, which a model keeps beside the indexer's keys."""
        positions = self._own.indexer_position_ids
        return None if positions is None else positions[..., : self._start]

    @indexer_position_ids.setter
    def indexer_position_ids(self, positions: Tensor) -> None:
        """The layer itself has them."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that `query_length` new tokens see."""
        return self._length + query_length, 0

    def get_seq_length(self) -> int:
        """How many tokens are in front of the next one."""
        return self._length


class WindowTwin(BlendSlidingLayer):
    """The twin of a window; what the layer itself still holds of its tokens is overwritten there, too."""

    begins_at_zero = True
    compares = False

    def __init__(self, own: BlendSlidingLayer) -> None:
        super().__init__(own.sliding_window)
        self._own, self._exact = own, 0

    def begin(self, start: int, exact: int) -> None:
        """Expect tokens behind those that came; the first `exact` columns of the layer stay as they are."""
        self._exact = exact

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> Pair:
        """Append K and V, `[batch, kv_heads, rows, head_dim]`; gives all that the new tokens may look at."""
        if self.compares:
            refuse_other_tokens(self._own, self.length, key_states, value_states)
        self._own.rewrite(self.length, key_states, value_states, self._exact)
        return super().update(key_states, value_states)


@dataclass
class Frontier:
    """Up to which column the K and V of a cache are exact."""

    column: int | None = None  # the first one that is not exact; None: all are
    obstacles: set[Obstacle] = field(default_factory=set)  # what makes that they cannot be healed
    twins: list[Any] = field(default_factory=list)  # the layers that the model is given, once healing has begun
    reached: int = 0  # how many tokens have gone through the twins

    def blend(self, column: int) -> None:
        """Note that a prompt is blended: its first token without exact K and V is at `column`."""
        self.column = column if self.column is None else min(self.column, column)

    def crop(self, tokens: int) -> None:
        """Note that the cache was cropped to its first `tokens`."""
        if self.column is not None and tokens <= self.column:
            self.column = None
            self.restart()
        if not tokens:
            self.obstacles = set()

    def restart(self) -> None:
        """Begin with other twins: the layers no longer are as those that they were made for."""
        self.twins, self.reached = [], 0

    def rows_changed(self) -> None:
        """Note that the rows of the batch are others than before."""
        if self.column is not None:
            self.obstacles.add(Obstacle.ROWS)

    def left(self, tokens: int) -> int:
        """How many of a cache's tokens are not exact."""
        return 0 if self.column is None else tokens - self.column


def heal(cache: Any, ids: Tensor, tokens: int | None, author: Author) -> int:
    """Make more tokens of a cache exact, all of them if `tokens` is None; returns how many became exact.

    Shapes: ids `[batch, columns]`, of the first columns of the cache; what is behind them stays as it is. `author`: of
    the tokens, which the model is expected to be still behind each block.
    """
    frontier, length = cache.kv.frontier, Cache.get_seq_length(cache)
    refuse_other_rows(cache, ids)
    first: int = frontier.column
    group = max(getattr(layer, "group_tokens", 1) for layer in cache.layers)  # is packed once, of exact tokens
    stop = length if tokens is None else min(length, -(-(first + tokens) // group) * group)
    if ids.shape[1] < stop:
        stop = ids.shape[1] // group * group
    if not frontier.twins:
        frontier.twins = [_twin(layer) for layer in cache.layers]
        if hasattr(frontier.twins[0], "compares"):
            frontier.twins[0].compares = True
        begins_at_zero = any(getattr(twin, "begins_at_zero", False) for twin in frontier.twins)
        frontier.reached = 0 if begins_at_zero else first // group * group
    compared = frontier.reached  # ids before it did not go through layer 0
    while frontier.column < stop:
        end = min(frontier.reached + BLOCK_TOKENS, stop)
        with torch.inference_mode() if _is_inference(cache) else nullcontext():
            _heal_block(cache, ids[:, frontier.reached : end], author)
        frontier.reached, frontier.column = end, max(frontier.column, end)
    healed: int = frontier.column - first
    if getattr(frontier.twins[0], "compares", False):
        layer = cache.layers[0]
        cache.prompts.extend(ids[:, : frontier.column], max(compared, layer.length - layer.keys.shape[2]))
    if frontier.column == length:
        for own, twin in zip(cache.layers, frontier.twins, strict=True):
            if hasattr(own, "adopt"):  # a state holds every token, and is exact where all are
                own.adopt(twin)
        cache.kv.frontier = Frontier()
    return healed


def _heal_block(cache: Any, ids: Tensor, author: Author) -> None:
    """Run a block through the model behind the exact tokens; after a failure all is as it was before it."""
    frontier, model, device = cache.kv.frontier, cache.model, input_device(cache.model)
    start, stop = frontier.reached, frontier.reached + ids.shape[1]
    healable = [pair for pair in zip(cache.layers, frontier.twins, strict=True) if hasattr(pair[1], "begin")]
    before = [(own.copy_columns(start, stop), twin.snapshot()) for own, twin in healable]
    for _, twin in healable:
        twin.begin(start, frontier.column)
    decoder, exact = decoder_of(model), fitted(Cache, model)(layers=frontier.twins)
    positions = torch.arange(start, stop, device=device)[None].expand(len(ids), -1)
    try:
        with canonical(model):
            decoder(input_ids=ids.to(device), position_ids=positions, use_cache=True, **cache_argument(decoder, exact))
            if any(module.training for module in decoder.modules()):
                raise ConfigError(
                    f"tokens {start} to {stop} were healed while {type(model).__name__} was set to training mode, in "
                    "which it may drop out, but evaluation mode is expected. Heal again."
                )
        refuse_other_author(author, author_of(model), stop, "Heal again when it is what it was.")
    except BaseException:
        for (own, twin), (columns, state) in zip(healable, before, strict=True):
            own.paste(columns)
            twin.restore(state)
        raise


def _twin(own: Any) -> Any:
    """The twin of a layer; one that keeps nothing, as it shares the K and V of another, is its own."""
    if hasattr(own, "make_twin"):
        return own.make_twin()
    if isinstance(own, BlendSlidingLayer):
        return WindowTwin(own)
    return RewritingTwin(own) if isinstance(own, BlendLayer) else own


def _is_inference(cache: Any) -> bool:
    """Whether K and V of a cache were made in inference mode, so that they are written in it alone."""
    return any(getattr(layer, "is_inference", False) for layer in cache.layers)
