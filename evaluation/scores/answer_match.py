# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The same answer but for case, spaces around it and a full stop behind it."""

from ..answering import is_right
from .base import Score


class AnswerMatch(Score):
    """1 or 0; articles count."""

    def one(self, prediction: str, answer: str) -> float:
        """Whether both are the same."""
        return float(is_right(prediction, answer))
