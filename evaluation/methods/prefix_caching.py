# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Only what stands at the very beginning is reused: the prefix, and the first chunk behind it if it was there before.

It computes what a full prefill computes, in two pieces: where its answers differ from a full prefill's, that is the
noise between equal computations. Kept K and V are handed to a new cache without a copy: a stock cache grows by
joining, so what is kept is never written to.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor
from transformers import Cache

from hf_blend.model.anatomy import cache_argument, full_cache, input_device

from ..tasks.base import Sample
from .base import EvalMethod, Outcome

MOST_KEPT = 64  # beginnings
KV = tuple[Tensor, Tensor]


class PrefixCaching(EvalMethod):
    """As serving engines do it, at the seams of pieces."""

    answers_together = False

    def answer(self, samples: Sequence[Sample], targets: Sequence[Sequence[int]] | None = None) -> list[Outcome]:
        """Continue the longest kept beginning, then keep those of this prompt."""
        (sample,) = samples
        prompt, inputs = self.prompt(sample), self.inputs(samples)
        beginning = next((kept for kept in self._beginnings(sample) if kept in self._kept), ())
        started = time.perf_counter()
        (outcome,) = self.generate(inputs, self._cache(beginning), targets, started)
        self.warm(samples)
        chunk_tokens = sum(map(len, prompt.chunks))
        reused = max(0, len(beginning) - len(prompt.prefix))
        counts = {"reused_tokens": len(beginning), "read_bytes": len(beginning) * self.token_bytes}
        return [replace(outcome, charged_budget=1 - reused / chunk_tokens, **counts)]

    def warm(self, samples: Sequence[Sample]) -> None:
        """Keep the beginnings of these prompts, as if each first chunk had stood first before."""
        for sample in samples:
            for beginning in self._beginnings(sample):
                self._keep(beginning)

    def _beginnings(self, sample: Sample) -> list[tuple[int, ...]]:
        """What a prompt begins with, the longest first."""
        prompt = self.prompt(sample)
        return [(*prompt.prefix, *prompt.chunks[0]), prompt.prefix]

    def _cache(self, beginning: tuple[int, ...]) -> Cache:
        """A cache that holds a kept beginning."""
        cache = full_cache(self.model)
        for index, (keys, values) in enumerate(self._kept.get(beginning, ())):
            cache.update(keys, values, index)
        return cache

    @cached_property
    def _kept(self) -> dict[tuple[int, ...], list[KV]]:
        return {}

    @torch.no_grad()
    def _keep(self, ids: tuple[int, ...]) -> None:
        if not ids or ids in self._kept:
            return
        while len(self._kept) >= MOST_KEPT:
            del self._kept[next(iter(self._kept))]
        cache = full_cache(self.model)
        self.model(
            torch.tensor([ids], device=input_device(self.model)), **cache_argument(self.model, cache), use_cache=True
        )
        self._kept[ids] = [(layer.keys, layer.values) for layer in cache.layers]
