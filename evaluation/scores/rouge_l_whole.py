# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""ROUGE-L with stemming, of the whole prediction (rouge-score)."""

from .base import Rouge


class RougeLWhole(Rouge):
    """F-measure, for long summaries."""

    def score(self, prediction: str, answer: str) -> float:
        """Longest common subsequence of stems."""
        return self.f_measure(prediction, answer)
