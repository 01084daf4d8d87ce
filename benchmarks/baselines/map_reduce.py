# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""MapReduce: each chunk is asked alone, then the question is asked over the answers."""

import time
from collections.abc import Sequence
from dataclasses import replace

from hf_blend.evaluation.methods.base import EvalMethod, Outcome
from hf_blend.evaluation.tasks.base import Sample
from hf_blend.model.anatomy import stock_cache


class MapReduce(EvalMethod):
    """The answers of the chunks stand where the chunks stood, one per line."""

    answers_together = False

    def answer(self, samples: Sequence[Sample], wanted: Sequence[Sequence[int]] | None = None) -> list[Outcome]:
        """Ask every chunk, then ask their answers; the time is until the first token of the last."""
        started = time.perf_counter()
        (sample,) = samples
        parts = [self._ask(replace(sample, chunks=(chunk,)), started) for chunk in sample.chunks]
        texts = tuple(tuple(self.tokenizer.encode(f"{one.text.strip()}\n", add_special_tokens=False)) for one in parts)
        last = self._ask(replace(sample, chunks=texts), started)
        tokens = len(self.prompt(sample).ids)
        work = sum(one.prompt_tokens for one in (*parts, last)) / tokens
        return [replace(last, charged_budget=work, prompt_tokens=tokens)]

    def _ask(self, sample: Sample, started: float) -> Outcome:
        return self.generate(self.inputs([sample]), stock_cache(self.model), None, started)[0]
