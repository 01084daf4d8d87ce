# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What an eviction policy is given, and what it promises.

Promises, kept by tests that run over every policy found: an object leaves in the order of the scores; what a policy
gives depends on its arguments alone, so that every process that uses a tier continues where another stopped.
"""

import math
from abc import ABC, abstractmethod

__all__ = ["EvictionPolicy", "State", "frequency"]

State = tuple[float, ...]
_DECAY = math.log(2) / 512  # of a frequency, per use of the tier


class EvictionPolicy(ABC):
    """Gives every object a score that changes only when it is used; the lowest leaves first."""

    reads_importance = True  # False: a request need not find out which share of a chunk's tokens was important

    @abstractmethod
    def updated(self, state: State | None, stamp_s: float, uses: float, important_ratio: float | None) -> State:
        """Give what is remembered of an object after a use: numbers, always as many, of which the first is the score.

        `state` is that after the use before, None at the first; `stamp_s`, since 1970, grows from use to use, except
        at a first one; `uses` of objects of the tier there were, with this one. `important_ratio`, the share of its
        tokens that were important, tells of a use that was counted already; it is None at a use.
        """


def frequency(before: float, uses: float) -> float:
    """Count one more use: the log of a sum that halves with every 512 uses, moved to before the first use of the tier.

    There all decays are alike, so that the order of two objects changes only when one of them is used.
    """
    high, low = max(before, _DECAY * uses), min(before, _DECAY * uses)
    return high + math.log1p(math.exp(low - high))
