# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The chunk of the lowest access frequency times share of important tokens leaves first.

Source: IMPRESS (FAST 2025), score-based cache management. Differs: uses count half after a day instead of being
counted over a window, so that a score is a number that ages by itself; each use is weighed by the share of its own
request, and by 1 until that is reported.
"""

from .base import EvictionPolicy, add_use


class Importance(EvictionPolicy):
    """The score is the sum over the uses of the share of important tokens."""

    reads_importance = True

    def score(self, before: float, now_s: float, weight: float) -> float:
        """Count a use, or correct it by what was reported."""
        return add_use(before, now_s, weight)
