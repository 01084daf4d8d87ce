# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""F1 over the model's tokens, as CacheBlend published it, its yes and no rule included; never beside word F1."""

from .base import Score, f1, first_line, normalised


class SubwordF1(Score):
    """For comparison with published numbers only: depends on the tokenizer by up to 5 points.

    "Norway" counts as "No" here, and "Yes" behind a space does not count as "Yes": so the published numbers were made.
    Where each question has several lists of aliases, CacheBlend takes the first of each list. An empty prediction, at
    which the published script ends, scores 0.
    """

    def score(self, prediction: str, answer: str) -> float:
        """Overlap of tokens."""
        return f1(self._tokens(_published(first_line(prediction))), self._tokens(answer))

    def _tokens(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(normalised(text), add_special_tokens=False)
        return ids


def _published(text: str) -> str:
    if text.startswith(("Yes", "yes")):
        return "Yes"
    words = text.split()
    return "No" if words and words[0].startswith(("No", "no")) else text
