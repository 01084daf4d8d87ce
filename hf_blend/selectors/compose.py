# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Recompute the beginning of each chunk, then what another selector scores highest (sink repair and selection in one).

Source: EPIC (arXiv 2410.15332) for the beginnings, where chunks computed alone put attention sinks; PSR (2603.20218)
for putting such repairs in front of a selection.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from .. import plugins
from .base import Selector, TokenView, by_turns


class Compose(Selector):
    """Seeds, then the `inner` selector.

    Options: `inner` with `inner_options`, `seed_tokens` of each chunk, `per_chunk` (chunks take turns, each in
    proportion to its length, instead of competing).
    """

    defaults: ClassVar[Mapping[str, Any]] = {
        "inner": "kv-deviation",
        "inner_options": {},
        "seed_tokens": 1,
        "per_chunk": False,
    }

    def __init__(self, options: Mapping[str, Any], seed: int = 0) -> None:
        """See `Selector`; what the inner selector needs, this one needs."""
        super().__init__(options, seed)
        self._inner: Selector = plugins.load("selectors", self.options["inner"])(self.options["inner_options"], seed)
        for name in ("needs_kv", "needs_full_prefill", "needs_question"):
            setattr(self, name, getattr(self._inner, name))

    def score(self, view: TokenView) -> Tensor:
        """Ranks of the inner scores, those of the seeds above all others, `[batch, tokens]`."""
        scores = self._inner.score(view).to(view.reusable.device)
        if self.options["per_chunk"]:
            scores = by_turns(scores, view.chunk, view.chunk_tokens.clamp_min(1).float())
        count = scores.shape[1]
        order = torch.argsort(scores.masked_fill(~view.reusable, -torch.inf), dim=1, descending=True, stable=True)
        places = torch.arange(count, 0, -1, device=scores.device).expand_as(order)
        ranks = torch.zeros_like(scores, dtype=torch.float32).scatter(1, order, places.float())
        seeds = (view.offset < self.options["seed_tokens"]) & view.reusable
        return torch.where(seeds, 2.0 * count - view.offset, ranks)
