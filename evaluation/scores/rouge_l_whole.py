# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""ROUGE-L with stemming, of the whole prediction (rouge-score)."""

from functools import cached_property
from typing import Any

from hf_blend.errors import import_extra

from .base import Score


class RougeLWhole(Score):
    """F-measure, for long summaries."""

    @cached_property
    def scorer(self) -> Any:
        """The library's."""
        return import_extra(
            "rouge_score.rouge_scorer", extra="eval", wanted_by="ROUGE-L"
        ).RougeScorer(["rougeL"], use_stemmer=True)

    def one(self, prediction: str, answer: str) -> float:
        """Longest common subsequence of stems."""
        return float(self.scorer.score(answer, prediction)["rougeL"].fmeasure)
