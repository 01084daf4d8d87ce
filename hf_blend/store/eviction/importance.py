# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The chunk of the lowest access frequency times share of important tokens leaves first.

Source: IMPRESS (FAST 2025), score-based cache management. Differs: the frequency is a sum that halves with every 512
uses of the tier instead of a count over a window, so that a score is a number that ages by itself and a heap stays in
order; chunks whose tokens were never weighed count as important throughout.
"""

import math

from .base import EvictionPolicy, State, frequency

_NEW_SHARE = 0.3  # of the newest measurement in the moving average of the important share
_LEAST_SHARE = 1e-3
_UNKNOWN = -1.0  # share of a chunk that was never weighed


class Importance(EvictionPolicy):
    """The score is log(frequency × share)."""

    def updated(self, state: State | None, stamp_s: float, uses: float, important_ratio: float | None) -> State:
        """Score, log of the aged frequency, share of important tokens."""
        used, share = (state[1], state[2]) if state else (-math.inf, _UNKNOWN)
        if important_ratio is not None:
            known = share if share >= 0 else important_ratio
            share = known + _NEW_SHARE * (important_ratio - known)
        if important_ratio is None or state is None:
            used = frequency(used, uses)
        return (used + (0.0 if share < 0 else math.log(max(share, _LEAST_SHARE))), used, share)
