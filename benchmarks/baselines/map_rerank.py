# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""MapRerank: each chunk is asked alone, and the answer that the model is surest of wins."""

import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from hf_blend.evaluation.methods.base import EvalMethod, Outcome
from hf_blend.evaluation.tasks.base import Sample
from hf_blend.model.anatomy import stock_cache


class MapRerank(EvalMethod):
    """Departs: sureness is the mean log-probability of the answer, where LangChain asks the model for a number."""

    answers_together = False

    def answer(self, samples: Sequence[Sample], wanted: Sequence[Sequence[int]] | None = None) -> list[Outcome]:
        """Ask every chunk, and time until the last has answered."""
        started = time.perf_counter()
        (sample,) = samples
        tries = []
        for chunk in sample.chunks:
            asked = [replace(sample, chunks=(chunk,))]
            cache = stock_cache(self.model)
            (first,) = self.generate(self.inputs(asked), cache, None, started)
            cache = stock_cache(self.model)
            (sure,) = self.generate(self.inputs(asked), cache, [first.ids], started)
            tries.append((_sureness(sure), sure))
        best = max(tries, key=lambda one: one[0])[1]
        spent = 1e3 * (time.perf_counter() - started)
        tokens = len(self.prompt(sample).ids)
        work = sum(one.prompt_tokens for _, one in tries) / tokens
        return [replace(best, ttft_ms=spent, charged_budget=work, prompt_tokens=tokens, logits=None)]


def _sureness(outcome: Outcome) -> float:
    if outcome.logits is None or not outcome.ids:
        return float("-inf")
    chances = outcome.logits.log_softmax(dim=-1)
    return float(chances.gather(1, torch.tensor(outcome.ids, device=chances.device)[:, None]).mean())
