# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The chunk that is used least often leaves first, recent uses counting more.

The frequency is that of `importance`. What differs between the two is the share of important tokens alone.
"""

import math

from .base import EvictionPolicy, State, frequency


class Lfu(EvictionPolicy):
    """The score is the log of the frequency."""

    reads_importance = False

    def updated(self, state: State | None, stamp_s: float, uses: float, important_ratio: float | None) -> State:
        """Log of the aged frequency; a report of important tokens is no use."""
        if state is not None and important_ratio is not None:
            return state
        return (frequency(state[0] if state else -math.inf, uses),)
