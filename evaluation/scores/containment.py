# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Whether the words of a right answer stand in the prediction, one behind the other, as SQuAD writes words."""

from .base import Score, normalised


class Containment(Score):
    """1 or 0; fair to a model that answers in whole sentences. All lines of the prediction count."""

    def score(self, prediction: str, answer: str) -> float:
        """Whether the answer is in there."""
        return float(f" {normalised(answer)} " in f" {normalised(prediction)} ")
