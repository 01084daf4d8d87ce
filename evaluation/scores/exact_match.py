# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Exact match after SQuAD's normalisation, of the prediction's first line."""

from .base import Score, normalised, short_answer


class ExactMatch(Score):
    """1 or 0."""

    def score(self, prediction: str, answer: str) -> float:
        """Whether both are the same."""
        return float(short_answer(prediction, answer) == normalised(answer))
