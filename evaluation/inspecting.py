# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What happens inside one prompt when its chunks are reused: the measurements behind `hf-blend inspect`.

After CacheBlend (arXiv 2405.16444), figures 6 to 8: attention deviation against the recompute ratio, KV deviation of
the tokens, and the rank correlation of that deviation between neighbouring layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from hf_blend import BlendCache, ChunkStore, plugins
from hf_blend.config import BlendConfig
from hf_blend.errors import PromptError
from hf_blend.model.cache_keyword import cache_argument
from hf_blend.prefill.observing import AttentionObserver
from hf_blend.selectors.attention import Attention

from .answering import blend_config, inputs_of

RATIOS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0)
MASS = 0.9  # of attention, that a token's keys together have to hold


@dataclass(frozen=True)
class Inspection:
    """What was found in one prompt. Lists by layer, inner lists by reusable token."""

    tokens: list[str]
    columns: list[int]
    deviation: list[list[float]]
    rank_correlation: list[float | None]
    sparsity: list[float]
    chosen: dict[str, list[bool]]
    ratio: float
    attention_deviation: dict[str, float]
    selector: str


@dataclass(frozen=True)
class _Seen:
    """One run: K and V of each layer, the question's attention in each, and which columns were recomputed."""

    states: list[tuple[Tensor, Tensor]]
    attention: list[Tensor]
    chosen: list[int]


class Inspector:
    """Looks at one prompt of one model."""

    def __init__(
        self, model: nn.Module, tokenizer: Any, store: ChunkStore, pieces: dict[str, Any], with_attention: bool = True
    ) -> None:
        """Run a full prefill and full reuse."""
        self._model, self._tokenizer, self._store, self._pieces = model, tokenizer, store, pieces
        self._ids: list[int] = []
        self._rows = 0  # of the question, whose attention is kept
        full = self._run(BlendConfig(1.0, "full"))
        if not full.chosen:
            raise PromptError(f"nothing of {pieces!r:.80} can be reused. Give two chunks or more.")
        self.columns = full.chosen
        if with_attention:
            self._rows = len(self._ids) - full.chosen[-1] - 1
            full = self._run(BlendConfig(1.0, "full"))
        self._full = full
        self._reuse = self._run(BlendConfig(0.0, "none"))

    def look(self, selectors: Sequence[str] | None, ratio: float, ratios: Sequence[float] = RATIOS) -> Inspection:
        """Measure."""
        left_out = {"full", "none"}
        names = list(selectors or (name for name in plugins.describe("selectors") if name not in left_out))
        chosen = {name: set(self._run(blend_config(name, recompute_ratio=ratio)).chosen) for name in names}
        first = names[0] if selectors else BlendConfig.selector
        return Inspection(
            [self._tokenizer.decode([self._ids[column]]) for column in self.columns],
            self.columns,
            deviation := self.deviation(),
            [None, *(rank_correlation(*pair) for pair in pairwise(deviation))],
            [_sparsity(weights) for weights in self._full.attention],
            {name: [column in taken for column in self.columns] for name, taken in chosen.items()},
            ratio,
            {str(value): self._attention_deviation(blend_config(first, recompute_ratio=value)) for value in ratios},
            first,
        )

    @torch.no_grad()
    def _run(self, config: BlendConfig) -> _Seen:
        cache = BlendCache(self._model, self._store, config)
        attention: list[Tensor] = []

        def receive(layer: int, seen: Attention, weights: Tensor) -> None:
            attention.append(weights[0, :, -self._rows :])

        cache.observer = AttentionObserver(receive) if self._rows else None
        inputs = inputs_of(cache, self._tokenizer, self._pieces)
        self._model(**inputs, **cache_argument(self._model, cache), logits_to_keep=1)
        self._ids = inputs["input_ids"][0].tolist()
        layers: list[Any] = list(cache.layers)
        states = [(layer.keys, layer.values) for layer in layers]
        return _Seen(states, attention, (cache.report.chosen_columns or [[]])[0])

    def deviation(self) -> list[list[float]]:
        """By layer, for each reusable token, how far its stored K and V are from those of a full prefill."""
        rows = []
        for full, reuse in zip(self._full.states, self._reuse.states, strict=True):
            total = torch.zeros(len(self.columns))
            for true, stored in zip(full, reuse, strict=True):
                true, stored = (state[0, :, self.columns].float().cpu() for state in (true, stored))
                size = true.square().sum(dim=(0, 2)).mean().clamp_min(1e-20)
                total += (true - stored).square().sum(dim=(0, 2)) / size
            rows.append(total.sqrt().tolist())
        return rows

    def _attention_deviation(self, config: BlendConfig) -> float:
        got = self._run(config).attention
        pairs = zip(got, self._full.attention, strict=True)
        return fmean(float((own - full).norm() / full.norm()) for own, full in pairs)


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Spearman's correlation, equal values sharing their mean rank."""
    if any(max(values) - min(values) < 1e-5 for values in (first, second)):
        return None
    ranks = [_ranks(torch.tensor(values, dtype=torch.float64)) for values in (first, second)]
    return float(torch.corrcoef(torch.stack(ranks))[0, 1])


def _ranks(values: Tensor) -> Tensor:
    below = (values[:, None] > values).sum(dim=1)
    return below + ((values[:, None] == values).sum(dim=1) - 1) / 2


def _sparsity(weights: Tensor) -> float:
    """Mean over heads and rows of `[heads, rows, keys]` of the share of keys that holds `MASS`."""
    ordered = weights.sort(dim=-1, descending=True).values.cumsum(dim=-1)
    needed = (ordered < MASS).sum(dim=-1) + 1
    return float(needed.float().mean()) / weights.shape[-1]
