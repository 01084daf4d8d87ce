# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Sparse decoding of one cache: the locks of each layer and request, rounds of assisted decoding, and metrics.

A step of one token selects blocks with its own query if its lock is due. In a round of assisted decoding, draft and
verification attend to the blocks that were selected before. The scores of all rows of the verification are kept until
the cache shows how many tokens were accepted; then the row of the last accepted one selects. If all were accepted, the
lock stays; if fewer, it is given up, and the next step selects again. With `draft_selects` the queries of the draft in
a round select the blocks of its verification (`SelectingDraft`).
"""

import math
import statistics
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from .. import plugins
from ..cache.blend_cache import BlendCache
from ..cache.layers import BlendLayer
from ..offload.layer import OffloadedLayer
from .away import AwayBlocks
from .blocks import BlockedLayer
from .config import MOST_STEP_TOKENS, SparseConfig
from .layout import Layout, cut_mask, is_cut, kept_mass
from .lock import Selection, SelectionLock, SparseMetrics

SelectedKV = tuple[Tensor, Tensor, Any]  # K, V and mask of the selected columns


@dataclass
class _Layer:
    kv: BlendLayer
    blocks: BlockedLayer
    locks: list[SelectionLock] = field(default_factory=list)
    scores: Tensor | None = None  # of a round, `[batch, rows, blocks]`


class SparseSession:
    """Sparse decoding of one cache."""

    def __init__(self, cache: BlendCache, config: SparseConfig, watch_mass: bool = False) -> None:
        self.config, self.metrics = config, SparseMetrics()
        self._cache, self._watch_mass = cache, watch_mass
        method = plugins.load("sparse.methods", config.method)(config.method_options)
        self.layers: dict[int, _Layer] = {}
        for index, layer in enumerate(cache.layers):
            if isinstance(layer, OffloadedLayer):
                self.layers[index] = _Layer(layer, AwayBlocks(layer, config, method, self.metrics))
            elif isinstance(layer, BlendLayer) and not layer.is_sliding:
                self.layers[index] = _Layer(layer, BlockedLayer(layer, config, method))
        self._masses: list[float] = []
        self.thread: int | None = None  # that generates
        self._past = self._rows = 0  # of the forward that runs, or of the round whose outcome is not known yet
        self._seen: dict[int, tuple[Selection, ...]] = {}  # by the target in this round
        self._drafted: dict[int, tuple[Selection, ...]] = {}  # by the draft, under the target's number of the layer
        self._selecting: SelectingDraft | None = None

    @property
    def kept_mass(self) -> float | None:
        """Mean share of attention that the selected blocks hold; None if it was not watched."""
        return statistics.fmean(self._masses) if self._masses else None

    def draft(self, num_layers: int, selects: bool = False) -> "Draft":
        """Make the view of a draft model with so many layers; with `selects` its queries select blocks."""
        if selects:
            self._selecting = SelectingDraft(self, num_layers)
        return self._selecting or Draft(self, num_layers)

    def owns(self, cache: Any) -> bool:
        """Whether a forward uses the session's cache; if so, its thread is remembered as the one that generates."""
        if cache is self._cache:
            self.thread = threading.get_ident()
        return cache is self._cache

    def begin_step(self, tokens: int) -> bool:
        """Called when a forward with so many new tokens begins. True if it is to be sparse."""
        if self._cache.is_expecting or self.config.share == 1:
            return self._see_all()
        self.settle_speculation()
        past = self.length
        if past == 0 or past + tokens < self.config.min_tokens or tokens > MOST_STEP_TOKENS:
            self.unlock()
            return self._see_all()
        self._past, self._rows, self._seen = past, tokens, {}
        for layer in self.layers.values():
            layer.blocks.begin()
        return True

    def _see_all(self) -> bool:
        self._forget_draft()
        for layer in self.layers.values():
            layer.blocks.release()
        return False

    def close(self) -> None:
        """End the session, and count the outcome of the last round."""
        self.settle_speculation()
        for layer in self.layers.values():
            layer.blocks.close()

    def end(self, failed: bool) -> None:
        """Called when a forward has ended."""
        for layer in self.layers.values():
            layer.blocks.settle()
        self._cache.report.sparse = vars(self.metrics)
        self._forget_draft()
        if failed or self._rows == 1:
            self._rows = 0
            return
        self.metrics.rounds += 1
        if self._drafted:
            self.metrics.compared_rounds += 1
            self.metrics.equal_rounds += all(self._seen.get(n) == drafted for n, drafted in self._drafted.items())
            self._drafted = {}

    def _forget_draft(self) -> None:
        """Forget the draft's selections of the last round."""
        if self._selecting is not None:
            self._selecting.scores.clear()

    def unlock(self) -> None:
        """Give up every selection."""
        for layer in self.layers.values():
            for lock in layer.locks:
                lock.unlock()

    def settle_speculation(self) -> None:
        """Keep or drop the selections, by how many tokens of the last round the cache has accepted."""
        accepted, rows, self._rows = self.length - self._past, self._rows, 0
        if not 1 <= accepted <= rows:
            return
        self.metrics.full_rounds += accepted == rows
        self.metrics.proposed += rows - 1
        self.metrics.accepted += accepted - 1
        for layer in self.layers.values():
            scores, layer.scores = layer.scores, None
            for row, lock in enumerate(layer.locks):
                if accepted < rows:
                    lock.unlock()
                if scores is None:
                    lock.age(accepted)
                else:
                    lock.get(lambda: layer.blocks.select(scores[row, accepted - 1], self._past), accepted)  # noqa: B023

    def selections(self, index: int) -> tuple[Selection, ...]:
        """The locked selections of a layer, one for each request; empty if a request has none."""
        selections = [lock.selection for lock in self.layers[index].locks] if index in self.layers else []
        chosen = [selection for selection in selections if selection is not None]
        return tuple(chosen) if len(chosen) == len(selections) else ()

    def select_kv(
        self, index: int, query: Tensor, key: Tensor, value: Tensor, mask: Any, name: str, scaling: float | None
    ) -> SelectedKV | None:
        """The K, V and mask that a layer attends to; None where it attends to its whole context.

        Shapes: query `[batch, heads, rows, head_dim]`, key `[batch, kv_heads, keys, head_dim]`, value `[batch,
        kv_heads, keys, value_dim]`.
        """
        layer = self.layers.get(index)
        if layer is None or key.shape[2] != layer.kv.length or layer.kv.visible is not None:
            return None
        cut = self._cut(index, layer, query, key, value, mask, name, scaling) if is_cut(mask, name) else None
        return cut or ((*layer.blocks.whole(), mask) if layer.blocks.is_away else None)

    def _cut(
        self, index: int, layer: _Layer, query: Tensor, key: Tensor, value: Tensor, mask: Any, name: str, scaling: Any
    ) -> SelectedKV | None:
        selections = self._selections(index, layer, query, key.shape[2] - query.shape[2])
        self._seen[index] = tuple(selections)
        if not selections:
            self.metrics.dense_steps += 1
            return None
        layout, keys, values = layer.blocks.attended(selections)
        if layer.blocks.is_away and query.shape[2] == 1:
            self._prefetch(layer, query, key.shape[2] - 1)
        if self._watch_mass and query.shape[2] == 1:
            keys_of_all = layer.blocks.whole()[0] if layer.blocks.is_away else key
            self._masses.append(kept_mass(query, keys_of_all, layout, scaling))
        cut = cut_mask(mask, layout, query, key.shape[2], name)
        return None if cut is NotImplemented else (keys, values, cut)

    def _selections(self, index: int, layer: _Layer, query: Tensor, past: int) -> Sequence[Selection]:
        if len(layer.locks) != query.shape[0]:
            layer.locks = [SelectionLock(self.config, self.metrics) for _ in range(query.shape[0])]
        for lock in layer.locks:
            if lock.selection is not None and lock.selection.tail > past:  # the context was cut
                lock.unlock()
        select = layer.blocks.select
        if query.shape[2] > 1:
            drafted = None if self._selecting is None else self._selecting.of(index)
            if drafted is not None and drafted.shape == (query.shape[0], layer.blocks.complete(past)):
                return [lock.get(lambda: select(drafted[row], past), 0) for row, lock in enumerate(layer.locks)]  # noqa: B023
            layer.scores = None if self._selecting else layer.blocks.scores(query, past)
            selections = [lock.selection for lock in layer.locks]
            return [selection for selection in selections if selection is not None] if all(selections) else []
        scores = layer.blocks.scores(query, past)[:, 0] if any(lock.is_due for lock in layer.locks) else None
        return [lock.get(lambda: select(scores[row], past)) for row, lock in enumerate(layer.locks)]  # type: ignore[index] # noqa: B023

    def _prefetch(self, layer: _Layer, query: Tensor, past: int) -> None:
        """Read ahead the blocks that this step's query would select, if a lock is due in the next step."""
        due = [lock.is_due for lock in layer.locks]
        if not self.config.lock or not any(due):
            return
        scores = layer.blocks.scores(query, past)[:, 0]
        locked = (lock.selection for lock in layer.locks)
        coming = [layer.blocks.select(scores[row], past) if due[row] else old for row, old in enumerate(locked)]
        layer.blocks.prefetch([selection for selection in coming if selection is not None])

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        return next((layer.kv.length for layer in self.layers.values()), 0)

    @property
    def is_due(self) -> bool:
        """Whether a lock is due in any layer."""
        locks = [lock for layer in self.layers.values() for lock in layer.locks]
        return not locks or any(lock.is_due for lock in locks)


class Draft:
    """The session's selections for a draft model; each of its layers takes those of a target layer as deep."""

    def __init__(self, session: SparseSession, num_layers: int) -> None:
        self._session = session
        last = max(1, num_layers - 1)
        targets = max(session.layers)
        self._target = [round(index * targets / last) for index in range(num_layers)]

    def owns(self, cache: Any) -> bool:
        """Whether a forward of the draft model is part of the session's generation."""
        return cache is not None and threading.get_ident() == self._session.thread

    def begin_step(self, tokens: int) -> bool:
        """Called when a forward of the draft model begins. True if it is to be sparse."""
        self._session.settle_speculation()
        return tokens <= MOST_STEP_TOKENS and self._session.config.share < 1

    def end(self, failed: bool) -> None:
        """The forward is over."""

    def select_kv(
        self, index: int, query: Tensor, key: Tensor, value: Tensor, mask: Any, name: str, scaling: float | None
    ) -> SelectedKV | None:
        """See `SparseSession.select_kv`; the selections are those of the target."""
        target = self._target[index]
        selections = self._session.selections(target)
        is_early = bool(selections) and key.shape[2] - query.shape[2] < max(selection.tail for selection in selections)
        if target in self._session.layers:
            self._session._drafted[target] = () if is_early else selections
        if not selections or is_early or len(selections) != query.shape[0] or not is_cut(mask, name):
            return None
        layout = Layout(selections, self._session.config.block_tokens)
        cut = cut_mask(mask, layout, query, key.shape[2], name)
        columns = layout.columns(key.shape[2]).to(key.device)
        taken = [torch.stack([states[row][:, columns[row]] for row in range(len(columns))]) for states in (key, value)]
        return None if cut is NotImplemented else (taken[0], taken[1], cut)


class SelectingDraft(Draft):
    """A draft model that attends to its whole context; its queries in a round select blocks for the verification.

    A block's score is its highest share of attention among the queries of the round. A layer of the target takes the
    scores of the draft's layer at the same depth.
    """

    def __init__(self, session: SparseSession, num_layers: int) -> None:
        super().__init__(session, num_layers)
        config = session.config
        method = plugins.load("sparse.methods", config.method)(config.method_options)
        self._keys = [SimpleNamespace() for _ in range(num_layers)]  # what is blocked of the draft's own cache
        self._blocks = [BlockedLayer(keys, config, method) for keys in self._keys]
        self.scores: dict[int, Tensor] = {}

    def begin_step(self, tokens: int) -> bool:
        """Called when a forward of the draft model begins. True if its queries are needed."""
        session = self._session
        is_long = session.length >= max(1, session.config.min_tokens - 1)
        return super().begin_step(tokens) and is_long and session.is_due

    def select_kv(
        self, index: int, query: Tensor, key: Tensor, value: Tensor, mask: Any, name: str, scaling: float | None
    ) -> SelectedKV | None:
        """Score blocks with the draft's queries; its attention stays as it is. See `SparseSession.select_kv`."""
        past = self._session.length
        if key.shape[2] <= past:  # a window
            return None
        old = self.scores.get(index)
        own = self._keys[index]
        own.keys, own.values, own.unchanged_tokens = key, value, 0 if old is None else past
        scores = block_shares(self._blocks[index].scores(query, past)).amax(dim=1)
        self.scores[index] = scores if old is None or old.shape != scores.shape else torch.maximum(old, scores)
        return None

    def of(self, target: int) -> Tensor | None:
        """The draft's scores for a layer of the target, `[batch, blocks]`; None if there are none."""
        near = min(self.scores, key=lambda index: abs(self._target[index] - target), default=None)
        return None if near is None else self.scores[near]


def block_shares(scores: Tensor) -> Tensor:
    """Scores `[batch, rows, blocks]` as shares of each row, so that rows can be compared."""
    always = scores.isinf()
    return scores.masked_fill(always, -math.inf).softmax(-1).masked_fill(always, math.inf)
