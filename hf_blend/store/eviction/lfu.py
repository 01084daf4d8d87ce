# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The chunk that is used least often leaves first, recent uses counting more.

The frequency is that of `importance`: a sum that halves with every 512 uses of the tier. What differs between the two
is the share of important tokens alone.
"""

import math

from .base import EvictionPolicy, State

_DECAY = math.log(2) / 512  # of the frequency, per use of the tier


class Lfu(EvictionPolicy):
    """The score is the log of the frequency, moved to a time before the first use, when all decays are alike."""

    reads_importance = False

    def updated(self, state: State | None, stamp_s: float, uses: float, important_ratio: float | None) -> State:
        """Log of the aged frequency; a report of important tokens is no use."""
        if state is not None and important_ratio is not None:
            return state
        now = _DECAY * uses
        high, low = (max(state[0], now), min(state[0], now)) if state else (now, -math.inf)
        return (high + math.log1p(math.exp(low - high)),)
