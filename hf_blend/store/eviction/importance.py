# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The chunk of the lowest access frequency times share of important tokens leaves first.

Source: IMPRESS (FAST 2025), score-based cache management. Differs: the frequency is a sum that halves with every 512
uses of the tier instead of a count over a window, so that a score is a number that ages by itself and a heap stays in
order; chunks whose tokens were never weighed count as important throughout.
"""

import math
from collections.abc import Mapping

from .base import EvictionPolicy, State

_DECAY = math.log(2) / 512  # of the frequency, per use of the tier
_NEW_SHARE = 0.3  # of the newest measurement in the moving average of the important share
_LEAST_SHARE = 1e-3
_UNKNOWN = -1.0  # share of a chunk that was never weighed


class Importance(EvictionPolicy):
    """The score is log(frequency × share), moved to a time before the first use, when all decays are alike."""

    def __init__(self) -> None:
        super().__init__()
        self._uses = 0

    def updated(self, state: State | None, stamp_s: float, important_ratio: float | None) -> State:
        """Score, log of the aged frequency, share of important tokens, number of the use."""
        if state is not None and important_ratio is not None:  # tells of a use that was counted already
            known = state[2] if state[2] >= 0 else important_ratio
            share = known + _NEW_SHARE * (important_ratio - known)
            return (_score(state[1], share), state[1], share, state[3])
        self._uses += 1
        now = _DECAY * self._uses
        frequency, share = (state[1], state[2]) if state else (-math.inf, _UNKNOWN)
        high, low = max(frequency, now), min(frequency, now)
        frequency = high + math.log1p(math.exp(low - high))
        return (_score(frequency, share), frequency, share, float(self._uses))

    def restore(self, states: Mapping[str, State]) -> None:
        """As in `EvictionPolicy`; uses are counted on from the last one remembered."""
        super().restore(states)
        self._uses = max([self._uses, *(int(state[3]) for state in self._states.values())])


def _score(frequency: float, share: float) -> float:
    return frequency + (0.0 if share < 0 else math.log(max(share, _LEAST_SHARE)))
