# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The chunk of the lowest access frequency times share of important tokens leaves first.

Source: IMPRESS (FAST 2025), score-based cache management. Differs: the frequency is a sum that halves with every 512
uses of the tier instead of a count over a window, so that a score is a number that ages by itself; chunks whose tokens
were never reported count as important throughout.
"""

import math

from .base import EvictionPolicy

_LEAST_SHARE = 1e-3


class Importance(EvictionPolicy):
    """The score is log(frequency × share)."""

    def score(self, used_s: float, frequency: float, important_ratio: float) -> float:
        """Add the log of the share to that of the frequency."""
        return frequency + math.log(max(important_ratio, _LEAST_SHARE))
