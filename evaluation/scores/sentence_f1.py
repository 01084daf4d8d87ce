# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Harmonic mean of precision and recall of whole sentences: one that differs in a word is wrong."""

from .base import Score, f1


class SentenceF1(Score):
    """Sentences end in a full stop; case and spaces do not count, nor does their order."""

    def one(self, prediction: str, answer: str) -> float:
        """Overlap of both, sentence by sentence."""
        return f1(_sentences(prediction), _sentences(answer))


def _sentences(text: str) -> list[str]:
    found = (" ".join(one.lower().split()) for one in text.split("."))
    return [one for one in found if one]
