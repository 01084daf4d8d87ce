# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The chunk that is used least often leaves first, recent uses counting more.

The frequency is that of `importance`: a sum that halves with every 512 uses of the tier. What differs between the two
is the share of important tokens alone.
"""

import math
from collections.abc import Mapping

from .base import EvictionPolicy, State

_DECAY = math.log(2) / 512  # of the frequency, per use of the tier


class Lfu(EvictionPolicy):
    """The score is the log of the frequency, moved to a time before the first use, when all decays are alike."""

    reads_importance = False

    def __init__(self) -> None:
        super().__init__()
        self._uses = 0

    def updated(self, state: State | None, stamp_s: float, important_ratio: float | None) -> State:
        """Log of the aged frequency, number of the use; a report of important tokens is no use."""
        if state is not None and important_ratio is not None:
            return state
        self._uses += 1
        now = _DECAY * self._uses
        high, low = (max(state[0], now), min(state[0], now)) if state else (now, -math.inf)
        return (high + math.log1p(math.exp(low - high)), float(self._uses))

    def restore(self, states: Mapping[str, State]) -> None:
        """As in `EvictionPolicy`; uses are counted on from the last one remembered."""
        super().restore(states)
        self._uses = max([self._uses, *(int(state[1]) for state in self._states.values())])
