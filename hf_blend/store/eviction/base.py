# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What an eviction policy is given, and what it promises.

A score is one number for each object: seconds since 1970, or as many more as the uses of the object are worth. An
object begins with the time at which it was written. Promises, kept by tests that run over every policy found: the
lowest score leaves first; a score depends on the arguments alone, so that every process that uses a tier continues
where another stopped.
"""

import math
from abc import ABC, abstractmethod

__all__ = ["HALF_LIFE_S", "EvictionPolicy", "add_use"]

HALF_LIFE_S = 86_400.0  # after which a use counts half
_FORGOTTEN = 60  # half-lives


class EvictionPolicy(ABC):
    """Gives an object its next score when it is used."""

    reads_importance = False  # True: a request reports which share of a chunk's tokens was important

    @abstractmethod
    def score(self, before: float, now_s: float, weight: float) -> float:
        """Score an object by its score so far, the time, and what the use weighs.

        A use weighs 1 when it happens. When it is reported which share of the tokens was important in it, that comes
        as the correction: the share, less 1.
        """


def add_use(before: float, now_s: float, weight: float) -> float:
    """Add a use to a count of uses, each of which halves with every `HALF_LIFE_S` seconds.

    The count is kept as the time at which a single use would count as much, so it ages by itself: n uses at once are
    worth HALF_LIFE_S · log2(n) seconds.
    """
    age = (now_s - before) / HALF_LIFE_S
    if abs(age) > _FORGOTTEN:
        return max(before, now_s)
    worth = 1.0 + weight * 2.0**age
    return before + HALF_LIFE_S * math.log2(max(worth, 2.0**-_FORGOTTEN))
