# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Exact match after SQuAD's normalisation, of the prediction's first line."""

from .base import Score, first_line, normalised, yes_or_no


class ExactMatch(Score):
    """1 or 0."""

    def one(self, prediction: str, answer: str) -> float:
        """Whether both are the same."""
        said, right = normalised(yes_or_no(first_line(prediction))), normalised(answer)
        return float(said == right and (bool(said) or not answer.strip()))
