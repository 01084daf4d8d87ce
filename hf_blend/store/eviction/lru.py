# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The least recently used chunk leaves first."""

from .base import EvictionPolicy


class Lru(EvictionPolicy):
    """The score is the time of the last use."""

    def score(self, before: float, now_s: float, weight: float) -> float:
        """Give the time of a use; a report is none."""
        return now_s if weight > 0 else before
