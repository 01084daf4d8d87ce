# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""ROUGE-L with stemming, of the prediction's first line (rouge-score)."""

from .base import Rouge, first_line


class RougeL(Rouge):
    """F-measure. The first line alone counts, because models go on with the next dialogue; the cut decides much.

    A first line of nothing but spaces counts as published: it scores 0. Answers of a run come without such lines.
    """

    def score(self, prediction: str, answer: str) -> float:
        """Longest common subsequence of stems."""
        return self.f_measure(first_line(prediction), answer)
