# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What an eviction policy is given, and what it promises.

Promises, kept by tests that run over every policy found: objects leave in the order of their scores, the lowest first;
a score depends on the arguments alone, so that every process that uses a tier continues where another stopped.
"""

from abc import ABC, abstractmethod

__all__ = ["EvictionPolicy"]


class EvictionPolicy(ABC):
    """Gives every object a score, which is made when it is used; the lowest leaves first."""

    reads_importance = True  # False: a request need not find out which share of a chunk's tokens was important

    @abstractmethod
    def score(self, used_s: float, frequency: float, important_ratio: float) -> float:
        """Score an object by when it was last used, how often, and what of it turned out to be important.

        `used_s` is in seconds since 1970; `frequency` is the log of the number of uses of which each counts half when
        the tier was used 512 times since, moved by a constant that is the same for all objects; `important_ratio` is a
        moving average of the share of its tokens that was important, 1 as long as no request has reported it.
        """
