# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Only what stands at the very beginning is reused: the prefix, and the first chunk behind it if it was there before.

It computes what a full prefill computes, in two pieces: where its answers differ from a full prefill's, that is the
noise between equal computations.
"""

import copy
import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from transformers import DynamicCache

from ..tasks.base import Sample
from .base import Approach, Outcome

MOST_KEPT = 16  # caches of beginnings


class PrefixCaching(Approach):
    """As serving engines do it, at the seams of pieces."""

    answers_together = False

    def answer(self, samples: Sequence[Sample], wanted: Sequence[Sequence[int]] | None = None) -> list[Outcome]:
        """Continue the longest kept beginning."""
        (sample,) = samples
        prompt, inputs = self.prompt(sample), self.inputs(samples)
        beginnings = [(*prompt.prefix, *prompt.chunks[0]), prompt.prefix]
        known = next((one for one in beginnings if one in self._kept), ())
        started = time.perf_counter()
        cache = copy.deepcopy(self._kept[known]) if known else DynamicCache(config=self.model.config)
        (found,) = self.generate(inputs, cache, wanted, started)
        for beginning in beginnings:
            self._keep(beginning)
        chunk_tokens = sum(map(len, prompt.chunks))
        reused = max(0, len(known) - len(prompt.prefix))
        return [replace(found, charged_budget=1 - reused / chunk_tokens, reused_tokens=len(known))]

    @property
    def _kept(self) -> dict[tuple[int, ...], DynamicCache]:
        return self.__dict__.setdefault("_caches", {})

    @torch.no_grad()
    def _keep(self, ids: tuple[int, ...]) -> None:
        if not ids or ids in self._kept:
            return
        while len(self._kept) >= MOST_KEPT:
            del self._kept[next(iter(self._kept))]
        cache = DynamicCache(config=self.model.config)
        device = self.model.get_input_embeddings().weight.device
        self.model(torch.tensor([ids], device=device), past_key_values=cache, use_cache=True)
        self._kept[ids] = cache
