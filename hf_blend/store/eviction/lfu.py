# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The chunk that is used least often leaves first, recent uses counting more.

The frequency is that of `importance`. What differs between the two is the share of important tokens alone.
"""

from .base import EvictionPolicy


class Lfu(EvictionPolicy):
    """The score is the log of the frequency."""

    reads_importance = False

    def score(self, used_s: float, frequency: float, important_ratio: float) -> float:
        """The frequency."""
        return frequency
