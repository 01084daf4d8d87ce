# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Sparse decoding of one cache: the locks of its layers, rounds of assisted decoding, and metrics.

A step of one token selects blocks with its own query if its lock is due. In a round of assisted decoding, draft and
verification attend to the blocks that were selected before. The scores of all rows of the verification are kept until
the cache shows how many tokens were accepted; then the row of the last accepted one selects. If all were accepted, the
lock stays; if fewer, it is given up, and the next step selects again.
"""

import threading
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from .. import plugins
from ..cache.blend_cache import BlendCache
from ..cache.layers import BlendLayer
from .blocks import BlockedLayer
from .config import MOST_STEP_TOKENS, SparseConfig
from .lock import Selection, SelectionLock, SparseMetrics
from .masks import cut_mask, is_cut

SelectedKV = tuple[Tensor, Tensor, Any]  # K, V and mask of the selected columns


@dataclass
class _Layer:
    kv: BlendLayer
    blocks: BlockedLayer
    lock: SelectionLock
    scores: Tensor | None = None  # of a round, `[batch, rows, blocks]`


class SparseSession:
    """Sparse decoding of one cache."""

    def __init__(self, cache: BlendCache, config: SparseConfig) -> None:
        self.config = config
        self.metrics = SparseMetrics()
        self._cache = cache
        method = plugins.load("sparse.methods", config.method)(config.method_options)
        self.layers: dict[int, _Layer] = {}
        for index, layer in enumerate(cache.layers):
            if isinstance(layer, BlendLayer) and not layer.is_sliding:
                blocks = BlockedLayer(layer, config, method)
                self.layers[index] = _Layer(layer, blocks, SelectionLock(config, self.metrics))
        self.thread: int | None = None  # that generates
        self._past = 0  # tokens before the forward that runs, or before the round whose outcome is not known yet
        self._rows = 0  # its new tokens

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        return next((layer.kv.length for layer in self.layers.values()), 0)

    def owns(self, cache: Any) -> bool:
        """Whether a forward uses the session's cache; if so, its thread is remembered as the one that generates."""
        if cache is self._cache:
            self.thread = threading.get_ident()
        return cache is self._cache

    def begin_step(self, tokens: int) -> bool:
        """Called when a forward with so many new tokens begins. True if it is to be sparse."""
        is_off = self._cache.is_prompt or self.config.share == 1
        if not is_off:
            self.settle_speculation()
            past = self.length
            is_off = past == 0 or past + tokens < self.config.min_tokens or tokens > MOST_STEP_TOKENS
        if is_off:
            for layer in self.layers.values():
                layer.lock.unlock()
            return False
        self._past = past
        self._rows = tokens
        self._cache.state.mark_inexact(past)
        for layer in self.layers.values():
            layer.blocks.begin()
        return True

    def end(self, failed: bool) -> None:
        """Called when a sparse forward has ended."""
        for layer in self.layers.values():
            layer.blocks.settle()
        self._cache.report.sparse = vars(self.metrics)
        if failed or self._rows == 1:
            self._rows = 0
        else:
            self.metrics.rounds += 1

    def close(self) -> None:
        """Count the outcome of the last round."""
        self.settle_speculation()

    def settle_speculation(self) -> None:
        """Keep or drop the selections, by how many tokens of the last round the cache has accepted."""
        accepted = self.length - self._past
        rows = self._rows
        self._rows = 0
        if not 1 <= accepted <= rows:
            return
        self.metrics.full_rounds += accepted == rows
        self.metrics.proposed += rows - 1
        self.metrics.accepted += accepted - 1
        for layer in self.layers.values():
            scores = layer.scores
            layer.scores = None
            if accepted < rows:
                layer.lock.unlock()
            if scores is None:
                layer.lock.age(accepted)
            else:
                layer.lock.get(partial(layer.blocks.select, scores[:, accepted - 1], self._past), accepted)

    def select_kv(
        self, index: int, query: Tensor, key: Tensor, value: Tensor, mask: Any, name: str
    ) -> SelectedKV | None:
        """The K, V and mask that a layer attends to; None where it attends to its whole context.

        Shapes: query `[batch, heads, rows, head_dim]`, key `[batch, kv_heads, keys, head_dim]`, value `[batch,
        kv_heads, keys, value_dim]`.
        """
        layer = self.layers.get(index)
        total = key.shape[2]
        if layer is None or total != layer.kv.length or layer.kv.visible is not None:
            return None
        if is_cut(mask, name):
            selection = self._selection(layer, query, total - query.shape[2])
            if selection is not None:
                keys, values = layer.blocks.attended(selection)
                columns = selection.columns(total, self.config.block_tokens)
                return keys, values, cut_mask(mask, columns, query, total, name)
        return None

    def _selection(self, layer: _Layer, query: Tensor, past: int) -> Selection | None:
        """What a forward attends to; None in a round before which nothing was selected."""
        batch, _, rows, _ = query.shape
        lock = layer.lock
        if lock.selection is not None and (lock.selection.tail > past or len(lock.selection.rows) != batch):
            lock.unlock()  # the context was cut, or has other requests
        if rows > 1:
            layer.scores = layer.blocks.scores(query, past)
            return lock.selection
        return lock.get(lambda: layer.blocks.select(layer.blocks.scores(query, past)[:, 0], past))


class Draft:
    """The session's selections for a draft model; each of its layers takes those of a target layer as deep."""

    def __init__(self, session: SparseSession, num_layers: int) -> None:
        self._session = session
        targets = max(session.layers)
        last = max(1, num_layers - 1)
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
        self, index: int, query: Tensor, key: Tensor, value: Tensor, mask: Any, name: str
    ) -> SelectedKV | None:
        """See `SparseSession.select_kv`; the selection is that of the target."""
        layer = self._session.layers.get(self._target[index])
        selection = None if layer is None else layer.lock.selection
        if selection is None or len(selection.rows) != query.shape[0] or not is_cut(mask, name):
            return None
        total = key.shape[2]
        if total - query.shape[2] < selection.tail:  # the draft is behind
            return None
        columns = selection.columns(total, self._session.config.block_tokens)
        index_of_all = columns[:, None, :, None].to(key.device)
        keys = key.gather(2, index_of_all.expand(-1, key.shape[1], -1, key.shape[3]))
        values = value.gather(2, index_of_all.expand(-1, value.shape[1], -1, value.shape[3]))
        return keys, values, cut_mask(mask, columns, query, total, name)
